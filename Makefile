# `make demo` and `make test` do everything that a fresh machine with Python 3.11 needs.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Tests that share processes, or what is compiled, are in a group for one worker.
TWO_WORKERS := -n 2 --dist loadgroup
export KEOPS_VERBOSE := 0

.PHONY: demo test test-slow test-processors stress gpu-check check docs release bench format clean

demo: .venv/bench
	$(BIN)/python -m benchmarks demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(PYTEST) $(TWO_WORKERS) --require-keops -m "not slow"

# Processes that end, trainings and distributions: the gate runs them, too.
test-slow: .venv/ready
	OMP_NUM_THREADS=1 $(PYTEST) $(TWO_WORKERS) --require-keops -m slow

# What is about numbers, with two threads, and as on processors with other vector instructions.
TESTS := tests $(addprefix --ignore=tests/,benchmarks documentation examples)
test-processors: .venv/ready
	OMP_NUM_THREADS=2 $(PYTEST) $(TESTS)
	OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE $(PYTEST) $(TWO_WORKERS) $(TESTS)
	OMP_NUM_THREADS=1 MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(TWO_WORKERS) $(TESTS)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(PYTEST) $(TWO_WORKERS) $(TESTS)

# All pairs of kernels, structures, solvers, estimators, sizes, dtypes and inputs, thirty training steps each: hours.
stress: .venv/ready
	OMP_NUM_THREADS=1 $(PYTEST) $(TWO_WORKERS) tests/exact/test_stress.py --stress

gpu-check: .venv/ready
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "No CUDA device here.")'
	$(PYTEST) -m gpu
	$(BIN)/python -m benchmarks quality --only gpi.fit --device cuda
	$(BIN)/python -m benchmarks spatial-fit --n 100000 --n 1000000 --only "gpi.fit, from subsets" --device cuda
	$(BIN)/python -m benchmarks spatial --n 100000 --n 1000000 --device cuda
	$(BIN)/python -m benchmarks product --device cuda
	$(BIN)/python -m benchmarks step --device cuda

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Not --quiet: --strict would not count the warnings of failing code blocks and dead links.
docs: .venv/ready
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m tests.documentation.site site

# What users install: source and wheel, built and tried in an environment of their own, and all extras resolved.
release: .venv/ready
	rm -rf dist out/release
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv out/release
	out/release/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd out && release/bin/python -m gpy_iterative --version
	cd out && release/bin/python ../tests/documentation/installed.py
	out/release/bin/python -m pip install --quiet --dry-run --constraint constraints.txt "$$(ls dist/*.tar.gz)[keops,botorch,rivals]"

bench: .venv/ready
	$(BIN)/python -m benchmarks run --preset quick
	$(BIN)/python -m benchmarks render --preset quick

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv site out build dist *.egg-info

# The constraints pin what is installed; the package itself states lower bounds. The demo needs a part of it.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
.venv/bench: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[keops,bench]'
	touch $@

.venv/ready: .venv/bench
	$(INSTALL) '.[test,check,docs]'
	touch $@

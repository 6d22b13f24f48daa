# `make demo` and `make test` do everything that a fresh machine with Python 3.11 needs.
PYTHON ?= python3
BIN := .venv/bin
export KEOPS_VERBOSE := 0

.PHONY: demo test gpu-check check docs bench format clean

demo: .venv/ready
	$(BIN)/python -m benchmarks demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --require-keops

gpu-check: .venv/ready
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "No CUDA device here.")'
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks product --device cuda
	$(BIN)/python -m benchmarks step --device cuda

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

docs: .venv/ready
	$(BIN)/mkdocs build --strict --quiet

bench: .venv/ready
	$(BIN)/python -m benchmarks run --preset quick
	$(BIN)/python -m benchmarks render --preset quick

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv site out build *.egg-info

# The constraints pin what is installed; the package itself states lower bounds.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[keops,bench,test,check,docs]'
	touch $@

"""What is shipped: one version, a wheel with all of the package and nothing else, the gate that GitHub runs."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import gpy_iterative as gpi

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from what the repository holds, apart from it."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("gpy_iterative", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (path,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_its_types_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = ROOT / "gpy_iterative"
    assert files == {str(path.relative_to(ROOT)) for path in (*package.rglob("*.py"), package / "py.typed")}


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "gpy_iterative"
    assert metadata["Version"] == gpi.__version__
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "keops",
        "botorch",
        "bench",
        "rivals",
        "test",
        "check",
        "docs",
    }


@pytest.mark.slow
def test_the_wheel_imports_where_the_repository_is_not(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = (
        "import gpy_iterative as gpi; print(gpi.__file__, gpi.__version__, gpi.mlls.HutchinsonMarginalLogLikelihood)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        # KeOps' cache is rewritten by every process that ends, and cannot be read in that moment: a folder of its own.
        env={"PYTHONPATH": str(tmp_path), "KEOPS_VERBOSE": "0", "KEOPS_CACHE_FOLDER": str(tmp_path / "keops")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{tmp_path}/gpy_iterative/__init__.py {gpi.__version__}")


def test_the_version_is_semantic_and_cited() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?", gpi.__version__)
    assert f"\nversion: {gpi.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_github_runs_the_gate_and_nothing_else() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"^\s*- run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111

"""Each method stands alone: the package works without the folders of the others and their lines in the faces."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gpy_iterative"
METHODS = ("randomized", "laplace", "features", "quadruply")
FACES = ("kernels", "likelihoods", "mlls", "models", "prediction", "probes", "progress", "solvers", "truncation")
#: A process that has imported what the package needs, and a child of it for each folder that is named.
IMPORT_EVERYTHING = """
import importlib, os, pathlib, pkgutil, sys
import gpytorch
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        import gpy_iterative
        for _, name, _ in pkgutil.walk_packages(gpy_iterative.__path__, "gpy_iterative."):
            if name != "gpy_iterative.botorch":
                importlib.import_module(name)
        # Of all folders: an installed package finds for itself what this one lacks.
        imported = [name for name in sys.modules if name.startswith("gpy_iterative.")]
        pathlib.Path(folder, "imported").write_text(" ".join(imported))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{folder} does not work without the others")
"""


def without_lines_of(hidden: set[str], source: str) -> str:
    """A face without what it imports from some rooms."""
    tree, names = ast.parse(source), set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[1] in hidden:
            names |= {alias.asname or alias.name for alias in node.names}
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.ImportFrom) and node.module.split(".")[1] in hidden)
    ]
    listed = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    listed.elts = [element for element in listed.elts if element.value not in names]
    return ast.unparse(tree)


@pytest.mark.slow
def test_a_method_works_without_the_others(tmp_path: Path) -> None:
    for method in METHODS:
        package, hidden = tmp_path / method / "gpy_iterative", set(METHODS) - {method}
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", *hidden))
        for face in FACES:
            path = package / f"{face}.py"
            path.write_text(without_lines_of(hidden, path.read_text()))
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, *(str(tmp_path / method) for method in METHODS)],
        cwd=tmp_path,
        env={"KEOPS_VERBOSE": "0", "KEOPS_CACHE_FOLDER": str(tmp_path / "keops")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for method in METHODS:
        names = (tmp_path / method / "imported").read_text().split()
        assert {name.split(".")[1] for name in names} & set(METHODS) == {method}


@pytest.mark.parametrize("face", FACES)
def test_faces_define_nothing(face: str) -> None:
    tree = ast.parse((PACKAGE / f"{face}.py").read_text())
    assert ast.get_docstring(tree)
    kinds = [type(node) for node in tree.body[1:]]
    assert kinds == [ast.ImportFrom] * (len(kinds) - 1) + [ast.Assign]
    assert tree.body[-1].targets[0].id == "__all__"


ROOMS = sorted(path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: str(path.parent.relative_to(PACKAGE)))
def test_a_room_says_where_to_begin_and_what_it_may_import(path: Path) -> None:
    about = " ".join(ast.get_docstring(ast.parse(path.read_text())).split())
    named = re.findall(r"`([\w/]+(?:\.py|/))`", about)
    assert "may import" in about
    assert named
    assert [name for name in named if not (path.parent / name).exists() and not (PACKAGE / name).exists()] == []
    assert len(list(path.parent.glob("*.py"))) <= 16

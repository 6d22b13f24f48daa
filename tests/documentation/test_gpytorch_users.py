"""The tables of the page for GPyTorch users name what is there, on both sides."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import gpytorch
import pytest

import gpy_iterative as gpi

PAGE = Path(__file__).parents[2] / "docs" / "gpytorch_users.md"
TABLES = PAGE.read_text().partition("## Settings and what takes their place")[2].partition("## Traps")[0]
ROWS = [row.strip("| \n").split(" | ") for row in TABLES.splitlines() if row.startswith("|") and "---" not in row]
NAME = re.compile(r"(?:settings|mlls|models|kernels|prediction|preconditioners|solvers)(?:\.[A-Za-z_]\w*)+")


@pytest.mark.parametrize("name", sorted({name for theirs, _ in ROWS for name in NAME.findall(theirs)}))
def test_gpytorch_has_what_the_left_column_names(name: str) -> None:
    if name.startswith(("kernels.keops", "models.exact_prediction_strategies")):  # modules
        importlib.import_module(f"gpytorch.{name}")
    else:
        attrgetter(name)(gpytorch)


@pytest.mark.parametrize("name", sorted({name for _, ours in ROWS for name in NAME.findall(ours)}))
def test_we_have_what_the_right_column_names(name: str) -> None:
    attrgetter(name)(gpi)


def test_the_tables_were_found() -> None:
    assert {"settings.cg_tolerance", "mlls.ExactMarginalLogLikelihood"} <= {
        name for theirs, _ in ROWS for name in NAME.findall(theirs)
    }
    assert "models.IterativeLaplaceGP" in {name for _, ours in ROWS for name in NAME.findall(ours)}

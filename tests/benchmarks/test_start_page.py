"""The picture of the start page shows what is saved."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases.spatial_fit import FIT
from benchmarks.cases.spatial_rivals import CHOLESKY
from benchmarks.cases.start_page import drawn
from benchmarks.plots import plt

ROW = {"seconds": 2.0, "seconds_prediction": 1.0, "rmse": 0.1, "log_likelihood": 0.5}
SAVED = {
    "n=100 d=2": {FIT: ROW, CHOLESKY: ROW | {"seconds": 9.0}},
    "n=1000 d=2": {FIT: ROW, CHOLESKY: {"error": ["no"]}},
}


def test_points_are_rows_and_seconds_of_those_that_succeeded() -> None:
    figure = drawn(SAVED)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines["gpy_iterative"].get_xdata()) == [100, 1000]
    assert list(lines["gpy_iterative"].get_ydata()) == [3.0, 3.0]
    assert list(lines[CHOLESKY].get_xdata()) == [100]
    assert list(lines[CHOLESKY].get_ydata()) == [10.0]
    plt.close(figure)


def test_the_command_writes_the_picture_or_says_what_is_missing(tmp_path: Path) -> None:
    command = ["start-page", "--results", str(tmp_path), "--path", str(tmp_path / "start.svg")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "spatial-fit measures it" in result.output
    (tmp_path / "spatial_fit_2d.json").write_text(json.dumps({"outcomes": SAVED}))
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (tmp_path / "start.svg").exists()


@pytest.fixture(autouse=True)
def _no_figures_left() -> None:
    plt.close("all")

"""The spatial benchmark measures products of the matrix that it says, and shows them."""

import math

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases import spatial
from benchmarks.runner import Outcome

OPTIONS = {"s": 3, "lengthscale": 0.5, "tolerance": 1e-4, "repeats": 2}


@pytest.mark.parametrize("layout", list(spatial.Layout))
def test_points_lie_in_the_cube(layout: str) -> None:
    x = spatial.points(500, 3, layout)
    assert x.shape == (500, 3)
    assert x.abs().max() < 2.1


@pytest.mark.parametrize("layout", list(spatial.Layout))
def test_what_is_measured(layout: str) -> None:
    outcome = spatial.measure(n=2000, d=2, layout=layout, tiles_rows=1000, **OPTIONS)
    assert outcome["product_error"] < 2e-4
    assert outcome["is_extrapolated"]
    assert outcome["entries"] < 2000**2 / 2
    assert all(len(outcome[name]) == 2 for name in ("product", "kept", "tiles", "gradient"))


@pytest.mark.slow
def test_it_is_measured_on_a_device(device: torch.device) -> None:
    options = {"n": 600, "d": 1, "layout": "uniform", "tiles_rows": 600, **OPTIONS}
    assert spatial.measure(**options, device=str(device))["product_error"] < 2e-4


def test_no_far_field_is_told() -> None:
    torch.manual_seed(0)
    outcome = spatial.measure(n=200, d=3, layout="uniform", tiles_rows=200, **OPTIONS)
    assert outcome["measured_error"] is None
    assert "product" not in outcome


def test_slopes_and_ratios() -> None:
    def outcome(scale: float) -> Outcome:
        times = {name: [scale, 2 * scale] for name in ("product", "kept", "gradient")} | {
            "tiles": [4 * scale, 4 * scale]
        }
        return {"setup": 1.0, "entries": 5, "product_error": 1e-6, "peak_memory_mb": 10.0, **times}

    assert spatial.ratio(outcome(1.0)) == 3.0
    shown = spatial.table({100: outcome(1.0), 1000: outcome(10.0)}, "title")
    assert [row[7] for row in shown.rows] == ["nan", "1.00"]
    assert math.isnan(spatial.best({}, "kept"))


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spatial, "finish", lambda *_, **__: None)
    run = {"far field": spatial.measure(n=1000, d=1, layout="uniform", tiles_rows=1000, **OPTIONS)}
    monkeypatch.setattr(spatial, "run_contenders", lambda *_, **__: run)
    result = CliRunner().invoke(app, ["spatial", "--n", "1000", "--d", "1"])
    assert result.exit_code == 0, result.output

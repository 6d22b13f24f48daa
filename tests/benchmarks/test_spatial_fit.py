"""The benchmark of spatial fits draws the field that it says, and shows how the fit ended."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases import spatial_fit

OPTIONS = {"test_rows": 100, "lengthscale": 0.5, "noise": 0.01, "layout": "uniform"}


def test_the_field_has_variance_one_and_the_kernel_correlation() -> None:
    split = spatial_fit.field(20_000, 2, **OPTIONS | {"lengthscale": 0.1})
    assert split.train_x.shape == (20_000, 2)
    assert len(split.test_y) == 100
    assert split.train_y.square().mean() == pytest.approx(1, abs=0.25)
    near = spatial_fit.field(1500, 1, **OPTIONS | {"noise": 1e-6})
    order = near.train_x[:, 0].argsort()
    steps = near.train_y[order].diff().square()
    gaps = near.train_x[order, 0].diff() / 0.5
    expected = 2 * (1 - (1 + 3**0.5 * gaps) * torch.exp(-(3**0.5) * gaps))  # of neighbours
    is_seen = expected > 1e-4
    assert (steps / expected)[is_seen].mean() == pytest.approx(1, abs=0.4)


def test_what_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = spatial_fit.fitted(n=300, d=2, **OPTIONS)
    assert outcome["status"] in ("CONVERGED", "NOISE", "BOUND")
    assert outcome["rmse"] < 0.4
    monkeypatch.setattr(spatial_fit, "finish", lambda *_, **__: None)
    monkeypatch.setattr(spatial_fit, "run_contenders", lambda *_, **__: {spatial_fit.FIT: outcome})
    result = CliRunner().invoke(app, ["spatial-fit", "--n", "300"])
    assert result.exit_code == 0, result.output
    assert "n=300" in result.output

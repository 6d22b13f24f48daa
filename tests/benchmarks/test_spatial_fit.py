"""The benchmark of spatial fits draws the field that it says, and shows how the fit ended and what rivals reach."""

import warnings
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases import spatial_fit, spatial_rivals
from benchmarks.cases.flights import RivalOptions
from benchmarks.cases.spatial_rivals import RIVALS
from benchmarks.runner import CONTENDERS

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
    asked: list[tuple[list[str], float | None]] = []

    def run(case: str, names: list[str], *, threads: int, seconds: float | None = None, **given: Any) -> dict:
        asked.append((names, seconds))
        times = {} if seconds is None else {"seconds": 0.2}
        return {name: {"peak_memory_mb": 1.0} | CONTENDERS[case][name](**given, **times) for name in names}

    monkeypatch.setattr(spatial_fit, "finish", lambda *_, **__: None)
    monkeypatch.setattr(spatial_fit, "run_contenders", run)
    monkeypatch.setattr(spatial_rivals, "RivalOptions", lambda: RivalOptions(num_inducing=20, rates=(0.01, 0.03)))
    with warnings.catch_warnings():  # what GPyTorch says of few inducing points and of a short fit is not ours
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, ["spatial-fit", "--n", "300", "--test-rows", "100", "--lengthscale", ".5"])
    assert result.exit_code == 0, result.output
    (fit, _), (rivals, seconds) = asked
    assert fit == [spatial_fit.FIT]
    assert rivals == list(RIVALS)
    assert seconds is not None
    assert seconds > 0
    for name in ("n=300", *RIVALS):
        assert name[:4] in result.output  # names are wrapped


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RIVALS))
def test_every_rival_learns_the_field(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spatial_rivals, "RivalOptions", lambda: RivalOptions(num_inducing=50, rates=(0.03,)))
    data = spatial_fit.field(400, 2, **OPTIONS | {"lengthscale": 2.0})
    outcome = RIVALS[name](data, 6.0)  # seconds: enough beside a busy process
    assert outcome["rmse"] < 0.4 * float(data.test_y.std())

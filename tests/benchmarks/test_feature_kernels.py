"""What the numbers of the feature kernels' benchmarks rest on."""

import math
from pathlib import Path

import gpytorch
import pytest
import torch

from benchmarks.cases import feature_kernels, feature_order, feature_step
from benchmarks.datasets import Split
from benchmarks.runs import Measured
from tests.exact.gaussian_models import data


def split() -> Split:
    x, y = data(80, dtype=torch.float32)
    return Split("data", x[:64], y[:64], x[64:], y[64:], target_scale=3.0)


@pytest.mark.parametrize("kernel", ["linear", "fourier"])
def test_training_reports_the_best_iterate_in_the_units_of_the_targets(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_kernels, "FREQUENCIES", 12)
    models = []
    make = feature_kernels.METHODS["natural"]
    outcome = feature_kernels.train(
        split(),
        lambda m, b, steps, s: models.append(m) or make(m, b, steps, s),
        kernel=kernel,
        batch_size=16,
        epochs=4,
        evaluations=4,
    )
    assert outcome["nlml"] == min(value for _, value in outcome["curve"])
    (model,) = models
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        model.train().double()
        x, y = split().train_x.double(), split().train_y.double()
        model.set_train_data(x, y, strict=False)
        value = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    # Targets of three times the scale: log 3 more for each datum.
    assert outcome["nlml"] == pytest.approx(-float(value) + math.log(3), abs=1e-4)
    assert outcome["rmse"] > 0


def test_full_batch_descends() -> None:
    outcome = feature_kernels.full_batch(split(), kernel="linear", steps=5, rate=0.01, seed=0)
    values = [value for _, value in outcome["curve"]]
    assert values == sorted(values, reverse=True)


def test_rows_of_the_table_and_picture(tmp_path: Path) -> None:
    outcome = {
        "nlml": -1.0,
        "rmse": 0.5,
        "nlpd": 0.25,
        "seconds_training": 60.0,
        "curve": [(1, 0.0), (2, -1.0)],
    }
    options = {"rows": None, "rate": 0.01, "batch_size": 128, "epochs": 2, "full_steps": 3}
    run = lambda method, split, kernel="linear": feature_kernels.planned_run(
        "bike", method, split, kernel=kernel, **options
    )
    found = [Measured(run("natural", 0), outcome), Measured(run("natural", 1), outcome | {"nlml": -2.0})]
    (cells,) = feature_kernels.table(found).rows
    assert cells[:4] == ["bike", "natural", "2", "-1.500 ± 0.500"]
    assert cells[4].split() == ["-1.340", "-1.358", "-0.832", "-1.311"]
    assert feature_kernels.table([Measured(run("natural", 0, "fourier"), outcome)]).rows[0][4] == ""
    found.append(Measured(run("full batch", 0), outcome))
    path = feature_kernels.draw_curves(found, tmp_path / "curves.svg")
    assert path.stat().st_size > 1000


def test_step_measures_every_size() -> None:
    for name in ("natural", "gradient", "scgd", "bsgd"):
        outcome = feature_step.measure(feature_step.METHODS[name], n=1200, m=8, batch_size=16, steps=3)
        assert 0 < outcome["least"] <= outcome["seconds"]


@pytest.mark.slow
def test_order_is_against_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, targets = data(80)
    monkeypatch.setattr(feature_order, "rows_of", lambda name: torch.cat([rows, targets.unsqueeze(-1)], -1).numpy())
    monkeypatch.setattr(feature_order, "ROWS", 80)
    monkeypatch.setattr(feature_order, "FEATURES", 8)
    monkeypatch.setattr(feature_order, "BATCH", 8)
    monkeypatch.setattr(feature_order, "METHODS", {name: feature_order.METHODS[name] for name in ("natural", "BSGD")})
    table = feature_order.order_table(epochs=60, rates=[0.05], seeds=1)
    excess = {entry["method"]: entry["excess"][0] for entry in table}
    assert 0 < excess["natural"] < 0.01 < excess["BSGD"]

"""Posterior functions beside BoTorch's: how their spread is judged, and that every contender has the exact one's."""

import pytest
import torch

from benchmarks.cases import paths
from benchmarks.datasets import Split
from tests.botorch_apart import path_samplers
from tests.monte_carlo import assert_within
from tests.oracles import problem


def test_accuracy_of_exact_draws_and_of_wrong_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, variance = torch.arange(20.0).double(), torch.linspace(0.1, 3, 20).double()
    draws = mean + variance.sqrt() * torch.randn(400, 20, generator=generator, dtype=torch.float64)
    found = paths.accuracy(draws.tolist(), mean.tolist(), variance.tolist())
    assert_within(found["mean_z"], 0.0, found["mean_z_sem"], max_sem=0.015)
    assert_within(found["mean_z2"], 1.0, found["mean_z2_sem"], max_sem=0.025)
    wrong = paths.accuracy((mean + 2 * (draws - mean) + variance.sqrt()).tolist(), mean.tolist(), variance.tolist())
    assert wrong["mean_z"] == pytest.approx(1 + 2 * found["mean_z"])
    assert wrong["mean_z2"] == pytest.approx(4 * found["mean_z2"] + 4 * found["mean_z"] + 1)


def test_every_contender_draws_from_the_exact_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *, rows: int, dtype: torch.dtype) -> Split:
        x, _, y = problem(rows)
        x, y = x.sigmoid(), (y - y.mean()) / y.std()  # as BoTorch asks
        return Split(name, x.to(dtype), y.to(dtype), x[:5].to(dtype) + 0.1, y[:5].to(dtype))

    monkeypatch.setattr(path_samplers, "load", load)
    monkeypatch.setattr(path_samplers, "FITTED_ROWS", 40)
    options = {"dataset": "any", "rows": 60}
    options["hyperparameters"] = path_samplers.hyperparameters(dataset="any")["values"]
    exact = path_samplers.exact(**options)
    assert list(path_samplers.METHODS) == list(paths.METHODS)
    for name in ("ours", "botorch, 16,384 features"):
        values = path_samplers.METHODS[name](num_paths=400, **options)["values"]
        found = paths.accuracy(values, exact["mean"], exact["variance"])
        assert_within(found["mean_z"], 0.0, found["mean_z_sem"], max_sem=0.05)
        assert_within(found["mean_z2"], 1.0, found["mean_z2_sem"], max_sem=0.05, floor=0.05)

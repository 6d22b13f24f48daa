"""Training to the optimum beside Adam's steps, on few data."""

import pytest
import torch

from benchmarks.cases import fit, quality, total
from benchmarks.datasets import Split
from benchmarks.runner import CONTENDERS
from tests.exact.gaussian_models import data

OPTIONS = {"dataset": "few", "split": 0, "rows": None}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred rows and twenty more in place of every data set."""
    x, y = data(220)
    y = y + 0.3 * torch.randn(220, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    split = Split("few", x[:200], y[:200], x[200:], y[200:])
    for module in (fit, quality, total):
        monkeypatch.setattr(module, "load", lambda *_, **__: split)


def test_both_train_the_same_model() -> None:
    ours, adam = fit.fitted(**OPTIONS, start="current"), fit.stepped(**OPTIONS, steps=5)
    assert ours["values"][0] == pytest.approx(adam["values"][0], abs=1e-5)
    assert ours["values"][-1] > adam["values"][-1]
    assert (ours["status"], len(ours["values"])) == ("CONVERGED", ours["steps"] + 1)
    assert len(adam["values"]) == adam["steps"] == 5
    assert ours["rmse"] > 0


@pytest.mark.parametrize("prefix", ["", quality.PATHWISE])
def test_quality_has_scores_of_both(prefix: str) -> None:
    contenders = CONTENDERS["quality"]
    adam = contenders[prefix + quality.ADAM](**OPTIONS, scales=False, steps=5, rate=0.1)
    ours = contenders[prefix + quality.FIT](**OPTIONS, scales=False)
    assert ours["log_likelihood"] > adam["log_likelihood"]  # five steps from 1 go nowhere
    for one in (ours, adam):
        assert one["seconds"] > 0
        assert one["seconds_prediction"] > 0
        assert one["variance_error"] < 0.1


@pytest.mark.parametrize("name", [total.FIT, total.FIT_PREPARED])
def test_total_scores_the_hyperparameters_on_the_way_of_a_fit(name: str) -> None:
    one = CONTENDERS["total"][name](**OPTIONS, every=2)
    steps, seconds, parameters = zip(*one["way"], strict=True)
    assert steps[-1] == one["steps_taken"]
    assert all(step % 2 == 0 for step in steps[:-1])
    assert list(seconds) == sorted(seconds)
    assert seconds[-1] <= one["seconds"]
    scores = CONTENDERS["total"][total.EXACT_SCORES](parameters=parameters, **OPTIONS)["log_likelihoods"]
    assert scores[-1] == pytest.approx(one["log_likelihood"], abs=2e-3)  # few rows: its own predictions are close
    if name == total.FIT:
        assert one["way"][0][0] == 2
        assert scores[0] != scores[-1]

"""Training to the optimum beside Adam's steps, on few data."""

import pytest
import torch

from benchmarks.cases import fit
from benchmarks.datasets import Split
from tests.exact.gaussian_models import data


def test_both_train_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(220, dtype=torch.float32)
    y = y + 0.3 * torch.randn(220, generator=torch.Generator().manual_seed(0))
    split = Split("few", x[:200], y[:200], x[200:], y[200:])
    monkeypatch.setattr(fit, "load", lambda *_, **__: split)
    options = {"dataset": "few", "split": 0, "rows": None, "start": "current", "steps": 5}
    ours, adam = fit.train_to_the_optimum(**options), fit.train_by_adam(**options)
    assert ours["values"][0] == pytest.approx(adam["values"][0], abs=1e-5)
    assert ours["values"][-1] > adam["values"][-1]
    assert (ours["status"], len(ours["values"])) == ("CONVERGED", ours["steps"] + 1)
    assert len(adam["values"]) == adam["steps"] == 5
    assert ours["rmse"] > 0

"""The comparison of fits of BoTorch's models, on few observations of one function."""

import pytest
import torch

from benchmarks.cases import surrogates
from tests.botorch_apart import surrogate_fits


@pytest.mark.parametrize("model", surrogates.MODELS)
def test_both_optimizers_fit_every_model(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    branin = surrogate_fits.functions()[0]
    monkeypatch.setattr(surrogate_fits, "functions", lambda: [branin])
    monkeypatch.setattr(surrogate_fits, "SEEDS", 1)
    before = surrogate_fits.exact_value(surrogate_fits.MODELS[model](*surrogate_fits.observed(branin, 40, seed=0)))
    for optimizer in surrogates.OPTIMIZERS:
        [found] = surrogate_fits.fitted(optimizer=optimizer, model=model, rows=40)["fits"]
        assert found["function"] == "Branin"
        assert found["value"] > before + 20  # nats


def test_values_are_those_of_the_model_in_nats() -> None:
    model = surrogate_fits.MODELS[surrogates.SINGLE](
        *surrogate_fits.observed(surrogate_fits.functions()[0], 30, seed=0)
    )
    model.train()
    with torch.no_grad():
        evidence = model.likelihood(model(*model.train_inputs)).log_prob(model.train_targets)
        priors = sum(prior.log_prob(closure(module)).sum() for _, module, prior, closure, _ in model.named_priors())
    assert surrogate_fits.exact_value(model) == pytest.approx(float(evidence + priors))

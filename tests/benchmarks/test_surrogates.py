"""The comparison of fits of BoTorch's models, on few observations of one function."""

import pytest
import torch
from botorch.test_functions import Branin

from benchmarks.cases import surrogates


@pytest.mark.parametrize("model", surrogates.MODELS)
def test_both_optimizers_fit_every_model(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(surrogates, "functions", lambda: [Branin()])
    monkeypatch.setattr(surrogates, "SEEDS", 1)
    before = surrogates.exact_value(surrogates.MODELS[model](*surrogates.observed(Branin(), 40, seed=0)))
    for optimizer in surrogates.OPTIMIZERS:
        [found] = surrogates.fitted(optimizer=optimizer, model=model, rows=40)["fits"]
        assert found["function"] == "Branin"
        assert found["value"] > before + 20  # nats


def test_values_are_those_of_the_model_in_nats() -> None:
    model = surrogates.MODELS["SingleTaskGP"](*surrogates.observed(Branin(), 30, seed=0))
    model.train()
    with torch.no_grad():
        evidence = model.likelihood(model(*model.train_inputs)).log_prob(model.train_targets)
        priors = sum(prior.log_prob(closure(module)).sum() for _, module, prior, closure, _ in model.named_priors())
    assert surrogates.exact_value(model) == pytest.approx(float(evidence + priors))

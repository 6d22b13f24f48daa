"""Expectations against fine quadrature; marginals against sampling on a grid."""

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import base_distributions
from torch import Tensor

from gpy_iterative.likelihoods import LogitBernoulliLikelihood, PoissonLogLikelihood
from gpy_iterative.training.likelihood_forms import expected_log_prob, is_log_concave

MEAN = torch.tensor([-3.0, 0.1, 0.4, 2.0], dtype=torch.float64)
DEVIATION = torch.tensor([0.01, 0.7, 3.0, 1e-4], dtype=torch.float64)


def integral(log_prob: Tensor) -> Tensor:
    """E over z on a grid [z, 4]."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(-1)
    weight = torch.exp(-z.square() / 2)
    return (log_prob * weight).sum(0) / weight.sum(0)


def latent_grid() -> Tensor:
    return MEAN + DEVIATION * torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(-1)


@pytest.mark.parametrize("noise", [0.2, 3.0])
def test_the_laplace_site_in_closed_form(noise: float) -> None:
    likelihood = gpytorch.likelihoods.LaplaceLikelihood().double()
    likelihood.noise = noise
    target = torch.tensor([-3.0, 0.5, -1.0, 2.0], dtype=torch.float64)
    found = expected_log_prob(likelihood, target, base_distributions.Normal(MEAN, DEVIATION))
    with torch.no_grad():
        expected = integral(likelihood(latent_grid()).log_prob(target))
    torch.testing.assert_close(found.detach(), expected, rtol=1e-6, atol=1e-7)
    found.sum().backward()
    assert torch.isfinite(likelihood.raw_noise.grad).all()


def test_the_logistic_site() -> None:
    likelihood = LogitBernoulliLikelihood().double()
    target = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    latent = base_distributions.Normal(MEAN, DEVIATION)
    expected = integral(likelihood(latent_grid()).log_prob(target))
    torch.testing.assert_close(expected_log_prob(likelihood, target, latent), expected, rtol=1e-6, atol=1e-7)
    function_dist = gpytorch.distributions.MultivariateNormal(MEAN, torch.diag(DEVIATION.square()))
    probability = integral(torch.sigmoid(latent_grid()))
    torch.testing.assert_close(likelihood(function_dist).probs, probability, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(likelihood.median(function_dist), torch.sigmoid(MEAN))


@pytest.mark.parametrize("variance", [1e-4, 1.0, 2.2, 2.3, 50.0, 500.0, 3000.0, 1e6])
def test_the_logistic_site_of_any_variance(variance: float) -> None:
    """Edges of unit width under distributions of any: probabilities, of which there are two, and expected logarithms."""
    likelihood = LogitBernoulliLikelihood()
    mean = torch.tensor([-40.0, -3.0, 0.0, 0.5, 30.0], dtype=torch.float64)
    latent = base_distributions.Normal(mean, variance**0.5)
    grid = mean + variance**0.5 * torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(-1)
    above, below = (likelihood.log_marginal(torch.full_like(mean, label), latent).exp() for label in (1.0, 0.0))
    torch.testing.assert_close(above + below, torch.ones_like(mean), rtol=0, atol=1e-9)
    torch.testing.assert_close(above, integral(torch.sigmoid(grid)), rtol=1e-8, atol=1e-9)
    found = expected_log_prob(likelihood, torch.ones_like(mean), latent)
    expected = integral(torch.nn.functional.logsigmoid(grid))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_the_logistic_site_is_differentiable() -> None:
    likelihood, label = LogitBernoulliLikelihood(), torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    mean = torch.tensor([-1.0, 0.0, 3.0, 0.4], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([0.5, 1.0, 400.0, 3.0], dtype=torch.float64, requires_grad=True)

    def values(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        latent = base_distributions.Normal(mean, variance.sqrt())
        return likelihood.log_marginal(label, latent), likelihood.expected_log_prob(label, latent)

    torch.autograd.gradcheck(values, (mean, variance), atol=1e-6)


class Lapsing(gpytorch.likelihoods.BernoulliLikelihood):
    """A fifth of the answers is a guess."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Bernoulli:
        return torch.distributions.Bernoulli(0.1 + 0.8 * torch.sigmoid(function_samples))


class LapsingLogit(LogitBernoulliLikelihood):
    forward = Lapsing.forward


class Exposed(PoissonLogLikelihood):
    """Seven times the rate."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Poisson:
        return torch.distributions.Poisson(7 * function_samples.exp())


class Sharp(gpytorch.likelihoods.LaplaceLikelihood):
    """Half the scale."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Laplace:
        return torch.distributions.Laplace(function_samples, self.noise.sqrt() / 2)


@pytest.mark.parametrize("likelihood", [Lapsing(), LapsingLogit(), Exposed(), Sharp()])
def test_a_subclass_with_another_forward_has_no_closed_form(likelihood: gpytorch.likelihoods.Likelihood) -> None:
    likelihood = likelihood.double()
    target = torch.tensor([0.0, 1.0], dtype=torch.float64)
    mean, variance = torch.tensor([0.4, -2.0]).double(), torch.tensor([0.05, 0.3]).double()
    latent = base_distributions.Normal(mean, variance.sqrt())
    grid = mean + variance.sqrt() * torch.linspace(-12, 12, 200_001, dtype=torch.float64).unsqueeze(-1)
    with torch.no_grad():
        log_probs = likelihood(grid).log_prob(target)
        expected, found = integral(log_probs), expected_log_prob(likelihood, target, latent)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    assert not is_log_concave(likelihood)
    function_dist = gpytorch.distributions.MultivariateNormal(mean, torch.diag(variance))
    if isinstance(likelihood, LogitBernoulliLikelihood | PoissonLogLikelihood):
        torch.testing.assert_close(likelihood.expected_log_prob(target, function_dist), expected, rtol=1e-4, atol=1e-4)
        marginal = integral(log_probs.exp()).log()
        torch.testing.assert_close(likelihood.log_marginal(target, function_dist), marginal, rtol=1e-4, atol=1e-4)
    if isinstance(likelihood, LogitBernoulliLikelihood):
        assert (likelihood(function_dist).probs <= 0.9).all()


def test_which_are_log_concave() -> None:
    known = gpytorch.likelihoods
    for likelihood in (LogitBernoulliLikelihood(), known.BernoulliLikelihood(), known.LaplaceLikelihood()):
        assert is_log_concave(likelihood)
    assert is_log_concave(known.PoissonLikelihood())
    assert is_log_concave(PoissonLogLikelihood())
    several = (known.SoftmaxLikelihood(num_features=2, num_classes=2), known.MultitaskGaussianLikelihood(2))
    for likelihood in (known.StudentTLikelihood(), *several):
        assert not is_log_concave(likelihood)

"""Expectations against fine quadrature; marginals against sampling on a grid."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import base_distributions
from torch import Tensor

from gpy_iterative.likelihoods import LogitBernoulliLikelihood, PoissonLogLikelihood, expected_log_prob, is_log_concave

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


def test_which_are_log_concave() -> None:
    known = gpytorch.likelihoods
    for likelihood in (LogitBernoulliLikelihood(), known.BernoulliLikelihood(), known.LaplaceLikelihood()):
        assert is_log_concave(likelihood)
    assert is_log_concave(known.PoissonLikelihood())
    assert is_log_concave(PoissonLogLikelihood())
    several = (known.SoftmaxLikelihood(num_features=2, num_classes=2), known.MultitaskGaussianLikelihood(2))
    for likelihood in (known.StudentTLikelihood(), *several):
        assert not is_log_concave(likelihood)

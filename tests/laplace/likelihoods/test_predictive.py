"""Class probabilities under latent marginals whose classes are correlated."""

import math

import torch
from gpytorch.likelihoods import Likelihood, SoftmaxLikelihood
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal

from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.predictive import (
    LatentMarginals,
    PredictiveMethod,
    class_probabilities,
    predictive_log_probs,
)
from tests.monte_carlo import assert_mean_within


def probabilities(mean: Tensor, covariance: Tensor, method: PredictiveMethod, num_samples: int = 1) -> Tensor:
    likelihood = SoftmaxLikelihood(num_classes=mean.shape[-1], mixing_weights=False)
    latent = LatentMarginals(mean, covariance, method, num_samples, torch.Generator().manual_seed(0))
    return class_probabilities(likelihood, latent)


def marginals() -> tuple[Tensor, Tensor]:
    mean = torch.tensor([[0.5, -1.0, 0.3], [2.0, 0.0, -0.4]]).double()
    root = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.5, 0.0], [-0.6, 0.3, 0.7]]).double()
    return mean, (root @ root.mT).expand(2, 3, 3)


def test_two_classes_are_a_logistic_function_of_their_difference() -> None:
    mean, covariance = (part[..., :2] for part in marginals())
    covariance = covariance[:, :2]
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    expected = torch.sigmoid((mean[:, 0] - mean[:, 1]) / (1 + math.pi / 8 * variance).sqrt())
    torch.testing.assert_close(probabilities(mean, covariance, "pairwise")[:, 0], expected)


def test_diagonal_divides_each_mean_by_its_own_spread() -> None:
    mean, covariance = marginals()
    spread = [(1 + math.pi / 8 * float(covariance[0, i, i])) ** 0.5 for i in range(3)]
    expected = torch.softmax(mean / torch.tensor(spread).double(), -1)
    torch.testing.assert_close(probabilities(mean, covariance, "diagonal"), expected)


def test_what_all_classes_share_changes_no_probability_but_of_diagonal() -> None:
    mean, covariance = marginals()
    torch.testing.assert_close(
        probabilities(mean, covariance + 3.0, "pairwise"), probabilities(mean, covariance, "pairwise")
    )
    diagonal = [probabilities(mean, shifted, "diagonal") for shifted in (covariance, covariance + 3.0)]
    assert (diagonal[0] - diagonal[1]).abs().max() > 0.02


def test_pairwise_is_near_samples() -> None:
    mean, covariance = marginals()
    sampled = probabilities(mean, covariance, "mc", num_samples=4000)
    torch.testing.assert_close(probabilities(mean, covariance, "pairwise"), sampled, rtol=0, atol=0.04)


class SeveralOutputs(Likelihood):
    """Normal outputs, which the package does not know as such."""

    def forward(self, f: Tensor) -> Independent:
        return Independent(Normal(f, 0.5), 1)


def test_an_unknown_likelihood_of_several_functions_is_averaged_over_samples() -> None:
    mean, covariance = marginals()
    likelihood = PointwiseLikelihood(SeveralOutputs(), torch.zeros(2, 3).double(), 3)
    exact = MultivariateNormal(mean, covariance + 0.25 * torch.eye(3).double()).log_prob(likelihood.targets).exp()
    draws = []
    for seed in range(100):
        latent = LatentMarginals(mean, covariance, "mc", 20, torch.Generator().manual_seed(seed))
        draws.append(predictive_log_probs(likelihood, latent).exp() / exact)
    assert_mean_within(torch.stack(draws), 1.0, max_sem=0.1)

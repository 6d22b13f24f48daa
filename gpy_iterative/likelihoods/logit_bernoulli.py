"""Logistic classification: GPyTorch's BernoulliLikelihood is the probit one."""

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.utils.quadrature import GaussHermiteQuadrature1D
from torch import Tensor
from torch.distributions import Bernoulli

from gpy_iterative.checks import check_count


class LogitBernoulliLikelihood(_OneDimensionalLikelihood):
    """p(y = 1 | f) = 1 / (1 + exp(-f)) for labels 0 and 1.

    Args:
        num_quadrature: Gauss-Hermite nodes of expectations under a normal latent value.

    Raises:
        ValueError: num_quadrature below 1.
    """

    def __init__(self, num_quadrature: int = 101) -> None:
        check_count("num_quadrature", num_quadrature)
        super().__init__()
        self.quadrature = GaussHermiteQuadrature1D(num_quadrature)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """The distribution of labels at latent values [*]."""
        return Bernoulli(logits=function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """The distribution of labels with the latent values [*b, t] integrated out: E[sigmoid(f)]."""
        return Bernoulli(probs=self.quadrature(torch.sigmoid, function_dist))

    def median(self, function_dist: MultivariateNormal) -> Tensor:
        """The median of the probability of label 1, sigmoid(E f): [*b, t].

        Where latent variances are too wide, it scores better than the mean that `marginal` gives.
        """
        return torch.sigmoid(function_dist.mean)

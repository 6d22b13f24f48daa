"""Counts with a log link."""

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Poisson

from gpy_iterative.laplace.likelihoods.quadrature import log_concave_marginal
from gpy_iterative.training.likelihood_forms import computes_as


class PoissonLogLikelihood(_OneDimensionalLikelihood):
    """p(y | f) = Poisson(exp(f)), as in log-linear regression.

    GPyTorch's `PoissonLikelihood` has the link softplus(f). A subclass with another `forward` uses GPyTorch's quadrature.
    """

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        return Poisson(function_samples.exp())

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """E[log p(y | f)] [*b, n], in closed form."""
        if not computes_as(self, PoissonLogLikelihood):
            return super().expected_log_prob(observations, function_dist, *args, **kwargs)
        mean, variance = function_dist.mean, function_dist.variance
        return observations * mean - (mean + variance / 2).exp() - torch.lgamma(observations + 1)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Log p(y) [*b, n], by quadrature."""
        if not computes_as(self, PoissonLogLikelihood):
            return super().log_marginal(observations, function_dist, *args, **kwargs)
        counts = observations.double()
        constant = torch.lgamma(counts + 1)
        return log_concave_marginal(
            lambda f: counts * f - f.exp() - constant,
            lambda f: counts - f.exp(),
            function_dist.mean,
            function_dist.variance,
        ).to(function_dist.mean.dtype)

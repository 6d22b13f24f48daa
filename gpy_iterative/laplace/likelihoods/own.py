"""Likelihoods that GPyTorch lacks."""

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Bernoulli, Poisson
from torch.nn.functional import logsigmoid

from gpy_iterative.laplace.likelihoods.quadrature import NEGLIGIBLE, graded_rule, log_concave_marginal, normal_rule
from gpy_iterative.training.likelihood_forms import check_support, computes_as

#: Largest standard deviation for Gauss-Hermite nodes.
WIDE = 1.5


class LogitBernoulliLikelihood(_OneDimensionalLikelihood):
    """p(y = 1 | f) = 1 / (1 + exp(-f)), labels 0 and 1.

    GPyTorch's `BernoulliLikelihood` has the probit link, with lighter tails. Raises ValueError for other labels.
    """

    has_analytic_marginal = True

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        return Bernoulli(logits=function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """[*b, n], by quadrature."""
        if not computes_as(self, LogitBernoulliLikelihood):
            return super().marginal(function_dist, *args, **kwargs)
        return Bernoulli(probs=self.log_probability(function_dist.mean, function_dist.variance).exp())

    def median(self, function_dist: MultivariateNormal) -> Tensor:
        """The median of p(y = 1 | f) [*b, n]."""
        return torch.sigmoid(function_dist.mean)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """[*b, n], by quadrature."""
        if not computes_as(self, LogitBernoulliLikelihood):
            return super().log_marginal(observations, function_dist, *args, **kwargs)
        check_support(self, observations)
        return self.log_probability(_signed(function_dist.mean, observations), function_dist.variance)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """[*b, n], by quadrature."""
        if not computes_as(self, LogitBernoulliLikelihood):
            return super().expected_log_prob(observations, function_dist, *args, **kwargs)
        check_support(self, observations)
        mean = _signed(function_dist.mean, observations)
        return _expected_log_sigmoid(mean.double(), function_dist.variance.double()).to(mean.dtype)

    def log_probability(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Log E[p(y = 1 | f)] for f ~ N(mean, variance)."""
        dtype, mean = mean.dtype, mean.double()
        is_above = mean > 0  # probabilities of both labels sum to 1
        low = log_concave_marginal(
            logsigmoid, lambda f: torch.sigmoid(-f), torch.where(is_above, -mean, mean), variance
        )
        return torch.where(is_above, torch.log1p(-low.exp()), low).to(dtype)


def _expected_log_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    # Wide distributions: min(f, 0) in closed form, log(1 + exp(-|f|)) by quadrature over |f|.
    nodes, weights = (part.to(mean.device).view(-1, *[1] * mean.dim()) for part in normal_rule(1))
    smooth = (weights * logsigmoid(mean + variance.sqrt() * nodes)).sum(0)
    deviation = variance.clamp_min(WIDE**2).sqrt()
    ratio = mean / deviation
    kink = mean * torch.special.ndtr(-ratio) - deviation * _normal_density(ratio)
    points, shares = (NEGLIGIBLE * part.to(mean.device).view(-1, *[1] * mean.dim()) for part in graded_rule())
    density = (_normal_density((points - mean) / deviation) + _normal_density((points + mean) / deviation)) / deviation
    rest = (shares * torch.log1p(torch.exp(-points)) * density).sum(0)
    return torch.where(variance > WIDE**2, kink - rest, smooth)


def _normal_density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


def _signed(mean: Tensor, labels: Tensor) -> Tensor:
    return torch.where(labels > 0, mean, -mean)


def times_log_rate(counts: Tensor, log_rate: Tensor) -> Tensor:
    """Their product; zero for no counts, also at a rate of zero (an exposure of zero)."""
    return (counts * log_rate).masked_fill(counts == 0, 0.0)


class PoissonLogLikelihood(_OneDimensionalLikelihood):
    """p(y | f) = Poisson(exp(f)); GPyTorch's `PoissonLikelihood` has the rate softplus(f)."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Poisson:
        return Poisson(function_samples.exp())

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """[*b, n], in closed form."""
        if not computes_as(self, PoissonLogLikelihood):
            return super().expected_log_prob(observations, function_dist, *args, **kwargs)
        mean, variance = function_dist.mean, function_dist.variance
        return times_log_rate(observations, mean) - (mean + variance / 2).exp() - torch.lgamma(observations + 1)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """[*b, n], by quadrature."""
        if not computes_as(self, PoissonLogLikelihood):
            return super().log_marginal(observations, function_dist, *args, **kwargs)
        counts = observations.double()
        constant = torch.lgamma(counts + 1)
        return log_concave_marginal(
            lambda f: times_log_rate(counts, f) - f.exp() - constant,
            lambda f: counts - f.exp(),
            function_dist.mean,
            function_dist.variance,
        ).to(function_dist.mean.dtype)

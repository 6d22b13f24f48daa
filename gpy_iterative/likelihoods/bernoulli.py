"""Binary classification with a logistic link."""

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Bernoulli
from torch.nn.functional import logsigmoid

from gpy_iterative.checks import check_count
from gpy_iterative.likelihoods.quadrature import log_concave_marginal, normal_nodes


class LogitBernoulliLikelihood(_OneDimensionalLikelihood):
    """p(y = 1 | f) = 1 / (1 + exp(-f)), labels 0 and 1.

    GPyTorch's `BernoulliLikelihood` has the probit link. The logit's tails are heavier: a wrong label costs |f|
    where it costs f^2 / 2 under the probit.

    Args:
        num_quadrature: nodes of the Gauss-Hermite quadrature that marginals are made of.

    Raises:
        ValueError: num_quadrature below 1; labels other than 0 and 1.
    """

    has_analytic_marginal = True

    def __init__(self, num_quadrature: int = 101) -> None:
        super().__init__()
        check_count("num_quadrature", num_quadrature)
        self.num_quadrature = num_quadrature

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        return Bernoulli(logits=function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """p(y) [*b, n] for a latent distribution, by quadrature; differentiable."""
        return Bernoulli(probs=self.log_probability(function_dist.mean, function_dist.variance).exp())

    def median(self, function_dist: MultivariateNormal) -> Tensor:
        """The median of the probability of label 1, 1 / (1 + exp(-E f)): [*b, n].

        Where latent variances are too wide, it scores better than the mean that `marginal` gives.
        """
        return torch.sigmoid(function_dist.mean)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The logarithm of p(y) [*b, n] for labels 0 and 1 and a latent distribution, by quadrature."""
        return self.log_probability(_signs(observations) * function_dist.mean, function_dist.variance)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """E[log p(y | f)], [*b, n], for labels 0 and 1 and a latent distribution, by quadrature."""
        nodes, log_weights = normal_nodes(function_dist.mean, function_dist.variance, self.num_quadrature)
        expected = (log_weights.exp() * logsigmoid(_signs(observations) * nodes)).sum(0)
        return expected.to(function_dist.mean.dtype)

    def log_probability(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Log E[1 / (1 + exp(-f))] for f ~ N(mean, variance), elementwise and summed in log space."""
        found = log_concave_marginal(
            logsigmoid,
            lambda f: torch.sigmoid(-f),
            lambda f: torch.sigmoid(f) * torch.sigmoid(-f),
            mean,
            variance,
            self.num_quadrature,
        )
        # Weights add up to 1 but for rounding: never above log(1).
        return found.clamp_max(0).to(mean.dtype)


def _signs(labels: Tensor) -> Tensor:
    """-1 and 1 for labels 0 and 1. Raises ValueError for any others."""
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        raise ValueError(
            f"LogitBernoulliLikelihood: labels must be 0 or 1 (not -1 and 1), but there is a {labels[bad][0].item()}."
        )
    return 2 * labels - 1 if labels.is_floating_point() else 2 * labels.long() - 1

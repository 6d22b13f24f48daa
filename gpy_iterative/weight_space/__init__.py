"""Gaussian processes with finitely many features, as linear models with Gaussian weights.

With features u_i [m], weights v ~ N(0, diag(c)) a priori and noise variances s_i, the posterior of the weights is
N(P^-1 h, P^-1) with P = diag(1 / c) + sum_i u_i u_i^T / s_i and h = sum_i u_i r_i / s_i: sums over data, which
mini-batches estimate without bias. Rasmussen and Williams 2006, section 2.1.
"""

from gpy_iterative.weight_space.bound import log_marginal_likelihood_gap, surrogate
from gpy_iterative.weight_space.posterior import WeightSpacePaths, WeightSpacePosterior
from gpy_iterative.weight_space.problem import FeatureBatch, WeightSpacePrior, WeightSpaceProblem
from gpy_iterative.weight_space.row_sampler import RowSampler
from gpy_iterative.weight_space.weights import (
    WeightDistribution,
    exact_log_marginal_likelihood,
    exact_statistics,
    posterior_weights,
    triangular_root,
)

__all__ = [
    "FeatureBatch",
    "RowSampler",
    "WeightDistribution",
    "WeightSpacePaths",
    "WeightSpacePosterior",
    "WeightSpacePrior",
    "WeightSpaceProblem",
    "exact_log_marginal_likelihood",
    "exact_statistics",
    "log_marginal_likelihood_gap",
    "posterior_weights",
    "surrogate",
    "triangular_root",
]

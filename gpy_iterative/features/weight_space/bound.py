"""The one objective behind all mini-batch estimators, and how far it lies from the marginal likelihood.

With residuals r, features u, noise variances s, weights N(v, S) and prior variances c,

    J = sum_i [((r_i - u_i^T v)^2 + u_i^T S u_i) / s_i + log s_i] + sum_j [(v_j^2 + S_jj) / c_j + log c_j] - log|S| - m

is at least -2 log p(y) - n log(2 pi) for any v and S > 0, with equality at the posterior of the weights. There the
gradients of both with respect to all hyperparameters agree, too (envelope theorem). The first sum is one over data, of
which any uniform batch gives unbiased values and gradients.
"""

import torch
from torch import Tensor

from gpy_iterative.features.weight_space.problem import FeatureBatch
from gpy_iterative.features.weight_space.weights import WeightDistribution, triangular_root


def surrogate(batch: FeatureBatch, mean: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """J without its terms -log|S| - m, estimated from a batch: all that hyperparameters move.

    Args:
        batch: rows with the graph to the hyperparameters.
        mean: v, [m].
        left: [m, k].
        right: [m, k]: S = left right^T, which need not be positive definite here.

    Cost b m k multiply-adds, twice that where right is another matrix.
    """
    projected = batch.basis @ left
    spread = (projected * (projected if right is left else batch.basis @ right)).sum(-1)
    misfit = (batch.residual - batch.basis @ mean).square()
    data = ((misfit + spread) / batch.noise + batch.noise.log()).sum()
    prior = ((mean.square() + (left * right).sum(-1)) / batch.variances + batch.variances.log()).sum()
    return batch.weight * data + prior


@torch.no_grad()
def log_marginal_likelihood_gap(weights: WeightDistribution, precision: Tensor, moment: Tensor) -> Tensor:
    """J + 2 log p(y) + n log(2 pi), at least 0: what weights other than the posterior's cost.

    Args:
        weights: N(v, S).
        precision: P of all data, [m, m].
        moment: h of all data, [m].

    tr(S P) - log|S P| - m + (v - P^-1 h)^T P (v - P^-1 h), each part from squares; cost m^3.
    """
    lower = triangular_root(precision)
    off = weights.mean - torch.cholesky_solve(moment.unsqueeze(-1), lower).squeeze(-1)
    log_ratio = weights.log_determinant + 2 * lower.diagonal().log().sum()
    trace = (lower.mT @ weights.root).square().sum()
    return (trace - log_ratio - len(off)).clamp(min=0) + (lower.mT @ off).square().sum()

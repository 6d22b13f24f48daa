"""Distributions of the weights, and the objective.

With residuals r, features u, noise variances s, weights N(v, S) and prior variances c,

    J = sum_i [((r_i - u_i^T v)^2 + u_i^T S u_i) / s_i + log s_i] + sum_j [(v_j^2 + S_jj) / c_j + log c_j] - log|S| - m

is at least -2 log p(y) - n log(2 pi); at the posterior, values and hyperparameter gradients are equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.checks import check_rate
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.features.weight_space.problem import FeatureBatch, WeightSpaceProblem
from gpy_iterative.linear_solvers.cholesky import CholeskyFactor, positive_factor

#: Slower averages hardly follow the hyperparameters.
SMALLEST_RATE = 1e-3


@dataclass(frozen=True)
class WeightDistribution:
    """N(mean, root root^T)."""

    mean: Tensor  # v, [m]
    root: Tensor  # [m, m]
    log_determinant: Tensor  # of the covariance, a scalar

    @classmethod
    def from_precision(cls, precision: Tensor, moment: Tensor) -> "WeightDistribution":
        """N(P^-1 h, P^-1); cost m^3. Raises NonFiniteError."""
        factor = positive_factor(precision)
        return cls.from_factor(factor, factor.solve(moment.unsqueeze(-1)).squeeze(-1))

    @classmethod
    def from_factor(cls, precision: CholeskyFactor, mean: Tensor) -> "WeightDistribution":
        lower = precision.lower
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower.mT, identity, upper=True)
        return cls(mean, root, -precision.logdet())


def surrogate(batch: FeatureBatch, mean: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Batch estimate of J + log|S| + m, for S = left right^T, perhaps indefinite, with factors [m, k]."""
    projected = batch.basis @ left
    spread = (projected * (projected if right is left else batch.basis @ right)).sum(-1)
    misfit = (batch.residual - batch.basis @ mean).square()
    data = ((misfit + spread) / batch.noise + batch.noise.log()).sum()
    prior = ((mean.square() + (left * right).sum(-1)) / batch.variances + batch.variances.log()).sum()
    return batch.weight * data + prior


@torch.no_grad()
def log_marginal_likelihood_gap(weights: WeightDistribution, precision: Tensor, moment: Tensor) -> Tensor:
    """J + 2 log p(y) + n log(2 pi) = tr(S P) - log|S P| - m + (v - P^-1 h)^T P (v - P^-1 h)."""
    factor = positive_factor(precision)
    off = weights.mean - factor.solve(moment.unsqueeze(-1)).squeeze(-1)
    log_ratio = weights.log_determinant + factor.logdet()
    trace = (factor.lower.mT @ weights.root).square().sum()
    return (trace - log_ratio - len(off)).clamp(min=0) + (factor.lower.mT @ off).square().sum()


@torch.no_grad()
def exact_statistics(problem: WeightSpaceProblem, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """P [m, m] and h [m] of the posterior; cost n m^2."""
    batches = (batch if centred else batch.uncentred() for batch in problem.batches())
    first = next(batches)
    precision, moment = first.precision(), first.moment()
    for batch in batches:
        precision, moment = precision + batch.gram(), moment + batch.moment()
    return precision, moment


@torch.no_grad()
def exact_log_marginal_likelihood(problem: WeightSpaceProblem) -> Tensor:
    """Log marginal likelihood, float64; two passes, n m^2."""
    weights = WeightDistribution.from_precision(*exact_statistics(problem))
    total = problem.num_data * math.log(2 * math.pi) - weights.log_determinant
    # r^T D^-1 r - h^T P^-1 h would lose digits for small noise.
    prior = torch.zeros_like(total)
    for batch in problem.batches():
        rest = batch.residual - batch.basis @ weights.mean
        total = total + (rest.square() / batch.noise + batch.noise.log()).sum()
        prior = (weights.mean.square() / batch.variances + batch.variances.log()).sum()  # same for every batch
    total = total + prior
    if not torch.isfinite(total):
        raise NonFiniteError(
            "The log marginal likelihood is not finite: standardise the targets, and keep the noise away from zero."
        )
    return -0.5 * total


class TrackerRate:
    """Step size of a moving average; see `VariationalFeatureMarginalLogLikelihood`."""

    def __init__(self, given: float | Callable[[int], float] | None, batch_size: int, num_features: int) -> None:
        if given is not None and not callable(given):
            check_rate("tracker_rate", given)
        self.given, self.batch_size, self.initial = given, batch_size, min(0.05, 0.1 * batch_size / num_features)

    def __call__(self, step: int, rows: Tensor, num_data: int) -> float:
        if self.given is None:
            if len(rows) == num_data == len(rows.unique()):
                return 1.0  # sums over all data are exact; an average would only lag behind the hyperparameters
            rate = max(self.initial / math.sqrt(1 + self.initial * step / 4), min(self.initial, SMALLEST_RATE))
            return rate * min(1, len(rows) / self.batch_size)  # the last batch of a pass may have a few rows
        rate = self.given(step) if callable(self.given) else self.given
        check_rate("tracker_rate", rate)
        return float(rate)

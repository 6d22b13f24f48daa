"""Distributions of the weights, their exact posterior, and the exact marginal likelihood: sums over all data, in chunks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.features.weight_space.problem import FeatureBatch, WeightSpaceProblem


@dataclass(frozen=True)
class WeightDistribution:
    """N(mean, root root^T).

    Attributes:
        mean: v, [m].
        root: [m, m].
        log_determinant: of the covariance, a scalar.
    """

    mean: Tensor
    root: Tensor
    log_determinant: Tensor

    @classmethod
    def from_precision(cls, precision: Tensor, moment: Tensor) -> "WeightDistribution":
        """N(P^-1 h, P^-1); cost m^3. Raises NonFiniteError where P is not finite or not positive definite."""
        lower = triangular_root(precision)
        mean = torch.cholesky_solve(moment.unsqueeze(-1), lower).squeeze(-1)
        return cls.from_precision_root(lower, mean)

    @classmethod
    def from_precision_root(cls, lower: Tensor, mean: Tensor) -> "WeightDistribution":
        """From the Cholesky factor of the precision."""
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower.mT, identity, upper=True)
        return cls(mean, root, -2 * lower.diagonal().log().sum())


def triangular_root(precision: Tensor) -> Tensor:
    """The lower Cholesky factor [m, m]. Raises NonFiniteError where there is none."""
    lower, info = torch.linalg.cholesky_ex(precision)
    if info.any() or not torch.isfinite(lower).all():  # positive definite whenever it is finite and noise is not tiny
        raise NonFiniteError(
            "A precision of weights or covariance of data is not finite or, to rounding, not positive definite: check "
            "data, hyperparameters and noise. A constraint such as gpytorch.constraints.GreaterThan(1e-4) keeps the noise "
            "away from zero."
        )
    return lower


@torch.no_grad()
def exact_statistics(problem: WeightSpaceProblem, *, centred: bool, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The weights' posterior precision P [m, m] and moment h [m] from all data; cost n m^2, memory chunk_size m + m^2."""
    gram: Tensor | None = None
    moment: Tensor | None = None
    for batch in problem.batches(chunk_size):
        batch = batch if centred else batch.uncentred()
        gram = batch.precision() if gram is None else gram + batch.gram()
        moment = batch.moment() if moment is None else moment + batch.moment()
    assert gram is not None
    assert moment is not None
    return gram, moment


def posterior_weights(
    problem: WeightSpaceProblem, *, centred: bool = True, chunk_size: int = 4096
) -> WeightDistribution:
    """The exact posterior of the weights."""
    return WeightDistribution.from_precision(*exact_statistics(problem, centred=centred, chunk_size=chunk_size))


@torch.no_grad()
def exact_log_marginal_likelihood(problem: WeightSpaceProblem, *, chunk_size: int = 4096) -> Tensor:
    """The log marginal likelihood, a float64 scalar, from two passes over the data: cost n m^2, memory chunk_size m + m^2.

    The second pass sums squared residuals at the posterior mean, to which the result is insensitive in first order; the
    textbook's difference r^T D^-1 r - h^T P^-1 h loses digits where the noise is small. Raises NonFiniteError for a value
    that is not finite.
    """
    weights = posterior_weights(problem, chunk_size=chunk_size)
    total = problem.num_data * math.log(2 * math.pi) - weights.log_determinant
    batch: FeatureBatch | None = None
    for batch in problem.batches(chunk_size):
        rest = batch.residual - batch.basis @ weights.mean
        total = total + (rest.square() / batch.noise + batch.noise.log()).sum()
    assert batch is not None
    total = total + (weights.mean.square() / batch.variances + batch.variances.log()).sum()
    if not torch.isfinite(total):
        raise NonFiniteError("The log marginal likelihood is not finite: check the size of targets and noise.")
    return -0.5 * total

from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.exact.prediction.projection import Projection
from gpy_iterative.exact.prediction.training_solves import as_columns, from_columns
from gpy_iterative.linear_operators.extensions import native_precision
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.solution import SolveStatus, warn_of
from gpy_iterative.training.training_system import TrainingSystem

#: Relative residual; the variance's error is of second order in it.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class VarianceError:
    """Median and largest |log(variance / exact variance)| of the latent function."""

    median: float
    largest: float
    num_points: int

    @classmethod
    def between(cls, estimate: Tensor, exact: Tensor) -> "VarianceError":
        """The error of estimates of any shape; 0 without points."""
        if estimate.numel() == 0:
            return cls(0.0, 0.0, 0)
        tiny = torch.finfo(exact.dtype).tiny
        errors = (estimate.clamp_min(tiny) / exact.clamp_min(tiny)).log().abs()
        return cls(float(errors.median()), float(errors.max()), errors.numel())


@torch.no_grad()
def solved_variance(
    system: TrainingSystem, projection: Projection, prior_variance: Tensor, test_train: Tensor
) -> Tensor:
    """k(x, x) - k_x^T H^-1 k_x [*b, t] from one block solve.

    k_x^T H^-1 k_x = |A^T k_x|^2 + k'^T H^-1 k': the tolerance is relative to k' = k_x - H A A^T k_x.
    """
    columns, basis = test_train.mT, projection.basis
    if system.observed is not None:
        columns, basis = columns[..., system.observed, :], basis[..., system.observed, :]
    like, columns = columns, as_columns(columns, system.operator)
    coefficients = basis.mT @ columns.to(basis.dtype)
    if projection.is_exact and basis.dtype == torch.float64:  # k' is only rounding
        explained = from_columns(coefficients.square().sum(-2, keepdim=True), like[..., :1, :]).squeeze(-2)
        return (prior_variance - explained).to(prior_variance.dtype)
    rest = columns - system.operator._matmul(basis @ coefficients)
    solution = ConjugateGradients(tolerance=TOLERANCE).solve(native_precision(system.operator), rest)
    if solution.status is not SolveStatus.CONVERGED:
        warn_of(f"The solve of variance_error (tolerance {TOLERANCE})", solution.status, solution.stats, rest.dtype)
    explained = coefficients.square().sum(-2) + ((rest + solution.residual) * solution.value).sum(-2)
    return prior_variance - from_columns(explained.unsqueeze(-2), like[..., :1, :]).squeeze(-2)

"""The measured error of predictive variances: some of them from direct solves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.exact.prediction.projection import Projection
from gpy_iterative.exact.prediction.training_solves import as_columns, from_columns
from gpy_iterative.linear_operators.extensions import native_precision
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.solution import SolveStatus, warn_of
from gpy_iterative.training.training_system import TrainingSystem

#: Relative residual of the direct solves; their error enters the variance in second order.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class VarianceError:
    """Median and largest |log(variance / exact variance)| of the latent function over `num_points` test points."""

    median: float
    largest: float
    num_points: int

    @classmethod
    def between(cls, estimate: Tensor, exact: Tensor) -> "VarianceError":
        """The error of estimates, of any one shape. Without points it is 0."""
        if estimate.numel() == 0:
            return cls(0.0, 0.0, 0)
        tiny = torch.finfo(exact.dtype).tiny
        errors = (estimate.clamp_min(tiny) / exact.clamp_min(tiny)).log().abs()
        return cls(float(errors.median()), float(errors.max()), errors.numel())


@torch.no_grad()
def solved_variance(
    system: TrainingSystem, projection: Projection, prior_variance: Tensor, test_train: Tensor
) -> Tensor:
    """k(x, x) - k_x^T H^-1 k_x by one column of a block solve a point, from k(x, x) [*b, t] and a dense K(x, X) [*b, t, n].

    The projections common to all points are taken off first: k_x^T H^-1 k_x = |A^T k_x|^2 + k'^T H^-1 k' with
    k' = k_x - H A A^T k_x, so that the solver's tolerance is relative to what is left, not to the prior variance. Where
    A is complete in float64, nothing is left. Products are in native precision.
    """
    columns, basis = test_train.mT, projection.basis
    if system.observed is not None:
        columns, basis = columns[..., system.observed, :], basis[..., system.observed, :]
    like, columns = columns, as_columns(columns, system.operator)
    coefficients = basis.mT @ columns.to(basis.dtype)
    if projection.is_exact and basis.dtype == torch.float64:  # what a solve would find is rounding
        explained = from_columns(coefficients.square().sum(-2, keepdim=True), like[..., :1, :]).squeeze(-2)
        return (prior_variance - explained).to(prior_variance.dtype)
    rest = columns - system.operator._matmul(basis @ coefficients)
    solution = ConjugateGradients(tolerance=TOLERANCE).solve(native_precision(system.operator), rest)
    if solution.status is not SolveStatus.CONVERGED:
        warn_of("A linear solve for predictions", solution.status, solution.stats, rest.dtype)
    explained = coefficients.square().sum(-2) + ((rest + solution.residual) * solution.value).sum(-2)
    return prior_variance - from_columns(explained.unsqueeze(-2), like[..., :1, :]).squeeze(-2)

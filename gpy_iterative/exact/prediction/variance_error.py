from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor

from gpy_iterative.errors import float64_first
from gpy_iterative.exact.prediction.blocks import as_columns, converted, from_columns, row_block, row_group
from gpy_iterative.exact.prediction.projection import GalerkinProjection, Projection
from gpy_iterative.linear_operators.extensions import dense, with_products
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.solution import ColumnGroup, SolveStatus, warn_of
from gpy_iterative.preconditioners.preconditioner import Preconditioner
from gpy_iterative.training.training_system import TrainingSystem

#: Relative residual; the variance's error is of second order in it.
TOLERANCE, MAX_EPOCHS = 1e-2, 1000.0
#: Points of the check of first variances; least and most products, and projections that are worth one.
NUM_CHECKED, CHECK_EPOCHS, RANK_PER_EPOCH = 8, (4, 12), 64


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


class _Deflation(Preconditioner):
    """S^-1 = Q Q^T for the projection Q = I - A A^T H onto the directions d with A^T H d = 0.

    H - H A A^T H as a matrix would be singular up to rounding, and its solves would not end.
    """

    def __init__(self, basis: Tensor, product: Tensor) -> None:
        self.basis, self.product = basis, product  # A and H A [*b, n, r]

    def solve(self, rhs: Tensor) -> Tensor:
        rest = rhs - self.product @ (self.basis.mT @ rhs)
        return rest - self.basis @ (self.product.mT @ rest)


@torch.no_grad()
def lower_variance_error(
    system: TrainingSystem,
    projection: GalerkinProjection,
    variance: Tensor,
    prior_variance: Tensor,
    test_train: LinearOperator,
) -> VarianceError:
    """A lower bound of the error of variances [*batch, t] at evenly spread rows of K(x, X) [*batch, t, n]."""
    group, size = row_group(test_train), test_train.shape[-2]
    count = max(NUM_CHECKED // (group * test_train.batch_shape.numel()), 1)
    starts = {int(start) * group for start in torch.linspace(0, size // group - 1, count, device="cpu").round()}
    parts = [slice(start, start + group) for start in sorted(starts)]
    variance, prior_variance = (torch.cat([v[..., part] for part in parts], -1) for v in (variance, prior_variance))
    rows = torch.cat([dense(converted(row_block(test_train, part), projection.dtype)) for part in parts], -2)
    # A solve that stops early explains too little; so does the projection.
    least, most = CHECK_EPOCHS
    enough = min(max(projection.basis.shape[-1] // RANK_PER_EPOCH, least), most)
    bound = solved_variance(system, projection, prior_variance, rows, enough)
    return VarianceError.between(variance, bound.minimum(variance))


@torch.no_grad()
def solved_variance(
    system: TrainingSystem,
    projection: Projection,
    prior_variance: Tensor,
    test_train: Tensor,
    enough: float | None = None,
) -> Tensor:
    """k(x, x) - k_x^T H^-1 k_x [*b, t] from one block solve; too large if it ends after `enough` epochs.

    k_x^T H^-1 k_x = |A^T k_x|^2 + k'^T H^-1 k' for k' = k_x - H A A^T k_x. `_Deflation` searches in A's complement, where H
    has far smaller eigenvalues. The tolerance is relative to k', or to what the variance resolves.
    """
    if not isinstance(projection, GalerkinProjection) or projection.local is None:  # k' is only rounding
        return projection.variance(prior_variance, to_linear_operator(test_train))
    columns, basis = test_train.mT, projection.basis
    if system.observed is not None:
        columns, basis = columns[..., system.observed, :], basis[..., system.observed, :]
    like, columns = columns, as_columns(columns, system.operator.dim())
    coefficients = basis.mT @ columns.to(basis.dtype)
    rest = columns - projection.local.product @ coefficients
    known = coefficients.square().sum(-2)
    prior = as_columns(prior_variance.unsqueeze(-2), columns.dim()).squeeze(-2)
    norms = torch.linalg.vector_norm(rest, dim=-2).clamp_min(torch.finfo(rest.dtype).tiny)
    allowed = _resolved_residuals(system.operator, prior, known) / norms
    rest = rest.masked_fill((allowed >= 1).unsqueeze(-2), 0.0)
    least = allowed.clamp(TOLERANCE, 1.0).reshape(allowed.shape[:-1].numel(), allowed.shape[-1]).amin(0)
    groups = [ColumnGroup(f"point {number}", 1, tolerance) for number, tolerance in enumerate(least.tolist())]
    native = with_products(system.operator, lambda products: replace(products, precision="native"))
    solver = ConjugateGradients(tolerance=TOLERANCE, max_epochs=enough or MAX_EPOCHS)
    deflation = _Deflation(basis, projection.local.product)
    solution = solver.solve(native, rest, groups=groups, preconditioner=deflation)
    if solution.status is not SolveStatus.CONVERGED and enough is None:
        stats = replace(solution.stats, residual_norms={"points": max(solution.stats.residual_norms.values())})
        what = f"The solve of variance_error (tolerance {TOLERANCE})"
        advice = (
            f"Its errors may be wrong: {float64_first(rest.dtype)}raise the posterior's rank, which shortens this solve, "
            "or take solver=gpi.solvers.Cholesky(), whose variances are exact."
        )
        warn_of(what, solution.status, stats, rest.dtype, advice=advice)
    explained = known + ((rest + solution.residual) * solution.value).sum(-2)
    return prior_variance - from_columns(explained.unsqueeze(-2), like[..., :1, :]).squeeze(-2)


def _resolved_residuals(operator: LinearOperator, prior_variance: Tensor, known: Tensor) -> Tensor:
    """Norms [*b, t] of residuals that change a variance by less than it resolves: H^-1 is at most 1 / noise."""
    if not isinstance(operator, NoisyLinearOperator):
        return torch.zeros_like(prior_variance)
    rounding = torch.finfo(prior_variance.dtype).eps * prior_variance
    return (rounding.maximum(TOLERANCE**2 * (prior_variance - known)) * operator.noise.amin(-1, keepdim=True)).sqrt()

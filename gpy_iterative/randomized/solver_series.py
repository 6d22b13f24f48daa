"""Conjugate gradients as a series, H^-1 b = sum_j length_j direction_j, cut at random and reweighted."""

import math
import time
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_fraction
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_solvers.columns import LinearSystem
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateDirections
from gpy_iterative.linear_solvers.solution import ColumnGroup, Solution, SolveStats, SolveStatus
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky
from gpy_iterative.preconditioners.preconditioner import Preconditioner, PreconditionerRecipe
from gpy_iterative.random_numbers import given_or_seeded
from gpy_iterative.randomized.truncation import Truncation, check_truncation, draw_stops, survival_table, within
from gpy_iterative.worker_threads import CPU, divided

#: Relative residual after which terms are zero. It must not depend on J.
DEFAULT_TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-10}


@dataclass(frozen=True)
class Series:
    """One run for t columns, with k reweighted sums.

    Attributes:
        sums: sum_{j <= J} length_j direction_j / S_j, [n, k].
        lengths: length_j, [J, t], float64 on the CPU; zero after a column's end.
        products: r_{j-1}^T P^-1 r_{j-1}, like `lengths`.
        converged: columns that ended by themselves, [t].
        status: INDEFINITE if one of them has no positive curvature, above rounding errors.
        norms: final relative residuals of plain conjugate gradients, [t], float64.
        seconds: wall-clock time.
    """

    sums: Tensor
    lengths: Tensor
    products: Tensor
    converged: Tensor
    status: SolveStatus
    norms: Tensor
    seconds: float

    @property
    def steps(self) -> Tensor:
        """Steps of each column, [t]."""
        return (self.lengths > 0).sum(0)

    @property
    def energies(self) -> Tensor:
        """Squared H-norms of the terms, [J, t]."""
        return self.lengths * self.products

    @property
    def iterations(self) -> int:
        """Products with H."""
        return len(self.lengths)


@torch.no_grad()
@divided()
def conjugate_gradient_series(
    operator: LinearOperator,
    rhs: Tensor,
    columns: Tensor,
    stops: Tensor,
    log_survival: Tensor,
    *,
    preconditioner: Preconditioner | None,
    tolerance: float | None = None,
) -> Series:
    """One run, from zero.

    Args:
        operator: H [n, n].
        rhs: B [n, t].
        columns: column of each sum, [k], all at least once.
        stops: J of each sum, [k], at least 1.
        log_survival: log S_j for j = 1, ..., max(stops); zeros give plain conjugate gradients.
        preconditioner: P.
        tolerance: relative residual norm of a converged column; None is 1e-10 in float64, 1e-6 in float32.

    Cost: max(stops) products of H and P^-1 with the open columns. Memory: eight blocks [n, t] and the sums. Raises
    NonFiniteError for NaN or infinity.
    """
    start = time.perf_counter()
    size, num_columns = rhs.shape
    tolerance = DEFAULT_TOLERANCES.get(rhs.dtype, 1e-6) if tolerance is None else tolerance
    check_fraction("tolerance", tolerance)
    # Below this relative residual, signs are rounding noise.
    floor = math.sqrt(torch.finfo(rhs.dtype).eps)
    stops, columns = stops.cpu(), columns.cpu()
    last = torch.zeros(num_columns, dtype=torch.long, device=CPU).scatter_reduce_(0, columns, stops, "amax")
    weights = torch.exp(-log_survival.double().cpu())

    scale = torch.linalg.vector_norm(rhs, dim=0)
    norms = (scale > 0).double().cpu()
    _check_finite(scale.double().cpu(), 0)
    sums = rhs.new_zeros(size, len(stops))
    is_open = norms > tolerance
    converged, is_indefinite = ~is_open, False
    none = torch.zeros(0, num_columns, dtype=torch.float64, device=CPU)
    lengths, products = [none], [none]

    residual = (rhs / scale)[:, is_open.to(rhs.device)]
    running = torch.zeros_like(residual)
    directions = ConjugateDirections.begin(residual, preconditioner)
    while is_open.any():
        step = len(lengths)
        following, length, _ = directions.advance(operator, residual)
        # One device read per step; zeros for columns that have ended.
        read = torch.zeros(4, num_columns, dtype=torch.float64, device=CPU)
        norm = torch.linalg.vector_norm(residual, dim=0)
        read[:, is_open] = torch.stack([norm, length, directions.product, following.product]).double().cpu()
        _check_finite(read.sum(0), step)
        norm, length, product, ahead = read
        took = length > 0
        length = torch.where(took, length, 0)
        running.addcmul_(directions.direction, (weights[step - 1] * length)[is_open].to(rhs))
        lengths.append(length.unsqueeze(0))
        products.append(product.unsqueeze(0))

        norms = torch.where(took, norm, norms)
        goes_on = took & (norms > tolerance)
        is_indefinite |= bool((is_open & (norms > floor) & (~took | (goes_on & (ahead <= 0)))).any())
        goes_on &= ahead > 0
        converged |= is_open & ~goes_on
        # A converged column keeps its reweighted sum: its solution would bias the estimate.
        ends = is_open[columns] & ((stops == step) | (converged[columns] & (stops >= step)))
        ended, place = ends.nonzero().squeeze(-1), is_open.cumsum(0) - 1  # place in `running`
        sums[:, ended.to(rhs.device)] = running[:, place[columns[ended]].to(rhs.device)]
        stays = goes_on & (last > step)
        if not torch.equal(stays, is_open):
            kept = stays[is_open].nonzero().squeeze(-1).to(rhs.device)
            residual, running, following = residual[:, kept], running[:, kept], following.narrow(kept)
        is_open, directions = stays, following
    status = SolveStatus.CONVERGED if converged.all() else SolveStatus.TRUNCATED
    return Series(
        sums=sums.mul_(scale[columns.to(rhs.device)]),
        lengths=torch.cat(lengths),
        products=scale.double().cpu().square() * torch.cat(products),
        converged=converged,
        status=SolveStatus.INDEFINITE if is_indefinite else status,
        norms=norms,
        seconds=time.perf_counter() - start,
    )


def _check_finite(values: Tensor, step: int) -> None:
    finite = torch.isfinite(values)
    if not finite.all():
        raise NonFiniteError(
            f"Column {int((~finite).nonzero()[0])} of a conjugate gradient series is not finite after {step} steps. Check "
            "the data and hyperparameters for extreme values; a noise constraint and float64 keep the arithmetic within "
            "range."
        )


@torch.no_grad()
def russian_roulette_solve(
    operator: LinearOperator,
    rhs: Tensor,
    truncation: Truncation,
    *,
    preconditioner: Preconditioner | PreconditionerRecipe | None = PivotedCholesky(rank=5),  # noqa: B008 (frozen)
    generator: torch.Generator | None = None,
) -> Solution:
    """An unbiased estimate of H^-1 B by a random number of conjugate gradient steps per column.

    Args:
        operator: H [n, n], positive definite.
        rhs: B [n] or [n, t].
        truncation: of the number of steps.
        preconditioner: P, or a recipe.
        generator: None has seed 0.

    Returns:
        A Solution. Its statistics have the residual norms of plain conjugate gradients.

    Raises:
        ValueError, TypeError: unfit arguments, a batch.
        NonFiniteError: NaN or infinity.
    """
    check_truncation(truncation)
    block = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
    groups = (ColumnGroup("targets", block.shape[-1], 0.0),)
    if operator.batch_shape:
        raise ValueError(f"A series is run for one system at a time, got a batch {tuple(operator.batch_shape)}.")
    LinearSystem(operator, block, groups)  # checks its arguments
    generator = given_or_seeded(generator)
    overhead = 1.0
    if isinstance(preconditioner, PreconditionerRecipe):
        preconditioner = preconditioner.build(operator, generator=generator)
        overhead += preconditioner.build_epochs
    truncation = within(truncation, operator.shape[-1], block.dtype)
    stops = draw_stops(truncation, (block.shape[-1],), generator)
    series = conjugate_gradient_series(
        operator,
        block,
        torch.arange(block.shape[-1], device=CPU),
        stops,
        survival_table(truncation, stops),
        preconditioner=preconditioner,
    )
    residual = block - operator._matmul(series.sums)
    norms = {"targets": float(series.norms.amax()) if len(series.norms) else 0.0}
    stats = SolveStats(series.iterations, float(series.iterations), overhead, norms, series.seconds)
    return Solution(series.sums.view_as(rhs), residual.view_as(rhs), series.status, stats)

"""Choice of a preconditioner."""

from dataclasses import dataclass

import torch
from linear_operator import LinearOperator

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.extensions import all_parts, far_field_error, kernel_inputs
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, kernel_and_noise
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky
from gpy_iterative.preconditioners.preconditioner import Preconditioner, PreconditionerRecipe
from gpy_iterative.preconditioners.vecchia import Vecchia

#: Mean remaining variance over the noise above which Vecchia is better.
LEFT_OVER = 3.0
#: Rows for a column of the low rank, and most columns.
ROWS_PER_COLUMN, MAX_RANK = 16, 500
#: More columns, which save passes over many entries: rows for one, and most numbers [n, rank].
ROWS_PER_FURTHER_COLUMN, MAX_NUMBERS = 128, 2**28
#: Input dimensions up to which trees are fast.
MOST_INPUTS = 8


@dataclass(frozen=True)
class LowRankOrVecchia(PreconditionerRecipe):
    """`RandomlyPivotedCholesky(rank)`, or `Vecchia()` where the low rank leaves more than three times the noise.

    Vecchia needs one system with at most eight input dimensions. A far field chooses it without a low rank, unless all
    kernels are RBF or one is periodic or not radial: neighbours then do not screen far points.

    Args:
        rank: None takes n / 16, at most 500; without a far field from 64,000 rows on more: n / 128 while [n, rank] are at
            most 2^28 numbers.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("rank", self.rank)

    def for_far_field(self, operator: LinearOperator) -> Vecchia | None:
        """`Vecchia()` if it is chosen without a low rank."""
        is_chosen = _has_neighbours(operator) and _is_screened(operator) and far_field_error(operator) is not None
        return Vecchia() if is_chosen else None

    @torch.no_grad()
    def build(self, operator: LinearOperator, *, generator: torch.Generator | None = None) -> Preconditioner:
        vecchia = self.for_far_field(operator)
        if vecchia is not None:
            return vecchia.build(operator, generator=generator)
        rank = _suited_rank(operator) if self.rank is None else self.rank
        factor = RandomlyPivotedCholesky(rank).build(operator, generator=generator)
        if _has_neighbours(operator) and _left_over(operator, factor) > LEFT_OVER:
            return Vecchia().build(operator, generator=generator)
        return factor


def _suited_rank(operator: LinearOperator) -> int:
    size, most = operator.shape[-1], MAX_RANK
    if far_field_error(operator) is None:
        most = max(most, min(size // ROWS_PER_FURTHER_COLUMN, MAX_NUMBERS // size))
    return min(max(size // ROWS_PER_COLUMN, 1), most)


def _left_over(operator: LinearOperator, factor: LowRankPlusDiagonal) -> float:
    """Mean of diag(K - L L^T) over that of the noise."""
    _, diagonal, noise = kernel_and_noise(operator)
    if noise is None:
        return 0.0
    rest = diagonal.sum() - torch.linalg.vector_norm(factor.factor).square()
    return float(rest / noise.sum())


def _is_screened(operator: LinearOperator) -> bool:
    kernels = [part for part in all_parts(operator) if isinstance(part, TiledLinearOperator)]
    functions = [part.function for part in kernels if isinstance(part, RadialKernelLinearOperator) and not part.angles]
    return len(functions) == len(kernels) and any(function != RBF for function in functions)


def _has_neighbours(operator: LinearOperator) -> bool:
    points = None if operator.batch_shape else kernel_inputs(operator)
    return points is not None and points.shape[-1] <= MOST_INPUTS

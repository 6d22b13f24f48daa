"""A low rank for what is global, and Vecchia's approximation for the rest.

Sang and Huang 2012, "A full scale approximation of covariance functions"; Gyger, Furrer and Sigrist 2025 (arXiv 2507.05064,
"Vecchia-inducing-points full-scale approximations").
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from linear_operator.operators import ConstantMulLinearOperator, RootLinearOperator, SumLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.extensions import all_parts, far_field_error, has_fast_products, kernel_inputs
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator, kernel_and_noise
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky, plus_diagonal
from gpy_iterative.preconditioners.preconditioner import PreconditionerRecipe, SampledPreconditioner
from gpy_iterative.preconditioners.sparse_inverse_cholesky import SparseInverseCholesky
from gpy_iterative.preconditioners.vecchia import Vecchia

#: Rows for a column of the low rank, least and most columns.
ROWS_PER_COLUMN, LEAST_RANK, MAX_RANK = 16, 100, 500
#: Rows for a neighbour, and their least and largest number: the factor costs n, the iterations that neighbours save n^2.
#: Where these cost less, the least number.
ROWS_PER_NEIGHBOUR, NEIGHBOURS = 300, (30, 60)
#: Largest eigenvalue of the rest over the noise up to which the low rank is enough: conjugate gradients take about twice
#: its root in iterations.
LARGEST_LEFT = 10.0
#: Points on a line up to which a low rank costs no more than the iterations that it saves beside `Vecchia()`, and what it
#: may leave there: cheap neighbours are better than one that leaves more.
MOST_ON_LINE, LEFT_ON_LINE = 10_000, 0.5


class LowRankPlusVecchiaFactor(SampledPreconditioner):
    """S = L L^T + (B^T B)^-1 = B^-1 (I + W W^T) B^-T with W = B L.

    Cost in multiply-adds: n k (k / 2 + m) for construction, 2 n (k + m) s for a solve.

    Args:
        factor: L [n, k].
        pivots: of L and of columns that it leaves out.
        local: B, with m entries beside the diagonal in a row.
    """

    def __init__(self, factor: Tensor, pivots: Tensor, local: SparseInverseCholesky) -> None:
        self.factor, self.pivots, self.local = factor, pivots, local
        # As for all columns, so that draws fit a low rank alone, too.
        self.num_signs = len(pivots) + len(local.order)
        #: I + W W^T.
        self.whitened = LowRankPlusDiagonal(local.whiten(factor), torch.ones_like(local.diagonal))
        self.build_epochs = local.build_epochs + len(pivots) / len(factor)

    def solve(self, rhs: Tensor) -> Tensor:
        """S^-1 rhs for [n, s]."""
        return self.local.transposed(self.whitened.solve(self.local.whiten(rhs)))

    def logdet(self) -> Tensor:
        return self.whitened.logdet() + self.local.logdet()

    def sample(self, base: Tensor) -> tuple[Tensor, Tensor]:
        factor_base, local_base = base.split([len(self.pivots), len(self.local.order)], dim=-2)
        whitened, dual = self.whitened.sample(torch.cat([factor_base[: self.whitened.rank], local_base], dim=-2))
        return self.local.unwhiten(whitened), self.local.transposed(dual)


@dataclass(frozen=True)
class LowRankPlusVecchia(PreconditionerRecipe):
    """Recipe for L L^T of `RandomlyPivotedCholesky(rank)`, plus Vecchia's approximation of what its first half leaves of H.

    Each serves where the other fails: smooth kernels have a low rank, and neighbours screen what it leaves. Where all of L
    leaves little, in a batch and without kernel inputs or noise, it is the low rank alone; with a far field Vecchia's
    alone, unless all kernels are RBF or one is periodic or not radial: neighbours then do not screen far points. Up to
    10,000 points on a line the low rank is tried first. Later hyperparameters keep the choice.

    Args:
        rank: None: n / 16, but 100 to 500.
        num_neighbours: None: n / 300, but 30 to 60; without low rank, and where products cost less than n^2, 30.
    """

    rank: int | None = None
    num_neighbours: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(name, value, optional=True)

    @torch.no_grad()
    def choices(self, operator: LinearOperator, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Pivots [k], none for Vecchia alone, and order of elimination [n] where there are neighbours."""
        is_local, pivots = _is_local(operator), torch.empty(0, dtype=torch.long, device=operator.device)
        if not is_local or (operator.shape[-1] <= MOST_ON_LINE and _is_on_line(operator)):
            factor, found = self._low_rank(operator).low_rank(operator, generator=generator)
            if not is_local or largest_left(operator, factor) < LEFT_ON_LINE:
                pivots = found
        order = Vecchia().choices(operator, generator) if has_neighbours(operator) else {}
        return {"pivots": pivots, **order}

    @torch.no_grad()
    def build(
        self,
        operator: LinearOperator,
        *,
        generator: torch.Generator | None = None,
        choices: Mapping[str, Tensor] | None = None,
    ) -> SampledPreconditioner:
        """See `PreconditionerRecipe.build`.

        Args:
            choices: of an earlier factor, for one that is smooth in the hyperparameters.
        """
        if choices is None and _is_local(operator):
            choices = self.choices(operator, generator)
        if choices is not None and "order" in choices and not len(choices["pivots"]):
            return Vecchia(self.num_neighbours or NEIGHBOURS[0]).build(operator, choices=choices)
        pivots = None if choices is None else choices["pivots"]
        factor, pivots = self._low_rank(operator).low_rank(operator, pivots, generator=generator)
        if not has_neighbours(operator) or largest_left(operator, factor) < LARGEST_LEFT:
            return plus_diagonal(operator, factor, pivots)
        factor = factor[:, : math.ceil(len(pivots) / 2)].contiguous()  # rows are read
        explained = ConstantMulLinearOperator(RootLinearOperator(factor), -factor.new_ones(()))
        rest = NoisyLinearOperator(SumLinearOperator(operator.kernel, explained), operator.noise)
        least, most = NEIGHBOURS
        suited = least if has_fast_products(operator) else min(max(len(factor) // ROWS_PER_NEIGHBOUR, least), most)
        local = Vecchia(self.num_neighbours or suited).build(rest, generator=generator, choices=choices)
        return LowRankPlusVecchiaFactor(factor, pivots, local)

    def _low_rank(self, operator: LinearOperator) -> RandomlyPivotedCholesky:
        suited = min(max(operator.shape[-1] // ROWS_PER_COLUMN, LEAST_RANK), MAX_RANK)
        return RandomlyPivotedCholesky(self.rank or suited)


def largest_left(operator: LinearOperator, factor: Tensor) -> float:
    """About the largest eigenvalue of K - L L^T over each row's noise: the trace over k, as if they fell like 1 / k^2."""
    _, diagonal, noise = kernel_and_noise(operator)
    rest = diagonal - torch.linalg.vector_norm(factor, dim=-1).square()
    return float((rest / noise).sum()) / max(factor.shape[-1], 1)


def has_neighbours(operator: LinearOperator) -> bool:
    """Whether Vecchia's approximation can serve."""
    is_single = isinstance(operator, NoisyLinearOperator) and not operator.batch_shape
    return is_single and kernel_inputs(operator) is not None


def _is_on_line(operator: LinearOperator) -> bool:
    points = kernel_inputs(operator)
    return points is not None and points.shape[-1] == 1


def _is_local(operator: LinearOperator) -> bool:
    """Whether Vecchia alone is best."""
    if not has_neighbours(operator) or far_field_error(operator) is None:
        return False
    kernels = [part for part in all_parts(operator) if isinstance(part, TiledLinearOperator)]
    functions = [part.function for part in kernels if isinstance(part, RadialKernelLinearOperator) and not part.angles]
    return len(functions) == len(kernels) and any(function != RBF for function in functions)

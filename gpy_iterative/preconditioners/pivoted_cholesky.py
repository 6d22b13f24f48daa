"""The greedily pivoted Cholesky factor of a kernel matrix, plus its noise.

Harbrecht, Peters and Schneider 2012, "On the low-rank approximation by the pivoted Cholesky decomposition"; as a
preconditioner for Gaussian processes: Gardner et al. 2018.
"""

import itertools
from dataclasses import dataclass
from typing import cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.linear_operators import NoisyLinearOperator, dense_rows
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal


class PivotedCholeskyFactor(LowRankPlusDiagonal):
    """L L^T + diag(d) on the pivots [*b, k] that it was built from."""

    def __init__(self, factor: Tensor, diagonal: Tensor, pivots: Tensor) -> None:
        super().__init__(factor, diagonal)
        self.pivots = pivots


@dataclass(frozen=True)
class PivotedCholesky:
    """The recipe; `build` makes the factor for one operator.

    Args:
        rank: columns of the factor; clamped at n.

    Raises:
        ValueError: a rank below 1.
    """

    rank: int = 100

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    @torch.no_grad()
    def build(
        self, operator: LinearOperator, pivots: Tensor | None = None, *, correct_diagonal: bool = False
    ) -> PivotedCholeskyFactor:
        """The factor of a system H [*b, n, n].

        Args:
            operator: K plus noise, whose K is factored and whose noise is the diagonal; of any other positive
                definite operator, the operator itself is factored and the rest of its diagonal is the diagonal.
            pivots: [*b, k] from an earlier factor: greedy search is skipped. While pivots stay, the factor is a smooth
                function of the hyperparameters.
            correct_diagonal: add diag(K - L L^T) to the diagonal, so that S has the diagonal of H.

        Cost: k rows of the kernel matrix and n k^2 multiply-adds, for one member of a batch after the other. Greedy
        search stops early when the rest of the diagonal is rounding noise (duplicate rows); a batch stops together.

        Raises:
            NonFiniteError: an entry of the factor is not finite.
            NotPositiveDefiniteError: the given pivots have become linearly dependent.
        """
        noisy = isinstance(operator, NoisyLinearOperator)
        kernel = operator.kernel if noisy else operator
        if kernel.shape != operator.shape:
            kernel = kernel.expand(operator.shape)
        diagonal = kernel.diagonal(dim1=-1, dim2=-2).detach()
        factor, pivots = self._factor(kernel, diagonal, pivots)
        rest = (diagonal - factor.square().sum(-1)).clamp_min(0)
        mean = diagonal.mean(-1, keepdim=True)
        eps = torch.finfo(diagonal.dtype).eps
        if noisy:
            noise = operator.noise.detach().expand(diagonal.shape)
            # Never zero: S stays positive definite, and its inverse finite, where the noise has vanished.
            return PivotedCholeskyFactor(
                factor, (noise + rest if correct_diagonal else noise).maximum(eps * mean), pivots
            )
        # On its pivots the factor is exact and leaves nothing, the unknown noise included.
        floor = 1e-3 * rest.mean(-1, keepdim=True) + eps**0.5 * mean
        return PivotedCholeskyFactor(factor, rest + floor, pivots)

    def _factor(self, kernel: LinearOperator, diagonal: Tensor, pivots: Tensor | None) -> tuple[Tensor, Tensor]:
        """L [*b, n, k] and its pivots [*b, k], member by member."""
        batch, size = diagonal.shape[:-1], diagonal.shape[-1]
        members = []
        for index in itertools.product(*map(range, batch)):
            member = cast(LinearOperator, kernel[index]) if batch else kernel
            if pivots is None:
                members.append(_greedy_factor(member, diagonal[index], min(self.rank, size)))
            else:
                members.append((_factor_on(member, pivots[index]), pivots[index]))
        rank = min(len(chosen) for _, chosen in members)
        factors = torch.stack([factor[:, :rank] for factor, _ in members])
        chosen = torch.stack([chosen[:rank] for _, chosen in members])
        return factors.reshape(*batch, size, rank), chosen.reshape(*batch, rank)


def _greedy_factor(kernel: LinearOperator, diagonal: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """L [n, k] and its pivots [k]: each pivot is where the rest of the diagonal is largest."""
    rest, size = diagonal.clone(), diagonal.shape[-1]
    # Columns are rows here: each step reads and writes contiguous memory.
    columns = diagonal.new_zeros(rank, size)
    pivots = torch.zeros(rank, dtype=torch.long, device=diagonal.device)
    stop = torch.finfo(diagonal.dtype).eps * diagonal.max()
    for step in range(rank):
        pivot = rest.argmax()
        if rest[pivot] <= stop:
            return columns[:step].mT, pivots[:step]
        column = dense_rows(kernel, pivot.unsqueeze(0)).squeeze(-2)
        column = column - columns[:step, pivot] @ columns[:step]
        column /= rest[pivot].sqrt()
        columns[step], pivots[step] = column, pivot
        rest = (rest - column.square()).clamp_min_(0)
        rest[pivots[: step + 1]] = 0
    return columns.mT, pivots


def _factor_on(kernel: LinearOperator, pivots: Tensor) -> Tensor:
    """The same factor in one go: K[:, p] times the inverse transpose of the Cholesky factor of K[p, p].

    The jitter covers the rounding of K[p, p]; it is fixed, so that the factor stays smooth in the hyperparameters.
    """
    if not len(pivots):  # a kernel that is zero
        return torch.zeros(kernel.shape[-1], 0, dtype=kernel.dtype, device=kernel.device)
    rows = dense_rows(kernel, pivots)
    dtype, rows = rows.dtype, rows.double()
    block = rows[:, pivots]
    jitter = max(1e-10, len(pivots) * torch.finfo(dtype).eps)
    block.diagonal().add_(jitter * block.diagonal().max())
    lower, info = torch.linalg.cholesky_ex(block)
    if not torch.isfinite(block).all():
        raise NonFiniteError("The kernel matrix has entries that are not finite: check data and hyperparameters.")
    if info.any():
        raise NotPositiveDefiniteError(
            f"The kernel matrix of {len(pivots)} pivots has no Cholesky factor: choose new pivots, or a lower rank."
        )
    return torch.linalg.solve_triangular(lower, rows, upper=False).mT.to(dtype)

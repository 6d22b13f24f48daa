"""The greedily pivoted Cholesky factor of a kernel matrix, plus its noise.

Harbrecht, Peters and Schneider 2012, "On the low-rank approximation by the pivoted Cholesky decomposition"; as a
preconditioner for Gaussian processes: Gardner et al. 2018.
"""

from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

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
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}.")

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

        Cost: k rows of the kernel matrix and n k^2 multiply-adds. Greedy search stops early when the rest of the
        diagonal is rounding noise (duplicate rows).
        """
        if operator.batch_shape:
            return self._build_batch(operator, pivots, correct_diagonal)
        noisy = isinstance(operator, NoisyLinearOperator)
        kernel = operator.kernel if noisy else operator
        diagonal = kernel.diagonal(dim1=-1, dim2=-2).detach()
        if pivots is None:
            factor, pivots = _greedy_factor(kernel, diagonal, min(self.rank, diagonal.shape[-1]))
        else:
            factor = _factor_on(kernel, pivots)
        rest = (diagonal - factor.square().sum(-1)).clamp_min(0)
        if not noisy:
            # What the factor leaves, kept away from 0 so that S stays positive definite.
            return PivotedCholeskyFactor(factor, rest + 1e-3 * diagonal.mean(), pivots)
        noise = operator.noise.detach()
        return PivotedCholeskyFactor(factor, noise + rest if correct_diagonal else noise, pivots)

    def _build_batch(
        self, operator: LinearOperator, pivots: Tensor | None, correct_diagonal: bool
    ) -> PivotedCholeskyFactor:
        flat = operator.reshape(-1, *operator.matrix_shape) if len(operator.batch_shape) > 1 else operator
        given = None if pivots is None else pivots.reshape(-1, pivots.shape[-1])
        members = [
            self.build(flat[index], None if given is None else given[index], correct_diagonal=correct_diagonal)
            for index in range(operator.batch_shape.numel())
        ]
        rank = min(member.rank for member in members)
        if any(member.rank != rank for member in members):  # one stopped early: all stop there
            members = [
                self.build(flat[index], member.pivots[:rank], correct_diagonal=correct_diagonal)
                for index, member in enumerate(members)
            ]
        stack = lambda tensors: torch.stack(tensors).reshape(*operator.batch_shape, *tensors[0].shape)
        return PivotedCholeskyFactor(
            stack([member.factor for member in members]),
            stack([member.diagonal for member in members]),
            stack([member.pivots for member in members]),
        )


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
    """The same factor in one go: K[:, p] times the inverse transpose of the Cholesky factor of K[p, p]."""
    rows = dense_rows(kernel, pivots).double()
    block = rows[:, pivots]
    block.diagonal().mul_(1 + 1e-10).add_(torch.finfo(kernel.dtype).eps * block.diagonal().max())
    return torch.linalg.solve_triangular(torch.linalg.cholesky(block), rows, upper=False).mT.to(kernel.dtype)

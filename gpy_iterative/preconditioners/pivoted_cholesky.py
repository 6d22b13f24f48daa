"""Pivoted Cholesky factors of a kernel matrix, plus its noise: greedy pivots, and random ones.

Greedy: Harbrecht, Peters and Schneider 2012, "On the low-rank approximation by the pivoted Cholesky decomposition"; as a
preconditioner for Gaussian processes: Gardner et al. 2018. Random: Epperly, Tropp and Webber 2024; as a preconditioner:
Diaz, Epperly, Frangella, Tropp and Webber 2023, "Robust, randomized preconditioning for kernel ridge regression".
"""

import itertools
import math
from dataclasses import dataclass
from typing import cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal
from gpy_iterative.preconditioners.partial_cholesky import PartialCholesky, factor_on
from gpy_iterative.preconditioners.recipe import LowRankRecipe, kernel_and_noise


class PivotedCholeskyFactor(LowRankPlusDiagonal):
    """L L^T + diag(d) on the pivots [*b, k] that it was built from.

    `jitter` [*b], in units of the largest diagonal entry of the pivots' block, is what that needed for a factor beyond what
    rounding usually takes; 0 where it needed no more.
    """

    def __init__(self, factor: Tensor, diagonal: Tensor, pivots: Tensor, jitter: Tensor) -> None:
        super().__init__(factor, diagonal)
        self.pivots, self.jitter = pivots, jitter


@dataclass(frozen=True)
class PivotedCholesky(LowRankRecipe):
    """The recipe; `build` makes the factor for one operator.

    Args:
        rank: columns of the factor; clamped at n.

    Raises:
        ValueError: a rank below 1.

    Examples:
        >>> gpi.solvers.ConjugateGradients(preconditioner=gpi.preconditioners.PivotedCholesky(rank=400)).preconditioner.rank
        400
    """

    @torch.no_grad()
    def build(
        self,
        operator: LinearOperator,
        pivots: Tensor | None = None,
        *,
        correct_diagonal: bool = False,
        generator: torch.Generator | None = None,
        known: PivotedCholeskyFactor | None = None,
    ) -> PivotedCholeskyFactor:
        """The factor of a system H [*b, n, n].

        Args:
            operator: K plus noise, whose K is factored and whose noise is the diagonal; of any other positive
                definite operator, the operator itself is factored and the rest of its diagonal is the diagonal.
            pivots: [*b, k] from an earlier factor: the search is skipped. While pivots stay, the factor is a smooth
                function of the hyperparameters.
            correct_diagonal: add diag(K - L L^T) to the diagonal, so that S has the diagonal of H.
            generator: for random pivots; None is seed 0.
            known: of the same operator, with whichever diagonal: where it has the same pivots, its L is taken.

        Cost: k rows of the kernel matrix and n k^2 multiply-adds, for one member of a batch after the other. The
        search stops early when the rest of the diagonal is rounding noise (duplicate rows); a batch stops together.

        Raises:
            NonFiniteError: an entry of the factor is not finite.

        Given pivots that have become linearly dependent stay: what they no longer carry is left to the diagonal.
        """
        kernel, diagonal, noise = kernel_and_noise(operator)
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        if known is not None and pivots is not None and torch.equal(known.pivots, pivots):
            factor, jitter = known.factor, known.jitter
        else:
            factor, pivots, jitter = self._factor(kernel, diagonal, noise, pivots, generator)
        # Norms, and not sums of squares, which would all be in memory at once.
        rest = (diagonal - torch.linalg.vector_norm(factor, dim=-1).square()).clamp_min(0)
        mean = diagonal.mean(-1, keepdim=True)
        eps = torch.finfo(diagonal.dtype).eps
        if noise is not None:
            # Never zero: S stays positive definite, and its inverse finite, where the noise has vanished.
            return PivotedCholeskyFactor(
                factor, (noise + rest if correct_diagonal else noise).maximum(eps * mean), pivots, jitter
            )
        # On its pivots the factor is exact and leaves nothing, the unknown noise included.
        floor = 1e-3 * rest.mean(-1, keepdim=True) + eps**0.5 * mean
        return PivotedCholeskyFactor(factor, rest + floor, pivots, jitter)

    def extend(self, partial: PartialCholesky, rank: int, generator: torch.Generator) -> None:
        """Grows a partial factor to a rank, by this recipe's way to choose pivots."""
        partial.add_greedy(rank)

    def _choose(self, partial: PartialCholesky, noise: Tensor | None, generator: torch.Generator) -> None:
        """All pivots of one member [n, n], whose noise is [n] where it is known."""
        self.extend(partial, min(self.rank, len(partial.rest)), generator)

    def _factor(
        self,
        kernel: LinearOperator,
        diagonal: Tensor,
        noise: Tensor | None,
        pivots: Tensor | None,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L [*b, n, k], its pivots [*b, k] and the jitter [*b] that it took, member by member."""
        batch, size = diagonal.shape[:-1], diagonal.shape[-1]
        members = []
        for index in itertools.product(*map(range, batch)):
            member = cast(LinearOperator, kernel[index]) if batch else kernel
            if pivots is None:
                partial = PartialCholesky(member, diagonal[index], min(self.rank, size))
                self._choose(partial, None if noise is None else noise[index], generator)
                members.append((partial.factor, partial.pivots, 0.0))
            else:
                rows = dense_rows(member, pivots[index])
                factor, jitter = factor_on(rows, rows[:, pivots[index]].double())
                members.append((factor, pivots[index], jitter))
        rank = min(len(chosen) for _, chosen, _ in members)
        factors = torch.stack([factor[:, :rank] for factor, _, _ in members])
        chosen = torch.stack([chosen[:rank] for _, chosen, _ in members])
        jitters = torch.tensor([jitter for _, _, jitter in members], dtype=diagonal.dtype, device=diagonal.device)
        return factors.reshape(*batch, size, rank), chosen.reshape(*batch, rank), jitters.reshape(batch)


@dataclass(frozen=True)
class RandomlyPivotedCholesky(PivotedCholesky):
    """Pivots drawn in proportion to the diagonal that is left, many at a time.

    Outliers, which greedy search takes first and which tell nothing about other data, are met as often as they matter.
    Rows come in blocks, which kernels evaluate several times faster than one by one.

    Args:
        rank: columns of the factor; clamped at n.
        block_size: proposals at a time; None is a tenth of the rank, and at least 8. A larger block takes fewer rounds,
            and more of its proposals are rejected; the distribution of the pivots is the same for every size.

    Cost beside that of `PivotedCholesky`: block_size^2 kernel entries a round.

    Raises:
        ValueError: a rank or block size below 1.
    """

    block_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            check_count("block_size", self.block_size)

    def extend(self, partial: PartialCholesky, rank: int, generator: torch.Generator) -> None:
        """Grows a partial factor to a rank by accepted proposals."""
        block_size = max(8, math.ceil(self.rank / 10)) if self.block_size is None else self.block_size
        partial.add_random(rank, block_size, generator)

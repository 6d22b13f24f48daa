"""Pivoted Cholesky factors of a kernel matrix, plus noise, with greedy or random pivots.

Greedy: Harbrecht et al. 2012, "On the low-rank approximation by the pivoted Cholesky decomposition"; preconditioner:
Gardner et al. 2018. Random: Chen et al. 2022, "Randomly pivoted Cholesky"; in blocks: Epperly et al. 2024, "Embrace
rejection"; preconditioner: Diaz et al. 2023, "Robust, randomized preconditioning for kernel ridge regression".
"""

import itertools
import math
from dataclasses import dataclass
from typing import cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, LowRankRecipe, kernel_and_noise

NOT_FINITE = "The kernel matrix has NaN or infinite entries. Check the data and the hyperparameters."


class PivotedCholeskyFactor(LowRankPlusDiagonal):
    """L L^T + diag(d), built on the pivots [*b, k].

    `jitter` [*b] is the raised jitter, relative to the largest diagonal entry of the pivots' block, or 0.
    """

    def __init__(self, factor: Tensor, diagonal: Tensor, pivots: Tensor, jitter: Tensor) -> None:
        super().__init__(factor, diagonal)
        self.pivots, self.jitter = pivots, jitter


@dataclass(frozen=True)
class PivotedCholesky(LowRankRecipe):
    """Recipe for a pivoted Cholesky factor with greedy pivots (largest remaining diagonal).

    Args:
        rank: columns of the factor, at most n.

    Raises:
        ValueError: a rank below 1.

    Examples:
        >>> gpi.solvers.ConjugateGradients(preconditioner=gpi.preconditioners.PivotedCholesky(rank=400)).preconditioner.rank
        400
    """

    rank: int = 100

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

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

        The search stops early when the remaining diagonal is rounding noise (duplicate rows); a batch stops together.
        Cost: k rows of the matrix and n k^2 multiply-adds per member.

        Args:
            operator: K plus noise, or another positive definite operator; its remaining diagonal then replaces the noise.
            pivots: [*b, k] of an earlier factor: no search, and the factor is smooth in the hyperparameters.
            correct_diagonal: adds diag(K - L L^T), so that S has the diagonal of H.
            generator: of random pivots; None: seed 0.
            known: a factor of the same operator, whose L is used if it has the same pivots.

        Raises:
            NonFiniteError: the factor is not finite.
        """
        kernel, diagonal, noise = kernel_and_noise(operator)
        if known is not None and pivots is not None and torch.equal(known.pivots, pivots):
            factor, jitter = known.factor, known.jitter
        else:
            generator = torch.Generator().manual_seed(0) if generator is None else generator
            factor, pivots, jitter = self._factor(kernel, diagonal, pivots, generator)
        # Sums of squares would need all squares in memory.
        rest = (diagonal - torch.linalg.vector_norm(factor, dim=-1).square()).clamp_min(0)
        mean = diagonal.mean(-1, keepdim=True)
        eps = torch.finfo(diagonal.dtype).eps
        if noise is None:
            # The factor is exact on its pivots: the floor replaces the unknown noise there.
            added = rest + 1e-3 * rest.mean(-1, keepdim=True) + eps**0.5 * mean
        else:
            # Never zero, so that S is positive definite without noise.
            added = (noise + rest if correct_diagonal else noise).maximum(eps * mean)
        return PivotedCholeskyFactor(factor, added, pivots, jitter)

    @torch.no_grad()
    def low_rank(self, operator: LinearOperator) -> Tensor:
        """L [*b, n, k]; cost as `build`."""
        kernel, diagonal, _ = kernel_and_noise(operator)
        return self._factor(kernel, diagonal, None, torch.Generator().manual_seed(0))[0]

    def _factor(
        self, kernel: LinearOperator, diagonal: Tensor, pivots: Tensor | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """L [*b, n, k], pivots [*b, k] and jitter [*b]."""
        batch, size = diagonal.shape[:-1], diagonal.shape[-1]
        members = []
        for index in itertools.product(*map(range, batch)):
            member = cast(LinearOperator, kernel[index]) if batch else kernel
            if pivots is None:
                partial = PartialCholesky(member, diagonal[index], min(self.rank, size))
                self._grow(partial, generator)
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

    def _grow(self, partial: "PartialCholesky", generator: torch.Generator) -> None:
        while partial.rank < partial.capacity:
            # Not a number, which would go to the host.
            pivot = partial.rest.argmax().unsqueeze(0)
            left = partial.rest[pivot]
            if left <= partial.stop:
                return
            partial.append(partial.rows(pivot) / left.sqrt(), pivot)


@dataclass(frozen=True)
class RandomlyPivotedCholesky(PivotedCholesky):
    """Recipe for a pivoted Cholesky factor with random pivots, in proportion to the remaining diagonal.

    Greedy pivots take outliers first. Cost: as `PivotedCholesky`, plus block_size^2 kernel entries per round.

    Args:
        rank: columns of the factor, at most n.
        block_size: proposals at a time, without effect on the distribution; None: rank / 10, at least 8.

    Raises:
        ValueError: a rank or block size below 1.
    """

    block_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            check_count("block_size", self.block_size)

    def _grow(self, partial: "PartialCholesky", generator: torch.Generator) -> None:
        proposals = max(8, math.ceil(self.rank / 10)) if self.block_size is None else self.block_size
        while (
            partial.rank < partial.capacity and not (partial.rest <= partial.stop).all()
        ):  # NaN must go on, to be found
            candidates = partial.propose(proposals, generator)
            block = partial.rest_of(candidates)
            # Rounding errors of running differences could be proposed without end.
            partial.rest[candidates] = block.diagonal().clamp_min(0).to(partial.rest)
            threshold = torch.rand(proposals, generator=generator, device=generator.device, dtype=torch.float64)
            most = partial.capacity - partial.rank
            chosen, lower = _accepted(block, threshold.cpu(), float(partial.stop), most)
            if len(chosen):
                pivots, lower = candidates[chosen.to(candidates.device)], lower.to(partial.rest)
                partial.append(torch.linalg.solve_triangular(lower, partial.rows(pivots), upper=False), pivots)


class PartialCholesky:
    """A growing L [n, k] with L L^T <= K, exact on its pivots.

    Args:
        kernel: K [n, n].
        diagonal: of K [n].
        capacity: the largest rank.

    Attributes:
        rest: diagonal of K - L L^T [n].
        stop: largest rest that is rounding noise.
        rank: k.
    """

    def __init__(self, kernel: LinearOperator, diagonal: Tensor, capacity: int) -> None:
        self.kernel, self.capacity, self.rank = kernel, capacity, 0
        self.rest, self.stop = diagonal.clone(), torch.finfo(diagonal.dtype).eps * diagonal.max()
        # L^T, for contiguous memory access.
        self._columns = diagonal.new_zeros(capacity, diagonal.shape[-1])
        self._pivots = torch.zeros(capacity, dtype=torch.long, device=diagonal.device)

    @property
    def factor(self) -> Tensor:
        """L [n, k]."""
        return self._columns[: self.rank].mT

    @property
    def pivots(self) -> Tensor:
        """Pivots [k] in the order of choice."""
        return self._pivots[: self.rank]

    def append(self, columns: Tensor, pivots: Tensor) -> None:
        """Adds columns of L, as rows [p, n], and their pivots [p]."""
        first, self.rank = self.rank, self.rank + len(pivots)
        self._columns[first : self.rank], self._pivots[first : self.rank] = columns, pivots
        self.rest = self.rest - columns.square().sum(0)
        # Columns that take more than is left show how large rounding errors are; further ones would be only these.
        self.stop = self.stop.maximum(-self.rest.min())
        self.rest.clamp_min_(0)
        self.rest[self.pivots] = 0

    def rows(self, rows: Tensor) -> Tensor:
        """Rows of K - L L^T [p, n]."""
        return dense_rows(self.kernel, rows) - self._columns[: self.rank, rows].mT @ self.factor.mT

    def rest_of(self, rows: Tensor) -> Tensor:
        """K - L L^T [p, p] on these rows, on the host in float64."""
        size = len(rows)
        entries = self.kernel[rows.repeat_interleave(size), rows.repeat(size)].view(size, size).double().cpu()
        known = self._columns[: self.rank, rows].double().cpu()
        return entries - known.mT @ known

    def propose(self, size: int, generator: torch.Generator) -> Tensor:
        """Random rows [size], with repetition."""
        left = self.rest.masked_fill(self.rest <= self.stop, 0).double().cumsum(-1)
        if not torch.isfinite(left[-1]):
            raise NonFiniteError(NOT_FINITE)
        drawn = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64).to(left.device)
        # `right`: a drawn 0 must not find a row without rest.
        return torch.searchsorted(left, drawn * left[-1], right=True).clamp_max(len(left) - 1)


def _accepted(block: Tensor, threshold: Tensor, stop: float, most: int) -> tuple[Tensor, Tensor]:
    """At most `most` accepted candidates and their lower Cholesky factor.

    `block` [p, p] is K - L L^T on the candidates, `threshold` [p] uniform draws. A candidate is accepted with the share of
    its diagonal entry that earlier ones leave.
    """
    rest, start, chosen = block.clone(), block.diagonal().clone(), []
    columns = [block[:, :0]]
    for candidate in range(len(block)):
        left = rest[candidate, candidate]
        if len(chosen) < most and left > stop and threshold[candidate] * start[candidate] < left:
            chosen.append(candidate)
            column = rest[:, candidate] / left.sqrt()
            columns.append(column.unsqueeze(-1))
            rest = rest - torch.outer(column, column)
    taken = torch.tensor(chosen, dtype=torch.long, device=block.device)
    return taken, torch.cat(columns, dim=-1)[taken].tril()


def factor_on(rows: Tensor, block: Tensor) -> tuple[Tensor, float]:
    """L = K C R^-T [n, k] with R the Cholesky factor of C^T K C, and its raised jitter.

    The jitter keeps L L^T below K. Where the block has eigenvalues below minus half of it (rounding), it is raised to
    twice their size, continuously in the hyperparameters. The result is relative to the block's largest diagonal entry;
    0 if not raised.

    Args:
        rows: C^T K [k, n]; for pivots, rows of K.
        block: C^T K C [k, k] in float64.
    """
    if not torch.isfinite(block).all():
        raise NonFiniteError(NOT_FINITE)
    scale = float(block.diagonal().max()) if len(block) else 0.0
    if not scale > 0:  # a zero kernel
        return torch.zeros_like(rows).mT, 0.0
    jitter, raised = max(1e-10, len(rows) * torch.finfo(rows.dtype).eps), 0.0
    identity = torch.eye(len(block), dtype=block.dtype, device=block.device)
    if torch.linalg.cholesky_ex(block + 0.5 * jitter * scale * identity).info:
        jitter = raised = -2 * float(torch.linalg.eigvalsh(block)[0]) / scale
    lower = torch.linalg.cholesky(block + jitter * scale * identity)
    # Faster than a solve with n columns, and float64 has digits left.
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return (inverse @ rows.double()).mT.to(rows.dtype), raised

"""Pivoted Cholesky factors of a kernel matrix, plus noise.

Greedy pivots: Harbrecht et al. 2012; Gardner et al. 2018. Random pivots: Chen et al. 2022, "Randomly pivoted Cholesky";
Epperly et al. 2024, "Embrace rejection"; Diaz et al. 2023.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.linear_operators.noisy import kernel_and_noise
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, LowRankRecipe
from gpy_iterative.random_numbers import given_or_seeded, uniform
from gpy_iterative.worker_threads import CPU

NOT_FINITE = "The kernel matrix has NaN or infinite entries. Check the data and the hyperparameters."


class PivotedCholeskyFactor(LowRankPlusDiagonal):
    """Low rank plus diagonal with pivots [*b, k]."""

    def __init__(self, factor: Tensor, diagonal: Tensor, pivots: Tensor) -> None:
        super().__init__(factor, diagonal)
        self.pivots = pivots


@dataclass(frozen=True)
class PivotedCholesky(LowRankRecipe):
    """Recipe for a pivoted Cholesky factor with greedy pivots (largest remaining diagonal); rank at most n."""

    rank: int = 100

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    @torch.no_grad()
    def choices(self, operator: LinearOperator, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Pivots [*b, k]."""
        return {"pivots": self.low_rank(operator, generator=generator)[1]}

    @torch.no_grad()
    def build(
        self,
        operator: LinearOperator,
        *,
        generator: torch.Generator | None = None,
        choices: Mapping[str, Tensor] | None = None,
        correct_diagonal: bool = False,
    ) -> PivotedCholeskyFactor:
        """See `PreconditionerRecipe.build`.

        Duplicate rows lower the rank. The remaining diagonal replaces unknown noise. Cost: k rows of the matrix, n k^2
        multiply-adds.

        Args:
            choices: of an earlier factor, for one that is smooth in the hyperparameters.
            correct_diagonal: adds diag(K - L L^T), so that S has the diagonal of H.
        """
        pivots = None if choices is None else choices["pivots"]
        factor, pivots = self.low_rank(operator, pivots, generator=generator)
        return plus_diagonal(operator, factor, pivots, correct_diagonal=correct_diagonal)

    @torch.no_grad()
    def low_rank(
        self, operator: LinearOperator, pivots: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """L [*b, n, k] and its pivots [*b, k], see `build`."""
        kernel, diagonal, _ = kernel_and_noise(operator)
        if pivots is None:
            generator = given_or_seeded(generator)
        batch, size = diagonal.shape[:-1], diagonal.shape[-1]
        members = []
        for index in itertools.product(*map(range, batch)):
            member = cast(LinearOperator, kernel[index]) if batch else kernel
            if pivots is None:
                partial = PartialCholesky(member, diagonal[index], min(self.rank, size))
                self._grow(partial, cast(torch.Generator, generator))
                members.append((partial.factor, partial.pivots))
            else:
                rows = dense_rows(member, pivots[index])
                members.append((factor_on(rows, rows[:, pivots[index]].double()), pivots[index]))
        rank = min(len(chosen) for _, chosen in members)
        factors = torch.stack([factor[:, :rank] for factor, _ in members])
        chosen = torch.stack([chosen[:rank] for _, chosen in members])
        return factors.reshape(*batch, size, rank), chosen.reshape(*batch, rank)

    def _grow(self, partial: "PartialCholesky", generator: torch.Generator) -> None:
        while partial.rank < partial.capacity:
            # A tensor: a number would make the host wait.
            pivot = partial.rest.argmax().unsqueeze(0)
            left = partial.rest[pivot]
            if left <= partial.stop:
                return
            partial.append(partial.rows(pivot) / left.sqrt(), pivot)


@dataclass(frozen=True)
class RandomlyPivotedCholesky(PivotedCholesky):
    """Recipe for a pivoted Cholesky factor with random pivots, in proportion to the remaining diagonal.

    Additional cost: block_size^2 kernel entries per round.

    Args:
        rank: at most n.
        block_size: candidates per round; does not change the distribution. None: rank / 10, at least 8.
    """

    block_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_size, optional=True)

    def _grow(self, partial: "PartialCholesky", generator: torch.Generator) -> None:
        proposals = max(8, math.ceil(self.rank / 10)) if self.block_size is None else self.block_size
        while (
            partial.rank < partial.capacity and not (partial.rest <= partial.stop).all()
        ):  # NaN must reach `propose`, which raises
            candidates = partial.propose(proposals, generator)
            block = partial.rest_of(candidates)
            # Rounding errors of a running rest could be proposed without end.
            partial.rest[candidates] = block.diagonal().clamp_min(0).to(partial.rest)
            threshold = uniform((proposals,), generator, CPU)
            most = partial.capacity - partial.rank
            chosen, lower = _accepted(block, threshold, float(partial.stop), most)
            if len(chosen):
                pivots = candidates[chosen.to(candidates.device)]
                rows, lower, inverse = partial.rows(pivots), lower.to(partial.rest), _inverse(lower).to(partial.rest)
                columns = inverse @ rows
                # Corrected: the inverse of an ill-conditioned block would leave more than rounding errors on pivots.
                partial.append(columns + inverse @ (rows - lower @ columns), pivots)


def plus_diagonal(
    operator: LinearOperator, factor: Tensor, pivots: Tensor, *, correct_diagonal: bool = False
) -> PivotedCholeskyFactor:
    """L L^T of `PivotedCholesky.low_rank` plus the noise, see `PivotedCholesky.build`."""
    _, diagonal, noise = kernel_and_noise(operator)
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
    return PivotedCholeskyFactor(factor, added, pivots)


class PartialCholesky:
    """A growing L [n, k] with L L^T <= K [n, n], exact on its pivots.

    `rest` is the diagonal of K - L L^T [n]; up to `stop` it is rounding noise.
    """

    def __init__(self, kernel: LinearOperator, diagonal: Tensor, capacity: int) -> None:
        self.kernel, self.capacity, self.rank = kernel, capacity, 0
        self.rest, self.stop = diagonal.clone(), torch.finfo(diagonal.dtype).eps * diagonal.max()
        # L^T
        self._columns = diagonal.new_zeros(capacity, diagonal.shape[-1])
        self._pivots = torch.zeros(capacity, dtype=torch.long, device=diagonal.device)

    @property
    def factor(self) -> Tensor:
        return self._columns[: self.rank].mT

    @property
    def pivots(self) -> Tensor:
        return self._pivots[: self.rank]

    def append(self, columns: Tensor, pivots: Tensor) -> None:
        """Adds columns of L [p, n] and their pivots [p]."""
        first, self.rank = self.rank, self.rank + len(pivots)
        self._columns[first : self.rank], self._pivots[first : self.rank] = columns, pivots
        self.rest = self.rest - columns.square().sum(0)
        # A negative rest is a rounding error.
        self.stop = self.stop.maximum(-self.rest.min())
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
        """Random rows, with repetition."""
        left = self.rest.masked_fill(self.rest <= self.stop, 0).double().cumsum(-1)
        if not torch.isfinite(left[-1]):
            raise NonFiniteError(NOT_FINITE)
        drawn = uniform((size,), generator, left.device)
        # `right`, because a drawn 0 must not choose a row without rest.
        return torch.searchsorted(left, drawn * left[-1], right=True).clamp_max(len(left) - 1)


def _accepted(block: Tensor, threshold: Tensor, stop: float, most: int) -> tuple[Tensor, Tensor]:
    """Accepted candidates and their lower Cholesky factor, from K - L L^T [p, p] and uniform draws [p].

    The probability is the part of a diagonal entry that earlier accepted candidates leave.
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


def factor_on(rows: Tensor, block: Tensor) -> Tensor:
    """L = K C R^-T [n, k] from rows C^T K and block C^T K C (float64), with R of `pivot_factor`."""
    if not torch.isfinite(block).all():
        raise NonFiniteError(NOT_FINITE)
    if not (block.diagonal() > 0).any():  # a zero kernel
        return torch.zeros_like(rows).mT
    return (_inverse(pivot_factor(block, rows.dtype)) @ rows.double()).mT.to(rows.dtype)


def pivot_factor(block: Tensor, dtype: torch.dtype) -> Tensor:
    """R [k, k], the Cholesky factor of a block (float64) of entries in `dtype` plus jitter.

    The jitter, relative to the largest diagonal entry, keeps L L^T below K. If rounding makes the block indefinite beyond
    half of it, it is raised, continuously in the hyperparameters.
    """
    scale = float(block.diagonal().max())
    jitter = max(1e-10, len(block) * torch.finfo(dtype).eps)
    identity = torch.eye(len(block), dtype=block.dtype, device=block.device)
    if torch.linalg.cholesky_ex(block + 0.5 * jitter * scale * identity).info:
        jitter = -2 * float(torch.linalg.eigvalsh(block)[0]) / scale
    return torch.linalg.cholesky(block + jitter * scale * identity)


def _inverse(lower: Tensor) -> Tensor:
    """Its product with n columns is faster than a solve with them, on CUDA by far."""
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False)

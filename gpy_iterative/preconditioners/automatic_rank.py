"""A pivoted Cholesky factor whose rank is chosen by cost: columns have to save more epochs than they cost.

What they save follows from the spectrum of what is left, which is estimated on a few rows.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gpy_iterative.checks import check_count, check_fraction
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.preconditioners.partial_cholesky import PartialCholesky
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky, RandomlyPivotedCholesky

#: Rows on which the spectrum of what is left is estimated.
SUBSET = 512
#: The rank grows by this part, and by no fewer columns than that, before the next look.
GROWTH = 0.25
LEAST_GROWTH = 32
#: The search ends when the sum has not fallen for so many growths: what is left of the spectrum falls in steps.
PATIENCE = 2


@dataclass(frozen=True)
class AutomaticRank(PivotedCholesky):
    """Stops raising the rank when further columns cost more than the epochs that they save.

    Args:
        rank: the largest rank.
        num_columns: s, right-hand sides of the solves that the factor is for.
        tolerance: relative residual norm of these solves.
        entry_cost: of evaluating one entry of the kernel matrix, in multiply-adds of the product. 40 is what a product
            with 65 columns, cold and from kept tiles, measures at n = 15,000 and d = 26 on a CPU; 0 is for kept tiles.
        pivoting: "random" or "greedy".

    The rule: with the eigenvalues m_1 >= m_2 >= ... of D^-1/2 (K - L L^T) D^-1/2, conjugate gradients take at most about
    I = min_j (j + sqrt(1 + m_{j+1}) log(2 / tolerance) / 2) epochs (j outliers take an iteration each; Axelsson and
    Lindskog 1986). To build column k costs (entry_cost + 3 k) / (n (s + entry_cost)) of an epoch, to apply k columns
    2 k s I / (n (s + entry_cost)). The rank grows by a quarter at a time until the sum of all three has not fallen
    twice in a row; columns that were built are kept. The eigenvalues come from 512 random rows and their halves: each is
    extrapolated to n by a power law of its own. Where the kernel matrix is well conditioned beside the noise, I is too
    large, and so is the rank.

    Raises:
        ValueError: an option outside its range; from `build`, an operator whose noise is not known apart.
    """

    rank: int = 1000
    num_columns: int = 16
    tolerance: float = 0.01
    entry_cost: float = 40.0
    pivoting: Literal["random", "greedy"] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_columns", self.num_columns)
        check_fraction("tolerance", self.tolerance)
        if not 0 <= self.entry_cost < math.inf:
            raise ValueError(f"entry_cost must be finite and not negative, got {self.entry_cost}.")
        if self.pivoting not in get_args(AutomaticRank.__annotations__["pivoting"]):
            raise ValueError(f"pivoting must be 'random' or 'greedy', got {self.pivoting!r}.")

    def extend(self, partial: PartialCholesky, rank: int, generator: torch.Generator) -> None:
        """Grows a partial factor to a rank."""
        recipe = RandomlyPivotedCholesky(self.rank) if self.pivoting == "random" else PivotedCholesky(self.rank)
        recipe.extend(partial, rank, generator)

    def _choose(self, partial: PartialCholesky, noise: Tensor | None, generator: torch.Generator) -> None:
        if noise is None:
            raise ValueError(
                "AutomaticRank weighs the kernel matrix against its noise: give it a NoisyLinearOperator, or take "
                "PivotedCholesky(rank=...)."
            )
        size = len(noise)
        limit = min(self.rank, size)
        look = _Look.at(partial, noise, generator)
        spent, best, unpaid = 0.0, self._epochs(look.eigenvalues(partial)), 0
        while partial.rank < limit and not partial.is_exhausted() and unpaid < PATIENCE:
            first = partial.rank
            self.extend(partial, min(limit, first + max(LEAST_GROWTH, math.ceil(GROWTH * first))), generator)
            epochs = self._epochs(look.eigenvalues(partial))
            spent += self._cost(first, partial.rank, size)
            total = epochs + spent + self._cost_of_applications(partial.rank, epochs, size)
            best, unpaid = (total, 0) if total < best else (best, unpaid + 1)

    def _epochs(self, eigenvalues: Tensor) -> float:
        """I for the largest eigenvalues, in falling order."""
        after = (1 + eigenvalues).sqrt() * math.log(2 / self.tolerance) / 2
        return float((torch.arange(len(after)) + after).min())

    def _cost(self, first: int, last: int, size: int) -> float:
        """Epochs that it takes to build the columns from `first` to `last`."""
        return (
            (last - first) * (self.entry_cost + 3 * (first + last) / 2) / (size * (self.num_columns + self.entry_cost))
        )

    def _cost_of_applications(self, rank: int, epochs: float, size: int) -> float:
        """Epochs that applying a factor of this rank in every iteration takes."""
        return 2 * rank * self.num_columns * epochs / (size * (self.num_columns + self.entry_cost))


@dataclass(frozen=True)
class _Look:
    """Some rows, the kernel matrix on them, and the roots of their noise's inverse."""

    rows: Tensor
    entries: Tensor
    scale: Tensor
    size: int

    @classmethod
    def at(cls, partial: PartialCholesky, noise: Tensor, generator: torch.Generator) -> "_Look":
        size = len(noise)
        order = torch.randperm(size, generator=generator, device=generator.device).to(noise.device)
        rows = order[: min(SUBSET, size)]
        least = torch.finfo(noise.dtype).eps * partial.rest.mean()
        return cls(rows, partial.entries(rows), noise[rows].maximum(least).double().rsqrt().cpu(), size)

    def eigenvalues(self, partial: PartialCholesky) -> Tensor:
        """The largest of D^-1/2 (K - L L^T) D^-1/2 as a whole, in falling order."""
        block = self.scale[:, None] * partial.complement(self.rows, self.entries) * self.scale
        if not torch.isfinite(block).all():
            raise NonFiniteError("The kernel matrix has entries that are not finite: check data and hyperparameters.")
        whole, half = _falling(block), len(block) // 2
        if len(block) == self.size:
            return whole
        parts = (_falling(block[:half, :half]) + _falling(block[half : 2 * half, half : 2 * half])) / 2
        # Halves know their smallest eigenvalues least.
        count = half // 2
        power = (whole[:count] / parts[:count]).log2().nan_to_num(1.0).clamp(0, 1)
        return whole[:count] * (self.size / len(block)) ** power


def _falling(block: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(block).flip(0).clamp_min(0)

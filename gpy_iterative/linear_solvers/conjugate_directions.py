"""The recurrence of preconditioned conjugate gradients, which the solver and the randomly truncated series share.

Gardner et al. 2018 (batched, each column with step sizes of its own); Lin et al. 2024, algorithm 1, with the first
direction preconditioned.
"""

from dataclasses import dataclass
from typing import Self

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal


@dataclass(frozen=True)
class ConjugateDirections:
    """Where the recurrence stands before a step.

    Attributes:
        direction: d [n, s].
        product: r^T P^-1 r [s].
        preconditioner: P, or None for the identity.
    """

    direction: Tensor
    product: Tensor
    preconditioner: LowRankPlusDiagonal | None

    @classmethod
    def begin(cls, residual: Tensor, preconditioner: LowRankPlusDiagonal | None) -> Self:
        """The first directions, for residuals [n, s]."""
        # Preconditioned, unlike in the printed algorithm, which diverges. Cloned: a step overwrites the residual.
        direction = (residual if preconditioner is None else preconditioner.solve(residual)).clone()
        return cls(direction, (residual * direction).sum(0), preconditioner)

    def advance(self, operator: LinearOperator, residual: Tensor) -> tuple[Self, Tensor, Tensor]:
        """One step, a product with H: the next directions, how far [s] the solution goes along these ones, and d^T H d [s].

        The solution's change is `direction * length`, which is left to the caller. The residual is overwritten.
        """
        image = operator._matmul(self.direction)
        energy = (self.direction * image).sum(0)
        length = _ratio(self.product, energy)
        residual.addcmul_(image, -length)
        preconditioned = residual if self.preconditioner is None else self.preconditioner.solve(residual)
        product = (residual * preconditioned).sum(0)
        direction = torch.addcmul(preconditioned, _ratio(product, self.product), self.direction)
        return type(self)(direction, product, self.preconditioner), length, energy

    def narrow(self, columns: Tensor) -> Self:
        """Some of the columns."""
        return type(self)(self.direction[:, columns], self.product[columns], self.preconditioner)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Zero where a column is done exactly (0 / 0); NaN stays NaN."""
    is_zero = denominator == 0
    return torch.where(is_zero, torch.zeros_like(numerator), numerator / denominator.masked_fill(is_zero, 1))

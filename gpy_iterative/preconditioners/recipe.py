"""What every recipe for a preconditioner answers."""

from abc import ABC, abstractmethod

import torch
from linear_operator import LinearOperator

from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal


class PreconditionerRecipe(ABC):
    """Options that make a preconditioner for any system: the operator comes when it is built."""

    @abstractmethod
    def build(self, operator: LinearOperator, *, generator: torch.Generator | None = None) -> LowRankPlusDiagonal:
        """The preconditioner of a system H [*b, n, n].

        Args:
            operator: K plus noise, or any other symmetric positive definite operator.
            generator: for recipes that draw; None is seed 0.
        """

"""What every recipe for a preconditioner answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
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


@dataclass(frozen=True)
class LowRankRecipe(PreconditionerRecipe):
    """A recipe whose factor has `rank` columns, clamped at n. Raises ValueError for a rank below 1."""

    rank: int = 100

    def __post_init__(self) -> None:
        check_count("rank", self.rank)


def kernel_and_noise(operator: LinearOperator) -> tuple[LinearOperator, Tensor, Tensor | None]:
    """What of a system is approximated, [*b, n, n], its diagonal [*b, n], and the noise [*b, n] that is kept as it is.

    K and the noise of K plus noise; of any other operator the operator itself, whose noise is unknown: None.
    """
    noisy = isinstance(operator, NoisyLinearOperator)
    kernel = operator.kernel if noisy else operator
    if kernel.shape != operator.shape:
        kernel = kernel.expand(operator.shape)
    diagonal = kernel.diagonal(dim1=-1, dim2=-2).detach()
    return kernel, diagonal, operator.noise.detach().expand(diagonal.shape) if noisy else None

"""What a preconditioner can do, and the recipe that builds one for a system."""

from abc import ABC, abstractmethod
from typing import Self

import torch
from linear_operator import LinearOperator
from torch import Tensor


class Preconditioner(ABC):
    """A symmetric positive definite S [*b, n, n] that resembles a system H, and is cheap to solve.

    Attributes:
        build_epochs: passes over the matrix that it took to build.
    """

    build_epochs: float

    @property
    @abstractmethod
    def smallest(self) -> Tensor:
        """A lower bound on the eigenvalues of S, [*b]."""

    @abstractmethod
    def solve(self, rhs: Tensor) -> Tensor:
        """S^-1 rhs for [*b, n, s]."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """The log-determinant of S, [*b]."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Self:
        """The same for vectors of another dtype."""

    @abstractmethod
    def __getitem__(self, index: int | tuple[int, ...]) -> "Preconditioner":
        """One member of a batch; nothing is computed again."""


class PreconditionerRecipe(ABC):
    """Options from which a preconditioner is built for any system."""

    @abstractmethod
    def build(self, operator: LinearOperator, *, generator: torch.Generator | None = None) -> Preconditioner:
        """The preconditioner of a system H [*b, n, n].

        Args:
            operator: K plus noise, or any other symmetric positive definite operator.
            generator: for recipes that draw; None is seed 0.
        """

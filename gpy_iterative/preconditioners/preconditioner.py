"""Interfaces."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from linear_operator import LinearOperator
from torch import Tensor


class Preconditioner(ABC):
    """A symmetric positive definite S [*b, n, n] that approximates a system H."""

    #: Passes over the matrix for construction.
    build_epochs: float = 0.0

    @abstractmethod
    def solve(self, rhs: Tensor) -> Tensor:
        """S^-1 rhs for [*b, n, s]."""

    def to(self, dtype: torch.dtype) -> Self:
        """A conversion to another dtype."""
        is_whole = lambda part: torch.is_tensor(part) and not part.is_floating_point()
        return self._mapped(lambda part: part if is_whole(part) else part.to(dtype))

    def __getitem__(self, index: int | tuple[int, ...]) -> Self:
        """One member of a batch."""
        return self._mapped(lambda part: part[index])

    def _mapped(self, function: Callable[[Any], Any]) -> Self:
        """A copy with other tensors and inner preconditioners."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Preconditioner):
                setattr(copied, name, function(value))
        return copied


class SampledPreconditioner(Preconditioner):
    """One of which samples are known, so that it may be the covariance of probes."""

    #: Rows of `sample`'s base.
    num_signs: int

    @abstractmethod
    def logdet(self) -> Tensor:
        """The log-determinant of S [*b]."""

    @abstractmethod
    def sample(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Xi of covariance S, for white `base` [*b, num_signs, s], and its dual S^-1 xi, [*b, n, s]."""


class PreconditionerRecipe(ABC):
    """Options of a preconditioner; ValueError for an option outside its range."""

    @abstractmethod
    def build(self, operator: LinearOperator, *, generator: torch.Generator | None = None) -> Preconditioner:
        """The preconditioner of a system H [*b, n, n].

        Args:
            operator: K plus noise, or any positive definite operator.
            generator: for random recipes; None: seed 0.

        Raises:
            NonFiniteError: an entry is not finite.
        """

"""What one call of a solver is about: the system, and all that comes with it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_solvers.solution import ColumnGroup, SolveProgress
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal


@dataclass(frozen=True)
class Given:
    """What the caller of `solve` gave the iteration to work with.

    Attributes:
        preconditioner: built for this operator.
        generator: to draw from.
    """

    preconditioner: LowRankPlusDiagonal | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class LinearSystem:
    """H V = B for a block of columns, with the other arguments of `Solver.solve`.

    Attributes:
        operator: H [*b, n, n].
        rhs: B [*b, n, s].
        groups: of all s columns.
        preconditioner, generator, callback: as in `Solver.solve`.
        initial_guess: [*b, n, s] or None.
        guess_image: H times it, or None where it is not known.
    """

    operator: LinearOperator
    rhs: Tensor
    groups: Sequence[ColumnGroup]
    preconditioner: LowRankPlusDiagonal | None
    initial_guess: Tensor | None
    generator: torch.Generator | None
    callback: Callable[[SolveProgress], None] | None
    guess_image: Tensor | None = None

    def members(self) -> Iterator["LinearSystem"]:
        """The systems [n, n] of a batch."""
        for index in itertools.product(*map(range, self.operator.batch_shape)):
            yield replace(
                self,
                operator=cast(LinearOperator, self.operator[index]),
                rhs=self.rhs[index],
                preconditioner=None if self.preconditioner is None else self.preconditioner[index],
                initial_guess=None if self.initial_guess is None else self.initial_guess[index],
                guess_image=None if self.guess_image is None else self.guess_image[index],
            )

    def check_guess(self) -> None:
        """ValueError unless the initial guess, and its image where that is given, fit B."""
        rhs = self.rhs
        for name, given in (("initial guess", self.initial_guess), ("initial guess' image", self.guess_image)):
            if given is not None and (given.shape, given.dtype) != (rhs.shape, rhs.dtype):
                raise ValueError(
                    f"The {name} {tuple(given.shape)}, {given.dtype}, does not fit the right-hand side "
                    f"{tuple(rhs.shape)}, {rhs.dtype}."
                )
        if self.initial_guess is None and self.guess_image is not None:
            raise ValueError("An image was given without the initial guess that it is of.")


def check_system(operator: LinearOperator, rhs: Tensor, groups: Sequence[ColumnGroup]) -> None:
    """ValueError unless B [*b, n, s] and its groups fit H [*b, n, n]."""
    if operator.shape[-1] != operator.shape[-2]:
        raise ValueError(f"Only square systems can be solved, got an operator {tuple(operator.shape)}.")
    if rhs.shape[:-1] != operator.shape[:-1]:
        raise ValueError(f"The right-hand side {tuple(rhs.shape)} does not fit the operator {tuple(operator.shape)}.")
    if (rhs.dtype, rhs.device) != (operator.dtype, operator.device):
        raise ValueError(
            f"The right-hand side is {rhs.dtype} on {rhs.device}, the operator {operator.dtype} on {operator.device}."
        )
    if sum(group.size for group in groups) != rhs.shape[-1]:
        raise ValueError(f"The groups' sizes do not add up to {rhs.shape[-1]} columns: {groups}.")

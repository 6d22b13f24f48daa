"""Systems whose structure has an exact factor at a fraction of the cost of a dense one."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_solvers.kronecker import KroneckerFactor, kronecker_parts
from gpy_iterative.linear_solvers.low_rank import LowRankFactor, low_rank_parts


class ExactFactor(Protocol):
    """A factor of H [*b, n, n]."""

    def solve(self, rhs: Tensor) -> Tensor:
        """H^-1 rhs for [*b, n, s]."""
        ...

    def logdet(self) -> Tensor:
        """The log-determinant of H [*b]."""
        ...

    def score(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Derivatives of log N(y; 0, H) by H, or by the parts of its structure, for weights H^-1 y [*b, n, 1]."""
        ...


def structure(operator: LinearOperator | Tensor) -> tuple[Callable[..., ExactFactor], tuple[Any, ...]] | None:
    """What makes the factor of H, and the parts, with graph, that it is made of; None for a dense matrix."""
    parts = low_rank_parts(operator)
    if parts is not None:
        return LowRankFactor, parts
    found = kronecker_parts(operator)
    if found is None:
        return None
    parts, entries = found
    return partial(KroneckerFactor, entries=entries), parts

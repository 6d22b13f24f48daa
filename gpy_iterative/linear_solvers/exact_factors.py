"""Systems whose structure has an exact factor at a fraction of the cost of a dense one."""

from collections.abc import Callable
from functools import partial
from typing import Any

from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_solvers.kronecker import KroneckerFactor, kronecker_parts
from gpy_iterative.linear_solvers.low_rank import LowRankFactor, low_rank_parts

Structure = tuple[Callable[..., KroneckerFactor | LowRankFactor], tuple[Any, ...]]


def structure(operator: LinearOperator | Tensor) -> Structure | None:
    """What makes the factor of H, and the parts, with graph, that it is made of; None for a dense matrix."""
    parts = low_rank_parts(operator)
    if parts is not None:
        return LowRankFactor, parts
    found = kronecker_parts(operator)
    if found is None:
        return None
    parts, entries = found
    return partial(KroneckerFactor, entries=entries), parts

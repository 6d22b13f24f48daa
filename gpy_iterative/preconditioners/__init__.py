"""Preconditioners: low rank plus diagonal approximations of the system, which are cheap to solve and to sample.

Begin with `low_rank_plus_diagonal.py`; `pivoted_cholesky.py` and `nystrom.py` have the recipes that build them.
The room may import `linear_operators` and all below it.
"""

from gpy_iterative.preconditioners.low_rank_plus_diagonal import (
    LowRankPlusDiagonal,
    NystromFactor,
    PreconditionerRecipe,
)
from gpy_iterative.preconditioners.nystrom import Nystrom
from gpy_iterative.preconditioners.pivoted_cholesky import (
    PivotedCholesky,
    PivotedCholeskyFactor,
    RandomlyPivotedCholesky,
)

__all__ = [
    "LowRankPlusDiagonal",
    "Nystrom",
    "NystromFactor",
    "PivotedCholesky",
    "PivotedCholeskyFactor",
    "PreconditionerRecipe",
    "RandomlyPivotedCholesky",
]

"""Preconditioners: approximations of the system that are cheap to solve, to sample and to take the determinant of.

Begin with `recipe.py`, what a solver is given; `pivoted_cholesky.py` and `nystrom.py` build low rank plus diagonal.
The room may import `linear_operators` and all below it.
"""

from gpy_iterative.preconditioners.automatic_rank import AutomaticRank
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, NystromFactor
from gpy_iterative.preconditioners.nystrom import Nystrom, RandomizedNystromFactor
from gpy_iterative.preconditioners.pivoted_cholesky import (
    PivotedCholesky,
    PivotedCholeskyFactor,
    RandomlyPivotedCholesky,
)
from gpy_iterative.preconditioners.recipe import PreconditionerRecipe

__all__ = [
    "AutomaticRank",
    "LowRankPlusDiagonal",
    "Nystrom",
    "NystromFactor",
    "PivotedCholesky",
    "PivotedCholeskyFactor",
    "PreconditionerRecipe",
    "RandomizedNystromFactor",
    "RandomlyPivotedCholesky",
]

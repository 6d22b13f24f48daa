"""Approximations of the system that are cheap to solve, sample and measure."""

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

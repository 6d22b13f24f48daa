"""Approximations of the system that are cheap to solve, sample and measure."""

from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, NystromFactor
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky, PivotedCholeskyFactor

__all__ = ["LowRankPlusDiagonal", "NystromFactor", "PivotedCholesky", "PivotedCholeskyFactor"]

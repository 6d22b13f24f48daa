"""Approximations of the system that are cheap to solve and to sample.

Begin with `preconditioner.py`; `low_rank_plus_vecchia.py` is the default. It may import `linear_operators` and below.
"""

from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, LowRankRecipe, NystromFactor
from gpy_iterative.preconditioners.low_rank_plus_vecchia import LowRankPlusVecchia, LowRankPlusVecchiaFactor
from gpy_iterative.preconditioners.nystrom import Nystrom
from gpy_iterative.preconditioners.pivoted_cholesky import (
    PivotedCholesky,
    PivotedCholeskyFactor,
    RandomlyPivotedCholesky,
)
from gpy_iterative.preconditioners.preconditioner import Preconditioner, PreconditionerRecipe, SampledPreconditioner
from gpy_iterative.preconditioners.sparse_inverse_cholesky import SparseInverseCholesky
from gpy_iterative.preconditioners.vecchia import Vecchia

__all__ = [
    "LowRankPlusDiagonal",
    "LowRankPlusVecchia",
    "LowRankPlusVecchiaFactor",
    "LowRankRecipe",
    "Nystrom",
    "NystromFactor",
    "PivotedCholesky",
    "PivotedCholeskyFactor",
    "Preconditioner",
    "PreconditionerRecipe",
    "RandomlyPivotedCholesky",
    "SampledPreconditioner",
    "SparseInverseCholesky",
    "Vecchia",
]

"""The mode of a Gaussian process with a likelihood that is not Gaussian, and the covariance around it."""

from gpy_iterative.solvers.laplace.actions import ActionState
from gpy_iterative.solvers.laplace.base import LaplaceSolver, Problem
from gpy_iterative.solvers.laplace.cholesky import LaplaceCholesky
from gpy_iterative.solvers.laplace.newton import LaplaceNewton
from gpy_iterative.solvers.laplace.solution import LaplaceSolution, mode_advice

__all__ = [
    "ActionState",
    "LaplaceCholesky",
    "LaplaceNewton",
    "LaplaceSolution",
    "LaplaceSolver",
    "Problem",
    "mode_advice",
]

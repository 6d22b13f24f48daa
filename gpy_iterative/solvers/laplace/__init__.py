"""The mode of a Gaussian process with a likelihood that is not Gaussian, and the covariance around it."""

from gpy_iterative.solvers.laplace.actions import ActionState
from gpy_iterative.solvers.laplace.base import LaplaceSolver, Problem
from gpy_iterative.solvers.laplace.cholesky import LaplaceCholesky
from gpy_iterative.solvers.laplace.default import EXACT_LATENTS, default_laplace_solver
from gpy_iterative.solvers.laplace.newton import LaplaceNewton
from gpy_iterative.solvers.laplace.refinement import refine
from gpy_iterative.solvers.laplace.solution import LaplaceSolution
from gpy_iterative.solvers.laplace.whitened import (
    WhitenedKernelLinearOperator,
    dense_factor,
    nystrom_preconditioner,
    whitened_system,
)

__all__ = [
    "EXACT_LATENTS",
    "ActionState",
    "LaplaceCholesky",
    "LaplaceNewton",
    "LaplaceSolution",
    "LaplaceSolver",
    "Problem",
    "WhitenedKernelLinearOperator",
    "default_laplace_solver",
    "dense_factor",
    "nystrom_preconditioner",
    "refine",
    "whitened_system",
]

"""Solvers for kernel matrices, and for the mode of Laplace's method."""

from gpy_iterative.laplace.newton.base import LaplaceSolution, LaplaceSolver
from gpy_iterative.laplace.newton.dense import LaplaceCholesky
from gpy_iterative.laplace.newton.newton import LaplaceNewton
from gpy_iterative.linear_solvers.accelerated_sketch_and_project import AcceleratedSketchAndProject
from gpy_iterative.linear_solvers.alternating_projections import AlternatingProjections
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, Solver, SolverState
from gpy_iterative.linear_solvers.cholesky import Cholesky, CholeskyFactor
from gpy_iterative.linear_solvers.columns import Iterate
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.default import EXACT_BELOW, default_solver
from gpy_iterative.linear_solvers.solution import ColumnGroup, Solution, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.linear_solvers.stochastic_descent import StochasticDualDescent, StochasticGradientDescent
from gpy_iterative.randomized.solver_series import Series, conjugate_gradient_series, russian_roulette_solve

__all__ = [
    "EXACT_BELOW",
    "AcceleratedSketchAndProject",
    "AlternatingProjections",
    "Cholesky",
    "CholeskyFactor",
    "ColumnGroup",
    "ConjugateGradients",
    "Iterate",
    "IterativeSolver",
    "LaplaceCholesky",
    "LaplaceNewton",
    "LaplaceSolution",
    "LaplaceSolver",
    "Series",
    "Solution",
    "SolveInputs",
    "SolveProgress",
    "SolveStats",
    "SolveStatus",
    "Solver",
    "SolverState",
    "StochasticDualDescent",
    "StochasticGradientDescent",
    "conjugate_gradient_series",
    "default_solver",
    "russian_roulette_solve",
]

"""Linear systems with the kernel matrix: solved, and their log-determinant measured."""

from gpy_iterative.solvers.accelerated_sketch_and_project import AcceleratedSketchAndProject
from gpy_iterative.solvers.alternating_projections import AlternatingProjections
from gpy_iterative.solvers.base import Iterate, IterativeSolver, Solver
from gpy_iterative.solvers.cholesky import Cholesky, CholeskyFactor
from gpy_iterative.solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.solvers.default import EXACT_BELOW, default_solver
from gpy_iterative.solvers.krylov_logarithm import krylov_logarithm_terms
from gpy_iterative.solvers.lanczos import MAX_LOGDET_PRODUCTS, LogDeterminant, stochastic_logdet
from gpy_iterative.solvers.laplace import LaplaceCholesky, LaplaceNewton, LaplaceSolution, LaplaceSolver
from gpy_iterative.solvers.linear_system import Given
from gpy_iterative.solvers.quadrature_shares import QuadratureShares
from gpy_iterative.solvers.series import (
    Series,
    conjugate_gradient_series,
    russian_roulette_solve,
)
from gpy_iterative.solvers.solution import ColumnGroup, Solution, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.solvers.stochastic_dual_descent import StochasticDualDescent
from gpy_iterative.solvers.stochastic_gradient_descent import StochasticGradientDescent
from gpy_iterative.solvers.warm_start import WarmStart

__all__ = [
    "EXACT_BELOW",
    "MAX_LOGDET_PRODUCTS",
    "AcceleratedSketchAndProject",
    "AlternatingProjections",
    "Cholesky",
    "CholeskyFactor",
    "ColumnGroup",
    "ConjugateGradients",
    "Given",
    "Iterate",
    "IterativeSolver",
    "LaplaceCholesky",
    "LaplaceNewton",
    "LaplaceSolution",
    "LaplaceSolver",
    "LogDeterminant",
    "QuadratureShares",
    "Series",
    "Solution",
    "SolveProgress",
    "SolveStats",
    "SolveStatus",
    "Solver",
    "StochasticDualDescent",
    "StochasticGradientDescent",
    "WarmStart",
    "conjugate_gradient_series",
    "default_solver",
    "krylov_logarithm_terms",
    "russian_roulette_solve",
    "stochastic_logdet",
]

"""Default solver."""

from linear_operator import LinearOperator

from gpy_iterative.linear_operators.extensions import has_fast_products, sum_terms
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.linear_solvers.alternating_projections import AlternatingProjections
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.exact_factors import structure
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky

#: Up to this size a dense factor costs less than an iterative solve.
EXACT_BELOW = 3000


def default_solver(operator: LinearOperator) -> Solver:
    """Cholesky up to 3,000 rows and for exact structures; beyond, alternating projections.

    Conjugate gradients for structured operators, grids and far fields, whose products are cheap.
    """
    if operator.shape[-1] <= EXACT_BELOW or structure(operator) is not None:
        return Cholesky()
    kernel = operator.kernel if isinstance(operator, NoisyLinearOperator) else operator
    if not any(isinstance(term, TiledLinearOperator) for term, _ in sum_terms(kernel)):
        return ConjugateGradients(preconditioner=RandomlyPivotedCholesky(rank=100))
    return ConjugateGradients() if has_fast_products(kernel) else AlternatingProjections()

"""Which mode solver a problem gets when its user has named none."""

from gpy_iterative.laplace.newton.base import LaplaceSolver
from gpy_iterative.laplace.newton.cholesky import LaplaceCholesky
from gpy_iterative.laplace.newton.newton import LaplaceNewton

#: Up to so many latent values (points times functions) dense factors cost little, and are exact.
EXACT_LATENTS = 2000


def default_laplace_solver(size: int) -> LaplaceSolver:
    """Dense factors up to 2,000 latent values, computation-aware Newton steps beyond."""
    return LaplaceCholesky() if size <= EXACT_LATENTS else LaplaceNewton()

"""Models that need more of their posterior than GPyTorch's ExactGP has."""

from gpy_iterative.models.iterative_laplace_gp import IterativeLaplaceGP

__all__ = ["IterativeLaplaceGP"]

"""Gaussian processes at scale for GPyTorch: swap the marginal log likelihood, keep everything else."""

from gpy_iterative import (
    errors,
    kernels,
    linear_operators,
    mlls,
    preconditioners,
    prediction,
    probes,
    solvers,
    spectral,
    truncation,
    weight_space,
)
from gpy_iterative.initialization import initialize_from_subsets

__all__ = [
    "errors",
    "initialize_from_subsets",
    "kernels",
    "linear_operators",
    "mlls",
    "preconditioners",
    "prediction",
    "probes",
    "solvers",
    "spectral",
    "truncation",
    "weight_space",
]

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
)

__all__ = [
    "errors",
    "kernels",
    "linear_operators",
    "mlls",
    "preconditioners",
    "prediction",
    "probes",
    "solvers",
    "spectral",
]

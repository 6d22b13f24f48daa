"""Gaussian processes at scale for GPyTorch: replace the marginal log likelihood, keep everything else."""

from gpy_iterative import (
    errors,
    fitting,
    kernels,
    likelihoods,
    linear_operators,
    mlls,
    models,
    preconditioners,
    prediction,
    probes,
    progress,
    solvers,
    spectral,
    truncation,
)
from gpy_iterative.fitting.fit import fit
from gpy_iterative.fitting.subsets import initialize_from_subsets

#: Semantic version, set only here.
__version__ = "0.1.0"

__all__ = [
    "errors",
    "fit",
    "fitting",
    "initialize_from_subsets",
    "kernels",
    "likelihoods",
    "linear_operators",
    "mlls",
    "models",
    "preconditioners",
    "prediction",
    "probes",
    "progress",
    "solvers",
    "spectral",
    "truncation",
]

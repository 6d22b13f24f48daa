"""Distributions of probe vectors, for estimators of your own."""

from gpy_iterative.exact.probes import (
    ExactPrior,
    Gaussian,
    Preconditioned,
    ProbeDistribution,
    Probes,
    Rademacher,
    RandomFeatures,
)

__all__ = [
    "ExactPrior",
    "Gaussian",
    "Preconditioned",
    "ProbeDistribution",
    "Probes",
    "Rademacher",
    "RandomFeatures",
]

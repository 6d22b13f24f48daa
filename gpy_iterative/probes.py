"""Probe vector distributions, for your own estimators."""

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

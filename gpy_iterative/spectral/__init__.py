"""Spectral densities of stationary kernels (`densities.py`), random (`features.py`) and finite features (`finite.py`).

It may import `linear_operators` and below.
"""

from gpy_iterative.spectral.densities import (
    Draws,
    SpectralDensity,
    draws_under,
    gamma_quantile,
    register_spectral_density,
    spectral_density,
)
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.spectral.summands import Summand, summands

__all__ = [
    "Draws",
    "RandomFourierFeatures",
    "SpectralDensity",
    "Summand",
    "draws_under",
    "gamma_quantile",
    "register_spectral_density",
    "spectral_density",
    "summands",
]

"""Spectral densities of stationary kernels (`densities.py`), random (`features.py`) and finite features (`finite.py`).

It may import `linear_operators` and below.
"""

from gpy_iterative.spectral.densities import Draws, SpectralDensity, register_spectral_density, spectral_density
from gpy_iterative.spectral.features import RandomFourierFeatures

__all__ = [
    "Draws",
    "RandomFourierFeatures",
    "SpectralDensity",
    "register_spectral_density",
    "spectral_density",
]

"""Distributions of the number of terms of a truncated series."""

from gpy_iterative.randomized.truncation import AutomaticTruncation, ExponentialTruncation, FixedTruncation, Truncation

__all__ = [
    "AutomaticTruncation",
    "ExponentialTruncation",
    "FixedTruncation",
    "Truncation",
]

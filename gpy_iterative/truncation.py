"""Distributions over where a truncated series stops."""

from gpy_iterative.randomized.truncation import AutomaticTruncation, ExponentialTruncation, FixedTruncation, Truncation

__all__ = [
    "AutomaticTruncation",
    "ExponentialTruncation",
    "FixedTruncation",
    "Truncation",
]

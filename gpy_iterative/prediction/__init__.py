"""Posteriors of exact Gaussian processes, from the training solves."""

from gpy_iterative.prediction.posterior import PathwisePosterior, VarianceError
from gpy_iterative.prediction.strategy import PathwisePredictionStrategy

__all__ = ["PathwisePosterior", "PathwisePredictionStrategy", "VarianceError"]

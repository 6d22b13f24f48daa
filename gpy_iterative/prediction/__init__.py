"""Posteriors of exact Gaussian processes, from the training solves."""

from gpy_iterative.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.prediction.posterior import PathwisePosterior
from gpy_iterative.prediction.sample_paths import SamplePaths
from gpy_iterative.prediction.strategy import PathwisePredictionStrategy
from gpy_iterative.prediction.training_system import check_inputs
from gpy_iterative.prediction.variance_error import VarianceError

__all__ = [
    "PathwisePosterior",
    "PathwisePredictionStrategy",
    "PosteriorCovarianceLinearOperator",
    "SamplePaths",
    "VarianceError",
    "check_inputs",
]

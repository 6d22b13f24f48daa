"""Posteriors of exact Gaussian processes and of Laplace and weight-space models."""

from gpy_iterative.exact.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.exact.prediction.posterior import PathwisePosterior
from gpy_iterative.exact.prediction.sample_paths import SamplePaths
from gpy_iterative.exact.prediction.strategy import PathwisePredictionStrategy
from gpy_iterative.exact.prediction.variance_error import VarianceError
from gpy_iterative.features.weight_space.posterior import WeightSpacePaths, WeightSpacePosterior
from gpy_iterative.laplace.paths import LaplaceSamplePaths
from gpy_iterative.laplace.posterior import LaplacePosterior, VarianceSplit
from gpy_iterative.training.report import SolveReport

__all__ = [
    "LaplacePosterior",
    "LaplaceSamplePaths",
    "PathwisePosterior",
    "PathwisePredictionStrategy",
    "PosteriorCovarianceLinearOperator",
    "SamplePaths",
    "SolveReport",
    "VarianceError",
    "VarianceSplit",
    "WeightSpacePaths",
    "WeightSpacePosterior",
]

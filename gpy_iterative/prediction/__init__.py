"""Posteriors of exact Gaussian processes, from the training solves."""

from gpy_iterative.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.prediction.joint_prior import checked_inputs, fixed_parameters
from gpy_iterative.prediction.posterior import PathwisePosterior, graph_for
from gpy_iterative.prediction.sample_paths import SamplePaths
from gpy_iterative.prediction.snapshot import ModelSnapshot
from gpy_iterative.prediction.strategy import PathwisePredictionStrategy
from gpy_iterative.prediction.training_system import LikelihoodParams, check_inputs, evaluating, prior_at
from gpy_iterative.prediction.variance_error import VarianceError

__all__ = [
    "LikelihoodParams",
    "ModelSnapshot",
    "PathwisePosterior",
    "PathwisePredictionStrategy",
    "PosteriorCovarianceLinearOperator",
    "SamplePaths",
    "VarianceError",
    "check_inputs",
    "checked_inputs",
    "evaluating",
    "fixed_parameters",
    "graph_for",
    "prior_at",
]

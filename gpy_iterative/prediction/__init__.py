"""Posteriors: of exact Gaussian processes from the training solves, of others around their mode."""

from gpy_iterative.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.prediction.joint_prior import checked_inputs, graph_for
from gpy_iterative.prediction.laplace_paths import LaplaceSamplePaths
from gpy_iterative.prediction.laplace_posterior import LaplacePosterior, VarianceSplit
from gpy_iterative.prediction.laplace_targets import check_targets_fit, observed_params, observed_points
from gpy_iterative.prediction.latent_blocks import latent_terms
from gpy_iterative.prediction.own_lock import OwnLock
from gpy_iterative.prediction.posterior import PathwisePosterior
from gpy_iterative.prediction.sample_paths import SamplePaths
from gpy_iterative.prediction.snapshot import ModelSnapshot, evaluation_copies
from gpy_iterative.prediction.strategy import PathwisePredictionStrategy
from gpy_iterative.prediction.training_system import LikelihoodParams, check_inputs, prior_at
from gpy_iterative.prediction.variance_error import VarianceError

__all__ = [
    "LaplacePosterior",
    "LaplaceSamplePaths",
    "LikelihoodParams",
    "ModelSnapshot",
    "OwnLock",
    "PathwisePosterior",
    "PathwisePredictionStrategy",
    "PosteriorCovarianceLinearOperator",
    "SamplePaths",
    "VarianceError",
    "VarianceSplit",
    "check_inputs",
    "check_targets_fit",
    "checked_inputs",
    "evaluation_copies",
    "graph_for",
    "latent_terms",
    "observed_params",
    "observed_points",
    "prior_at",
]

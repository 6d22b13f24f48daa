"""The likelihoods that GPyTorch lacks, closed-form expectations, and the curvature that Laplace's method takes."""

from gpy_iterative.likelihoods.bernoulli import LogitBernoulliLikelihood
from gpy_iterative.likelihoods.curvature import (
    BlockCurvature,
    Curvature,
    DiagonalCurvature,
    SoftmaxCurvature,
    curvature_of_blocks,
)
from gpy_iterative.likelihoods.expected_log_prob import expected_log_prob
from gpy_iterative.likelihoods.log_concave import is_log_concave
from gpy_iterative.likelihoods.pointwise import (
    COVARIANCE_FLOOR,
    COVARIANCE_FLOOR_FLOAT32,
    NO_FLOOR,
    STEP_FLOOR,
    CurvatureFloor,
    CurvatureKind,
    PointwiseLikelihood,
    check_curvature_kind,
    check_laplace_likelihood,
)
from gpy_iterative.likelihoods.poisson import PoissonLogLikelihood
from gpy_iterative.likelihoods.registry import check_support, register_curvature
from gpy_iterative.likelihoods.smoothed import SmoothedLikelihood

__all__ = [
    "COVARIANCE_FLOOR",
    "COVARIANCE_FLOOR_FLOAT32",
    "NO_FLOOR",
    "STEP_FLOOR",
    "BlockCurvature",
    "Curvature",
    "CurvatureFloor",
    "CurvatureKind",
    "DiagonalCurvature",
    "LogitBernoulliLikelihood",
    "PointwiseLikelihood",
    "PoissonLogLikelihood",
    "SmoothedLikelihood",
    "SoftmaxCurvature",
    "check_curvature_kind",
    "check_laplace_likelihood",
    "check_support",
    "curvature_of_blocks",
    "expected_log_prob",
    "is_log_concave",
    "register_curvature",
]

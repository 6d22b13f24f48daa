"""The likelihoods that GPyTorch lacks, and the curvature of all that Laplace's method can take."""

from gpy_iterative.likelihoods.bernoulli import LogitBernoulliLikelihood
from gpy_iterative.likelihoods.curvature import (
    BlockCurvature,
    Curvature,
    DiagonalCurvature,
    SoftmaxCurvature,
    curvature_of_blocks,
)
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
from gpy_iterative.likelihoods.registry import register_curvature

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
    "SoftmaxCurvature",
    "check_curvature_kind",
    "check_laplace_likelihood",
    "curvature_of_blocks",
    "register_curvature",
]

"""Likelihoods that GPyTorch lacks, and tools of Laplace's method."""

from gpy_iterative.laplace.likelihoods.curvature import BlockCurvature, Curvature, SoftmaxCurvature
from gpy_iterative.laplace.likelihoods.own import LogitBernoulliLikelihood, PoissonLogLikelihood
from gpy_iterative.laplace.likelihoods.pointwise import CurvatureFloor, PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.smoothed import SmoothedLikelihood
from gpy_iterative.training.likelihood_forms import expected_log_prob, is_log_concave, register_curvature

__all__ = [
    "BlockCurvature",
    "Curvature",
    "CurvatureFloor",
    "LogitBernoulliLikelihood",
    "PointwiseLikelihood",
    "PoissonLogLikelihood",
    "SmoothedLikelihood",
    "SoftmaxCurvature",
    "expected_log_prob",
    "is_log_concave",
    "register_curvature",
]

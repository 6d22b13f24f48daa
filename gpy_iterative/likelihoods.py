"""Likelihoods that GPyTorch lacks, and tools of Laplace's method."""

from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.own import LogitBernoulliLikelihood, PoissonLogLikelihood
from gpy_iterative.laplace.likelihoods.pointwise import CurvatureFloor, PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.smoothed import SmoothedLikelihood
from gpy_iterative.training.likelihood_forms import register_curvature

__all__ = [
    "Curvature",
    "CurvatureFloor",
    "LogitBernoulliLikelihood",
    "PointwiseLikelihood",
    "PoissonLogLikelihood",
    "SmoothedLikelihood",
    "register_curvature",
]

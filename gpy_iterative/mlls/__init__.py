"""Marginal log likelihoods: what a training loop calls in place of GPyTorch's own."""

from gpy_iterative.mlls.base import IterativeMarginalLogLikelihood
from gpy_iterative.mlls.hutchinson import HutchinsonMarginalLogLikelihood
from gpy_iterative.mlls.pathwise import PathwiseMarginalLogLikelihood
from gpy_iterative.mlls.report import MarginalLogLikelihoodReport

__all__ = [
    "HutchinsonMarginalLogLikelihood",
    "IterativeMarginalLogLikelihood",
    "MarginalLogLikelihoodReport",
    "PathwiseMarginalLogLikelihood",
]

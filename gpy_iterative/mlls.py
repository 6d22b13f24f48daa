"""Marginal log likelihoods that replace GPyTorch's own."""

from gpy_iterative.exact.base import GaussianMarginalLogLikelihood, IterativeMarginalLogLikelihood
from gpy_iterative.exact.hutchinson import HutchinsonMarginalLogLikelihood
from gpy_iterative.exact.pathwise import PathwiseMarginalLogLikelihood
from gpy_iterative.features.base import MinibatchReport
from gpy_iterative.features.compositional import CompositionalMarginalLogLikelihood
from gpy_iterative.features.minibatch import MinibatchMarginalLogLikelihood
from gpy_iterative.features.minimax import MinimaxMarginalLogLikelihood
from gpy_iterative.features.variational_feature import VariationalFeatureMarginalLogLikelihood
from gpy_iterative.laplace.mll import LaplaceMarginalLogLikelihood, LaplaceReport
from gpy_iterative.quadruply.elbo import QuadruplyStochasticELBO, QuadruplyStochasticReport
from gpy_iterative.randomized.random_features import FrequencyReport, RFFMarginalLogLikelihood
from gpy_iterative.randomized.russian_roulette import (
    RussianRouletteMarginalLogLikelihood,
    TruncatedCGMarginalLogLikelihood,
)
from gpy_iterative.randomized.series import TruncationReport
from gpy_iterative.randomized.single_sample_rff import SingleSampleRFFMarginalLogLikelihood
from gpy_iterative.training.report import MarginalLogLikelihoodReport, Report

__all__ = [
    "CompositionalMarginalLogLikelihood",
    "FrequencyReport",
    "GaussianMarginalLogLikelihood",
    "HutchinsonMarginalLogLikelihood",
    "IterativeMarginalLogLikelihood",
    "LaplaceMarginalLogLikelihood",
    "LaplaceReport",
    "MarginalLogLikelihoodReport",
    "MinibatchMarginalLogLikelihood",
    "MinibatchReport",
    "MinimaxMarginalLogLikelihood",
    "PathwiseMarginalLogLikelihood",
    "QuadruplyStochasticELBO",
    "QuadruplyStochasticReport",
    "RFFMarginalLogLikelihood",
    "Report",
    "RussianRouletteMarginalLogLikelihood",
    "SingleSampleRFFMarginalLogLikelihood",
    "TruncatedCGMarginalLogLikelihood",
    "TruncationReport",
    "VariationalFeatureMarginalLogLikelihood",
]

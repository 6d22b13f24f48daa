"""Marginal log likelihoods: what a training loop calls in place of GPyTorch's own."""

from gpy_iterative.mlls.base import GaussianMarginalLogLikelihood, IterativeMarginalLogLikelihood
from gpy_iterative.mlls.compositional import CompositionalMarginalLogLikelihood
from gpy_iterative.mlls.hutchinson import HutchinsonMarginalLogLikelihood
from gpy_iterative.mlls.laplace import LaplaceMarginalLogLikelihood
from gpy_iterative.mlls.minibatch import MinibatchMarginalLogLikelihood
from gpy_iterative.mlls.minimax import MinimaxMarginalLogLikelihood
from gpy_iterative.mlls.pathwise import PathwiseMarginalLogLikelihood
from gpy_iterative.mlls.quadruply_stochastic import QuadruplyStochasticELBO
from gpy_iterative.mlls.random_features import RFFMarginalLogLikelihood
from gpy_iterative.mlls.report import (
    FrequencyReport,
    LaplaceReport,
    MarginalLogLikelihoodReport,
    MinibatchReport,
    QuadruplyStochasticReport,
    Report,
    TruncationReport,
)
from gpy_iterative.mlls.russian_roulette import RussianRouletteMarginalLogLikelihood
from gpy_iterative.mlls.single_sample_rff import SingleSampleRFFMarginalLogLikelihood
from gpy_iterative.mlls.truncated_cg import TruncatedCGMarginalLogLikelihood
from gpy_iterative.mlls.variational_feature import VariationalFeatureMarginalLogLikelihood

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

"""Models beyond GPyTorch's ExactGP, and bases of weight-space models."""

from gpy_iterative.laplace.model import IterativeLaplaceGP
from gpy_iterative.quadruply.bases.feature_basis import FeatureBasis
from gpy_iterative.quadruply.bases.inducing_point_basis import InducingPointBasis
from gpy_iterative.quadruply.bases.nystrom_basis import NystromBasis
from gpy_iterative.quadruply.bases.random_fourier_basis import RandomFourierBasis
from gpy_iterative.quadruply.bases.relevance_vector_basis import RelevanceVectorBasis, prune_relevance_vectors
from gpy_iterative.quadruply.feature_weights import FeatureWeights
from gpy_iterative.quadruply.model import DeferredPrediction, QuadruplyStochasticGP
from gpy_iterative.quadruply.optimizers import HeadNaturalGradient, QuadruplyStochasticOptimizer

__all__ = [
    "DeferredPrediction",
    "FeatureBasis",
    "FeatureWeights",
    "HeadNaturalGradient",
    "InducingPointBasis",
    "IterativeLaplaceGP",
    "NystromBasis",
    "QuadruplyStochasticGP",
    "QuadruplyStochasticOptimizer",
    "RandomFourierBasis",
    "RelevanceVectorBasis",
    "prune_relevance_vectors",
]

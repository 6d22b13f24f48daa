"""Models beyond GPyTorch's ExactGP, and the bases of those in weight space."""

from gpy_iterative.models.deferred import DeferredPrediction
from gpy_iterative.models.feature_basis import FeatureBasis
from gpy_iterative.models.feature_weights import FeatureWeights, WeightRows
from gpy_iterative.models.inducing_point_basis import InducingPointBasis
from gpy_iterative.models.iterative_laplace_gp import IterativeLaplaceGP
from gpy_iterative.models.nystrom_basis import NystromBasis
from gpy_iterative.models.optimizers import HeadNaturalGradient, QuadruplyStochasticOptimizer
from gpy_iterative.models.pruning import prune_relevance_vectors
from gpy_iterative.models.quadruply_stochastic_gp import QuadruplyStochasticGP
from gpy_iterative.models.random_fourier_basis import RandomFourierBasis
from gpy_iterative.models.relevance_vector_basis import RelevanceVectorBasis

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
    "WeightRows",
    "prune_relevance_vectors",
]

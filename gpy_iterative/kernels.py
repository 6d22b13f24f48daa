"""Matrix-free kernels, and kernels with finitely many features."""

from gpy_iterative.exact.matrix_free_kernel import MatrixFreeKernel
from gpy_iterative.spectral.finite import (
    DeepFeatureKernel,
    FeatureMap,
    FiniteFeatureKernel,
    WeightSpaceFeatures,
    feature_map,
    register_feature_map,
)

__all__ = [
    "DeepFeatureKernel",
    "FeatureMap",
    "FiniteFeatureKernel",
    "MatrixFreeKernel",
    "WeightSpaceFeatures",
    "feature_map",
    "register_feature_map",
]

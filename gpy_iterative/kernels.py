"""Kernels that run matrix-free wherever GPyTorch expects a kernel, and kernels with finitely many features."""

from gpy_iterative.exact.matrix_free_kernel import MatrixFreeKernel
from gpy_iterative.features.deep_feature_kernel import DeepFeatureKernel
from gpy_iterative.features.feature_maps import (
    FeatureMap,
    concatenated,
    feature_map,
    has_feature_map,
    register_feature_map,
)
from gpy_iterative.features.finite_feature_kernel import FiniteFeatureKernel, WeightSpaceFeatures

__all__ = [
    "DeepFeatureKernel",
    "FeatureMap",
    "FiniteFeatureKernel",
    "MatrixFreeKernel",
    "WeightSpaceFeatures",
    "concatenated",
    "feature_map",
    "has_feature_map",
    "register_feature_map",
]

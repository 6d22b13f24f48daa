"""Kernels that run matrix-free wherever GPyTorch expects a kernel, and kernels with finitely many features."""

from gpy_iterative.kernels.deep_feature_kernel import DeepFeatureKernel
from gpy_iterative.kernels.feature_maps import (
    FeatureMap,
    concatenated,
    feature_map,
    has_feature_map,
    register_feature_map,
)
from gpy_iterative.kernels.finite_feature_kernel import FiniteFeatureKernel, WeightSpaceFeatures
from gpy_iterative.kernels.matrix_free_kernel import MatrixFreeKernel

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

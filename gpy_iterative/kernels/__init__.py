"""Kernels that run matrix-free wherever GPyTorch expects a kernel."""

from gpy_iterative.kernels.matrix_free_kernel import MatrixFreeKernel

__all__ = ["MatrixFreeKernel"]

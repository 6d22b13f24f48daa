"""Kernel matrices that are never stored."""

from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.partial_products import columns_matmul, dense_rows, principal_block, rows_matmul
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial import RadialKernelLinearOperator
from gpy_iterative.linear_operators.tile_cache import TileCache

__all__ = [
    "KernelProducts",
    "NoisyLinearOperator",
    "RadialKernelLinearOperator",
    "TileCache",
    "columns_matmul",
    "dense_rows",
    "principal_block",
    "rows_matmul",
]

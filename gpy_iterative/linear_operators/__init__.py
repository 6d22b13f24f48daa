"""Kernel matrices that are never stored."""

from gpy_iterative.linear_operators.bilinear_derivative import bilinear_derivative
from gpy_iterative.linear_operators.from_gpytorch import (
    active_inputs,
    are_same_inputs,
    check_kernel_dtype,
    computes_the_same,
    kernel_operator,
    operator_of_kernel,
)
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.kernel_functions import clear_caches, kernel_diagonal, kernel_matrix
from gpy_iterative.linear_operators.latent import (
    LatentPrior,
    latent_operator,
    latent_prior,
    num_latents,
    point_blocks,
)
from gpy_iterative.linear_operators.lower_precision import lower_precision, native_precision
from gpy_iterative.linear_operators.matrix_derivative import matrix_derivative
from gpy_iterative.linear_operators.module_copies import ModuleCopies
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.observations import (
    check_noise,
    flat_targets,
    noise_operator,
    noisy_operator,
    observed_data,
)
from gpy_iterative.linear_operators.partial_products import (
    Rows,
    columns_matmul,
    dense_rows,
    principal_block,
    rows_matmul,
)
from gpy_iterative.linear_operators.prior_parts import KernelTerm, kernel_terms, prior_parts
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial import RadialKernelLinearOperator
from gpy_iterative.linear_operators.repeated import RepeatedKernelLinearOperator
from gpy_iterative.linear_operators.tile_cache import TileCache, TileCaches

__all__ = [
    "GenericKernelLinearOperator",
    "KernelProducts",
    "KernelTerm",
    "LatentPrior",
    "ModuleCopies",
    "NoisyLinearOperator",
    "RadialKernelLinearOperator",
    "RepeatedKernelLinearOperator",
    "Rows",
    "TileCache",
    "TileCaches",
    "active_inputs",
    "are_same_inputs",
    "bilinear_derivative",
    "check_kernel_dtype",
    "check_noise",
    "clear_caches",
    "columns_matmul",
    "computes_the_same",
    "dense_rows",
    "flat_targets",
    "kernel_diagonal",
    "kernel_matrix",
    "kernel_operator",
    "kernel_terms",
    "latent_operator",
    "latent_prior",
    "lower_precision",
    "matrix_derivative",
    "native_precision",
    "noise_operator",
    "noisy_operator",
    "num_latents",
    "observed_data",
    "operator_of_kernel",
    "point_blocks",
    "principal_block",
    "prior_parts",
    "rows_matmul",
]

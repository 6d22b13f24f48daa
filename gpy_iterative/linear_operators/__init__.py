"""Kernel matrices that are never stored.

Begin with `products.py` (options), `radial/operator.py` (kernels in closed form), `generic_kernel.py` (any kernel),
`kronecker.py` and `hadamard.py` (several outputs), `interpolated.py` (KISS-GP), `predicted.py` (predictions).
`from_gpytorch.py` reads GPyTorch priors; `extensions.py` adds operations. It may import `errors`, `checks`, `changes`,
`worker_threads` and `random_numbers`.
"""

from gpy_iterative.linear_operators.from_gpytorch import kernel_operator, noisy_operator, operator_of_kernel
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.latent import latent_prior
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator

__all__ = [
    "GenericKernelLinearOperator",
    "KernelProducts",
    "NoisyLinearOperator",
    "RadialKernelLinearOperator",
    "kernel_operator",
    "latent_prior",
    "noisy_operator",
    "operator_of_kernel",
]

from typing import Any

import torch
from gpytorch.kernels import Kernel
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_instance
from gpy_iterative.linear_operators.from_gpytorch import are_same_inputs, operator_of_kernel
from gpy_iterative.linear_operators.products import KernelProducts


class MatrixFreeKernel(Kernel):
    """Wraps a kernel; evaluates to an operator that stores no matrix.

    A `ScaleKernel` may be inside or outside. A product must be inside: GPyTorch multiplies dense matrices.

    Args:
        products: how kernel products are computed.

    Examples:
        >>> kernel = gpi.kernels.MatrixFreeKernel(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
        >>> type(kernel(train_x).evaluate_kernel()).__name__
        'RadialKernelLinearOperator'
    """

    is_stationary = False

    def __init__(self, base_kernel: Kernel, products: KernelProducts | None = None) -> None:
        if not isinstance(base_kernel, Kernel):
            raise TypeError(f"MatrixFreeKernel needs a gpytorch.kernels.Kernel, got {base_kernel!r}.")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        super().__init__(active_dims=base_kernel.active_dims)
        self.base_kernel = base_kernel
        self.products = KernelProducts() if products is None else products

    @property
    def batch_shape(self) -> torch.Size:
        """The base kernel's."""
        return self.base_kernel.batch_shape

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """The base kernel's."""
        return self.base_kernel.num_outputs_per_input(x1, x2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> LinearOperator | Tensor:
        """The operator k(x1, x2), or its diagonal."""
        if params.pop("last_dim_is_batch", False) or params:
            raise ValueError(
                f"MatrixFreeKernel does not support the kernel argument {', '.join(params) or 'last_dim_is_batch'}."
            )
        same = are_same_inputs(x1, x2)
        operator = operator_of_kernel(self.base_kernel, x1, None if same else x2, self.products)
        return operator.diagonal(dim1=-1, dim2=-2) if diag else operator

"""Kernel functions at given points."""

from collections.abc import Callable, Sequence

import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.changes import SeenVersions, same_value
from gpy_iterative.checks import check_finite
from gpy_iterative.errors import NotPositiveDefiniteError
from gpy_iterative.linear_operators.kernel_functions import kernel_diagonal, kernel_matrix
from gpy_iterative.linear_operators.module_copies import ModuleCopies
from gpy_iterative.quadruply.bases.feature_basis import FeatureBasis, check_columns, check_kernel

#: Most points for log|S|, by a dense Cholesky factor.
MAX_FACTORED = 3000


class KeptAt:
    """Cache of a tensor that depends on a kernel and buffers."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.hyperparameters, self.buffers = [], SeenVersions()

    @torch.inference_mode(False)  # later calls may ask for gradients
    @torch.no_grad()
    def get(self, kernel: kernels.Kernel, buffers: Sequence[Tensor], evaluate: Callable[[], Tensor]) -> Tensor:
        current = [*kernel.parameters(), *kernel.buffers()]
        if self.value is None or not same_value(self.hyperparameters, current) or not self.buffers.are(buffers):
            self.value = evaluate()
            self.hyperparameters, self.buffers = [tensor.clone() for tensor in current], SeenVersions.of(buffers)
        return self.value


class KernelFunctionBasis(FeatureBasis):
    """Made of k(x, Z) for points Z [m, d]; by itself phi(x) = k(x, Z)."""

    def __init__(self, kernel: kernels.Kernel, points: Tensor) -> None:
        super().__init__()
        check_points(kernel, points)
        self.kernel = kernel
        self.register_buffer("points", points.detach().clone())
        self.num_groups = points.shape[0]

    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        check_columns(x, self.points.shape[-1])
        return kernel_matrix(self.kernel, x, self.points[groups])


class InducingPointBasis(KernelFunctionBasis):
    """phi(x) = k(x, Z) with S = k(Z, Z): the kernel's Nystrom approximation, exact at the points.

    Args:
        kernel: any without batch shape; `kernel.requires_grad_(False)`, since the gradient of log|S| is not sampled.
        inducing_points: Z [m, d]. Beyond 3,000 points the bound omits the constant log|S|.

    Raises:
        ValueError: unfit, non-finite or duplicate points.
    """

    has_diagonal_prior = False

    def __init__(self, kernel: kernels.Kernel, inducing_points: Tensor) -> None:
        super().__init__(kernel, inducing_points)
        distinct = torch.unique(self.points, dim=0).shape[0]
        if distinct != self.num_groups:
            raise ValueError(
                f"inducing_points must be distinct, but {self.num_groups - distinct} of {self.num_groups} repeat others. "
                "Pass torch.unique(inducing_points, dim=0)."
            )
        self._log_determinant = KeptAt()

    def prior_precision_block(self, rows: Tensor, columns: Tensor) -> Tensor:
        return kernel_matrix(self.kernel, self.points[rows], self.points[columns])

    def prior_precision(self, groups: Tensor) -> Tensor:
        return kernel_diagonal(self.kernel, self.points[groups])

    def prior_log_determinant(self) -> Tensor | None:
        """log|k(Z, Z)| in float64 with a jitter of 1e-6 of the diagonal; cached."""
        if self.num_groups > MAX_FACTORED:
            return None
        return self._log_determinant.get(self.kernel, [self.points], self._new_log_determinant)

    def _new_log_determinant(self) -> Tensor:
        matrix = gram_matrix(self.kernel, self.points)
        matrix.diagonal().mul_(1 + 1e-6)
        lower, info = torch.linalg.cholesky_ex(matrix)
        if info:
            raise NotPositiveDefiniteError(
                "The kernel matrix of the inducing points has no Cholesky factor. Use float64, or points farther apart."
            )
        return 2 * lower.diagonal().log().sum().to(self.points.dtype)


def gram_matrix(kernel: kernels.Kernel, points: Tensor) -> Tensor:
    """k(Z, Z) in float64, differentiable, by a copy: layers take one dtype only."""
    in_float64 = lambda tensor: tensor.double() if tensor.is_floating_point() else tensor
    kernel = ModuleCopies(own=("_parameters", "_buffers"), tensor=in_float64).of(kernel)
    return kernel_matrix(kernel, points.double(), points.double()).double()


def check_points(kernel: kernels.Kernel, points: Tensor) -> None:
    check_kernel(kernel)
    if not isinstance(points, Tensor) or points.dim() != 2 or 0 in points.shape:
        shape = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise ValueError(f"The points of a basis must be a tensor [m, d] with m, d >= 1, got {shape}.")
    for name, parameter in kernel.named_parameters():
        if parameter.dtype != points.dtype:
            raise ValueError(
                f"The points have dtype {points.dtype}, the kernel's parameter {name} {parameter.dtype}: convert one of "
                "them with .to(...)."
            )
    check_finite("points", points)

"""Priors of latent functions as one system, ordered point by point."""

from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import BlockInterleavedLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import function_blocks, matrix_derivative, whole_points
from gpy_iterative.linear_operators.from_gpytorch import kernel_operator, masked_covariance
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache


class RepeatedKernelLinearOperator(LinearOperator):
    """Covariance of C independent functions with one kernel, ordered point by point.

    Args:
        kernel: K [n, m]; a product is one of K with C times as many columns.
        repeats: C.
    """

    def __init__(self, kernel: LinearOperator, *, repeats: int) -> None:
        super().__init__(kernel, repeats=repeats)
        self.kernel, self.repeats = kernel, repeats

    def _size(self) -> torch.Size:
        rows, columns = self.kernel.matrix_shape
        return torch.Size((*self.kernel.batch_shape, rows * self.repeats, columns * self.repeats))

    def _matmul(self, rhs: Tensor) -> Tensor:
        product = self.kernel._matmul(self._side_by_side(rhs))
        return product.reshape(*product.shape[:-2], -1, rhs.shape[-1])

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return self.kernel._bilinear_derivative(self._side_by_side(left_vecs), self._side_by_side(right_vecs))

    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        """See `extensions.matrix_derivative`."""
        return matrix_derivative(self.kernel, function_blocks(weights, self.repeats).sum(-3))

    def _side_by_side(self, columns: Tensor) -> Tensor:
        return columns.reshape(*columns.shape[:-2], -1, self.repeats * columns.shape[-1])

    def _transpose_nonbatch(self) -> LinearOperator:
        return type(self)(self.kernel._transpose_nonbatch(), repeats=self.repeats)

    def _diagonal(self) -> Tensor:
        return self.kernel._diagonal().repeat_interleave(self.repeats, dim=-1)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        rows, columns = (torch.div(index, self.repeats, rounding_mode="floor") for index in (row_index, col_index))
        same = row_index % self.repeats == col_index % self.repeats
        return self.kernel._get_indices(rows, columns, *batch_indices) * same

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        rows = whole_points(row_index, self.repeats, self.shape[-2])
        columns = whole_points(col_index, self.repeats, self.shape[-1])
        if batch_indices or not (isinstance(rows, slice) and isinstance(columns, slice)):
            return super()._getitem(row_index, col_index, *batch_indices)
        return type(self)(self.kernel[rows, columns], repeats=self.repeats)

    def to_dense(self) -> Tensor:
        kernel = self.kernel.to_dense()
        return torch.kron(kernel, torch.eye(self.repeats, dtype=kernel.dtype, device=kernel.device))


@dataclass(frozen=True)
class LatentPrior:
    """f ~ N(m, K) of C functions at n points.

    Attributes:
        operator: K [n C, n C], point by point.
        mean: m [n, C].
    """

    operator: LinearOperator
    mean: Tensor

    @property
    def num_points(self) -> int:
        return self.mean.shape[0]

    @property
    def num_latents(self) -> int:
        return self.mean.shape[1]

    @property
    def size(self) -> int:
        return self.mean.numel()

    @torch.no_grad()
    def matmul(self, columns: Tensor) -> Tensor:
        """K x [n C, b] in float64, computed in the kernel's dtype. A product that is not finite raises NonFiniteError."""
        product = self.operator._matmul(columns.to(self.operator.dtype)).double()
        if not torch.isfinite(product).all():
            raise NonFiniteError(
                "A product with the kernel matrix is not finite: check inputs and hyperparameters, or use float64."
            )
        return product

    def point_blocks(self) -> Tensor:
        return point_blocks(self.operator, self.num_latents)


def point_blocks(operator: LinearOperator, num_latents: int) -> Tensor:
    """Diagonal blocks [n, C, C] of a covariance [n C, n C], differentiable."""
    if num_latents == 1 or isinstance(operator, (RepeatedKernelLinearOperator, BlockInterleavedLinearOperator)):
        return torch.diag_embed(operator.diagonal(dim1=-1, dim2=-2).unflatten(-1, (-1, num_latents)))
    rows = torch.arange(operator.shape[-1], device=operator.device).view(-1, num_latents)
    shape = (*rows.shape, num_latents)
    return operator._get_indices(
        rows.unsqueeze(-1).expand(shape).contiguous(), rows.unsqueeze(-2).expand(shape).contiguous()
    )


def function_kernels(operator: LinearOperator) -> LinearOperator | None:
    """Kernels [C, n, n] of independent functions, [n, n] if shared; None for others."""
    if isinstance(operator, RepeatedKernelLinearOperator):
        return operator.kernel
    return operator.base_linear_op if isinstance(operator, BlockInterleavedLinearOperator) else None


def latent_prior(
    function_dist: MultivariateNormal,
    products: KernelProducts,
    cache: TileCache | None = None,
    observed: Tensor | None = None,
) -> LatentPrior:
    """The prior of latent functions from a GPyTorch model's `forward`.

    Args:
        function_dist: MultivariateNormal [n] or [C, n] (with one kernel or C), or MultitaskMultivariateNormal [n, C].
        products, cache: as in `kernel_operator`.
        observed: [n] bool, points to keep; None keeps all.

    Raises:
        ValueError: more than one batch dimension, or a multitask prior that is not interleaved.
    """
    latents = num_latents(function_dist)
    mean, covariance = function_dist.mean, function_dist.lazy_covariance_matrix
    is_multitask = isinstance(function_dist, MultitaskMultivariateNormal)
    if observed is not None:
        covariance = masked_covariance(covariance, observed.repeat_interleave(latents) if is_multitask else observed)
        mean = mean[observed] if is_multitask else mean[..., observed]
    operator = to_linear_operator(kernel_operator(covariance, products, cache))
    if is_multitask:
        return LatentPrior(operator, mean)
    if mean.dim() == 1 and not operator.batch_shape:
        return LatentPrior(operator, mean.unsqueeze(-1))
    mean = mean.expand(latents, mean.shape[-1]).mT
    return LatentPrior(latent_operator(operator, latents, shared=not operator.batch_shape), mean)


def latent_operator(operator: LinearOperator, num_latents: int, *, shared: bool) -> LinearOperator:
    """The joint covariance [*b, n C, m C] of C independent functions, ordered point by point.

    Args:
        operator: [*b, n, m] if `shared` by all functions, else [*b, C, n, m] or [*b, 1, n, m].
        num_latents: C.
    """
    if shared:
        return operator if num_latents == 1 else RepeatedKernelLinearOperator(operator, repeats=num_latents)
    if operator.shape[-3] != num_latents:
        operator = operator.expand(*operator.batch_shape[:-1], num_latents, *operator.matrix_shape)
    return BlockInterleavedLinearOperator(operator)


def num_latents(function_dist: MultivariateNormal) -> int:
    """C of a prior: its last batch dimension or number of tasks."""
    if isinstance(function_dist, MultitaskMultivariateNormal):
        if not function_dist._interleaved:
            raise ValueError(
                "Laplace's method takes multitask priors in interleaved order only; build the prior with interleaved=True."
            )
        latents, batch = function_dist.event_shape[-1], function_dist.batch_shape
    else:
        latents, batch = (*function_dist.batch_shape, 1)[0], function_dist.batch_shape[1:]
    if batch:
        raise ValueError(
            f"Laplace's method takes one set of latent functions, with shape [n], [C, n] or [n, C]; the model's output has "
            f"batch shape {tuple(function_dist.batch_shape)}. Use one model for each problem."
        )
    return latents

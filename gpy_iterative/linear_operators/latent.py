"""Priors of latent functions as one system, ordered point by point."""

from dataclasses import dataclass

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import BlockInterleavedLinearOperator, IdentityLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.from_gpytorch import ORDER_OF_TASKS, kernel_operator, masked_covariance
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache


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
    if num_latents == 1 or function_kernels(operator) is not None:
        return torch.diag_embed(operator.diagonal(dim1=-1, dim2=-2).unflatten(-1, (-1, num_latents)))
    rows = torch.arange(operator.shape[-1], device=operator.device).view(-1, num_latents)
    shape = (*rows.shape, num_latents)
    return operator._get_indices(
        rows.unsqueeze(-1).expand(shape).contiguous(), rows.unsqueeze(-2).expand(shape).contiguous()
    )


def function_kernels(operator: LinearOperator) -> LinearOperator | None:
    """Kernels [C, n, n] of independent functions, [n, n] if shared; None for others."""
    if isinstance(operator, KroneckerLinearOperator) and isinstance(operator.tasks, IdentityLinearOperator):
        return operator.points
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
    if shared and num_latents == 1:
        return operator
    if shared:
        functions = IdentityLinearOperator(num_latents, dtype=operator.dtype, device=operator.device)
        return KroneckerLinearOperator(operator, functions)
    if operator.shape[-3] != num_latents:
        operator = operator.expand(*operator.batch_shape[:-1], num_latents, *operator.matrix_shape)
    return BlockInterleavedLinearOperator(operator)


def num_latents(function_dist: MultivariateNormal) -> int:
    """C of a prior: its last batch dimension or number of tasks."""
    if isinstance(function_dist, MultitaskMultivariateNormal):
        if not function_dist._interleaved:
            raise ValueError(ORDER_OF_TASKS)
        latents, batch = function_dist.event_shape[-1], function_dist.batch_shape
    else:
        latents, batch = (*function_dist.batch_shape, 1)[0], function_dist.batch_shape[1:]
    if batch:
        raise ValueError(
            f"Laplace's method takes one set of latent functions, with shape [n], [C, n] or [n, C]; the model's output has "
            f"batch shape {tuple(function_dist.batch_shape)}. Use one model for each problem."
        )
    return latents

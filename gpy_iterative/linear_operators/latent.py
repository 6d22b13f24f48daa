"""The prior of one or several latent functions as one system: point by point, the functions of a point side by side."""

from dataclasses import dataclass

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import BlockInterleavedLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.from_gpytorch import kernel_operator, masked_covariance
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.repeated import RepeatedKernelLinearOperator
from gpy_iterative.linear_operators.tiles.cache import TileCaches


@dataclass(frozen=True)
class LatentPrior:
    """f ~ N(m, K) at n points, C functions.

    Attributes:
        operator: K [n C, n C], its rows point by point.
        mean: m [n, C].
    """

    operator: LinearOperator
    mean: Tensor

    @property
    def num_points(self) -> int:
        """How many points, n."""
        return self.mean.shape[0]

    @property
    def num_latents(self) -> int:
        """How many functions, C."""
        return self.mean.shape[1]

    @property
    def size(self) -> int:
        """Rows of K, n C."""
        return self.mean.numel()

    @torch.no_grad()
    def matmul(self, columns: Tensor) -> Tensor:
        """K x in float64 for x [n C, b] in float64, computed in the kernel's own dtype.

        Raises:
            NonFiniteError: an entry of the product is not finite.
        """
        product = self.operator._matmul(columns.to(self.operator.dtype)).double()
        if not torch.isfinite(product).all():
            raise NonFiniteError(
                "A product with the kernel matrix is not finite: check inputs and hyperparameters, or use float64."
            )
        return product

    def point_blocks(self) -> Tensor:
        """K's blocks on the diagonal, [n, C, C]; differentiable in the hyperparameters."""
        return point_blocks(self.operator, self.num_latents)


def point_blocks(operator: LinearOperator, num_latents: int) -> Tensor:
    """The C x C blocks on the diagonal of a covariance [n C, n C]: [n, C, C]."""
    if num_latents == 1 or isinstance(operator, (RepeatedKernelLinearOperator, BlockInterleavedLinearOperator)):
        return torch.diag_embed(operator.diagonal(dim1=-1, dim2=-2).unflatten(-1, (-1, num_latents)))
    rows = torch.arange(operator.shape[-1], device=operator.device).view(-1, num_latents)
    shape = (*rows.shape, num_latents)
    return operator._get_indices(
        rows.unsqueeze(-1).expand(shape).contiguous(), rows.unsqueeze(-2).expand(shape).contiguous()
    )


def latent_prior(
    function_dist: MultivariateNormal,
    products: KernelProducts,
    caches: TileCaches | None = None,
    observed: Tensor | None = None,
) -> LatentPrior:
    """The prior of latent functions from what a GPyTorch model's `forward` returns.

    Args:
        function_dist: a MultivariateNormal [n] (one function) or [C, n] (C functions, each with a kernel of its own, or
            all with one), or a MultitaskMultivariateNormal [n, C].
        products: how kernel products are computed.
        caches: where the operators keep their tiles.
        observed: [n] bool, points to keep; None keeps all.

    Raises:
        ValueError: more than one batch dimension, or a multitask prior that lists all data of the first task first.
    """
    latents = num_latents(function_dist)
    mean, covariance = function_dist.mean, function_dist.lazy_covariance_matrix
    if isinstance(function_dist, MultitaskMultivariateNormal):
        rows = None if observed is None else observed.repeat_interleave(latents)
        operator = to_linear_operator(kernel_operator(_kept(covariance, rows), products, caches))
        return LatentPrior(operator, mean if observed is None else mean[observed])
    operator = to_linear_operator(kernel_operator(_kept(covariance, observed), products, caches))
    if observed is not None:
        mean = mean[..., observed]
    if mean.dim() == 1 and not operator.batch_shape:
        return LatentPrior(operator, mean.unsqueeze(-1))
    mean = mean.expand(latents, mean.shape[-1]).mT
    return LatentPrior(latent_operator(operator, latents, shared=not operator.batch_shape), mean)


def latent_operator(operator: LinearOperator, num_latents: int, *, shared: bool) -> LinearOperator:
    """A covariance of single functions as that of C independent ones, side by side.

    Args:
        operator: [*b, n, m] of one kernel that all share, or [*b, C, n, m] (or [*b, 1, n, m]) with one for each.
        num_latents: C.
        shared: which of the two it is.

    Returns:
        [*b, n C, m C].
    """
    if shared:
        return operator if num_latents == 1 else RepeatedKernelLinearOperator(operator, repeats=num_latents)
    if operator.shape[-3] != num_latents:
        operator = operator.expand(*operator.batch_shape[:-1], num_latents, *operator.matrix_shape)
    return BlockInterleavedLinearOperator(operator)


def num_latents(function_dist: MultivariateNormal) -> int:
    """C of a prior: its last batch dimension, or its number of tasks. Raises ValueError for priors of another layout."""
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


def _kept(covariance: LinearOperator | Tensor, rows: Tensor | None) -> LinearOperator | Tensor:
    return covariance if rows is None else masked_covariance(covariance, rows)

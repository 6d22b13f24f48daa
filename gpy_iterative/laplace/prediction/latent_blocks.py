"""The prior of training and test points together, for one or several latent functions, in point-by-point order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.models import GP
from linear_operator import LinearOperator
from linear_operator.operators import BlockInterleavedLinearOperator
from torch import Tensor

from gpy_iterative.exact.prediction.joint_prior import covariance_blocks, stacked
from gpy_iterative.linear_operators.latent import latent_operator, latent_prior, num_latents
from gpy_iterative.linear_operators.prior_parts import KernelTerm, kernel_terms
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.training.training_system import prior_at


@dataclass(frozen=True)
class LatentBlocks:
    """Blocks of the joint prior for a list of t test points.

    Attributes:
        mean: [t, C].
        test_train: K(x, X) [t C, n C].
        test_test: K(x, x) [t C, t C].
    """

    mean: Tensor
    test_train: LinearOperator
    test_test: LinearOperator


def latent_blocks(model: GP, train: Sequence[Tensor], test: Sequence[Tensor], products: KernelProducts) -> LatentBlocks:
    """The blocks at the model's current hyperparameters, for inputs [n, d] and [t, d]; tiles are never kept."""
    joint = prior_at(model, [stacked(x, points) for x, points in zip(train, test, strict=True)])
    once = replace(products, cache_memory=0)
    points, latents = train[0].shape[-2], num_latents(joint)
    covariance = joint.lazy_covariance_matrix
    if isinstance(joint, MultitaskMultivariateNormal):
        blocks = covariance_blocks(covariance, points * latents, once)
        return LatentBlocks(joint.mean[points:], *blocks)
    blocks = covariance_blocks(covariance, points, once)
    mean = joint.mean[..., points:].expand(latents, test[0].shape[-2]).mT
    shared = not covariance.batch_shape
    return LatentBlocks(mean, *(latent_operator(block, latents, shared=shared) for block in blocks))


def latent_covariance(model: GP, points: Sequence[Tensor], products: KernelProducts) -> Tensor:
    """K(x, x) [*b, t C, t C] of batches of test points [*b, t, d], dense: member by member, as a model's `forward` for C
    functions need not know batches of inputs.
    """
    once = replace(products, cache_memory=0)
    batch = points[0].shape[:-2]
    members = zip(*(x.reshape(-1, *x.shape[-2:]) for x in points), strict=True)
    dense = [latent_prior(prior_at(model, list(member)), once).operator.to_dense() for member in members]
    return torch.stack(dense).reshape(*batch, *dense[0].shape)


def latent_terms(distribution: MultivariateNormal, observed: Tensor | None = None) -> tuple[list[KernelTerm], bool]:
    """The kernels of a prior at the observed points, and whether all latent functions share them.

    Raises:
        SpectralDensityMissingError: the prior's covariance is no sum of kernels.
    """
    covariance = distribution.lazy_covariance_matrix
    if isinstance(covariance, BlockInterleavedLinearOperator):
        covariance = covariance.base_linear_op
    return kernel_terms(covariance, observed), not covariance.batch_shape

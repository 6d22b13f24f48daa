"""Sample functions f + f_p(.) - k(., X) zeta with zeta ~ N(0, P).

Wilson et al. 2021, "Pathwise conditioning of Gaussian processes".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.models import GP
from linear_operator import LinearOperator
from linear_operator.operators import BlockInterleavedLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.exact.prediction.blocks import product
from gpy_iterative.exact.prediction.joint_prior import checked_inputs, covariance_blocks, graph_for, prior_at_both
from gpy_iterative.linear_operators.latent import latent_operator, num_latents
from gpy_iterative.linear_operators.prior_parts import KernelTerm, kernel_terms
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.random_numbers import normal
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.training.snapshot import ModelSnapshot
from gpy_iterative.training.training_system import prior_at


class PriorFunctions:
    """Prior samples Phi(x) w, with weights [C, F, s], or [F, s] for coupled functions."""

    def __init__(
        self, distribution: MultivariateNormal, num_samples: int, num_frequencies: int, generator: torch.Generator
    ) -> None:
        check_count("num_paths", num_samples)
        terms, is_coupled = _latent_terms(distribution)
        self.features = RandomFourierFeatures(num_frequencies, widened=True)
        self.draws, like = self.features.draw(terms, generator), terms[0].inputs
        shape = (self.features.num_features(terms), num_samples)
        shape = shape if is_coupled else (num_latents(distribution), *shape)
        self.weights = normal(shape, generator, like.device, like.dtype)

    def __call__(self, distribution: MultivariateNormal) -> Tensor:
        """Values [t, C, s]."""
        terms, is_coupled = _latent_terms(distribution)
        values = self.features.apply(terms, self.draws, self.weights)
        return values.view(*distribution.event_shape, values.shape[-1]) if is_coupled else values.movedim(0, 1)


@dataclass(frozen=True, eq=False)
class LaplaceSamplePaths:
    """Posterior functions, differentiable in x."""

    snapshot: ModelSnapshot
    functions: PriorFunctions
    inputs: list[Tensor]
    update: Tensor
    products: KernelProducts

    @property
    def num_paths(self) -> int:
        """Number of functions."""
        return self.update.shape[-1]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """[k, t] or [k, t, C] at inputs [t, d]. Raises ValueError for inputs that do not fit."""
        with graph_for(inputs):
            model = self.snapshot.model_copy()
            points = checked_inputs(self.inputs, inputs)
            if any(x.dim() != 2 for x in points):
                raise ValueError(
                    "Sample paths take test inputs [t, d]: list the points of a batch one after the other."
                )
            mean, test_train, _ = latent_blocks(model, self.inputs, points, self.products)
            update = product(test_train, self.update).to(mean.dtype).view(*mean.shape, self.num_paths)
            values = mean.unsqueeze(-1) + self.functions(prior_at(model, points)) + update
            values = values.movedim(-1, 0)
            return values.squeeze(-1) if values.shape[-1] == 1 else values


def latent_blocks(
    model: GP, train: Sequence[Tensor], test: Sequence[Tensor], products: KernelProducts
) -> tuple[Tensor, LinearOperator, LinearOperator]:
    """The prior's mean [t, C], K(x, X) [t C, n C] and K(x, x) [t C, t C]."""
    joint = prior_at_both(model, train, test)
    once = replace(products, cache_memory=0)
    points, latents = train[0].shape[-2], num_latents(joint)
    covariance = joint.lazy_covariance_matrix
    if isinstance(joint, MultitaskMultivariateNormal):
        return joint.mean[points:], *covariance_blocks(covariance, points * latents, once)
    mean = joint.mean[..., points:].expand(latents, test[0].shape[-2]).mT
    test_train, test_test = (
        latent_operator(block, latents, shared=not covariance.batch_shape)
        for block in covariance_blocks(covariance, points, once)
    )
    return mean, test_train, test_test


def _latent_terms(distribution: MultivariateNormal) -> tuple[list[KernelTerm], bool]:
    """Kernels, and whether they couple the functions."""
    covariance = distribution.lazy_covariance_matrix
    if isinstance(covariance, BlockInterleavedLinearOperator):
        return kernel_terms(covariance.base_linear_op), False
    return kernel_terms(covariance), isinstance(distribution, MultitaskMultivariateNormal)

"""Samples of a latent posterior that are functions: f + f_p(.) - k(., X) zeta, by pathwise conditioning.

Wilson et al. 2021, "Pathwise conditioning of Gaussian processes"; zeta ~ N(0, P) takes the place of the solve for a
Gaussian observation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.exact.prediction.blocks import product
from gpy_iterative.exact.prediction.joint_prior import checked_inputs
from gpy_iterative.laplace.prediction.latent_blocks import latent_blocks, latent_terms
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.training.snapshot import ModelSnapshot
from gpy_iterative.training.training_system import prior_at


@dataclass(frozen=True)
class PriorFunctions:
    """Functions Phi(x) w with the prior's covariance (but for the number of frequencies), C for each sample.

    Attributes:
        features: how Phi is made.
        draws: its frequencies.
        weights: [F, C s] where the functions share a kernel, [C, F, s] where each has its own.
        num_latents: C.
    """

    features: RandomFourierFeatures
    draws: Draws
    weights: Tensor
    num_latents: int

    @classmethod
    def draw(
        cls,
        terms: Sequence[KernelTerm],
        num_latents: int,
        num_samples: int,
        num_frequencies: int,
        *,
        shared: bool,
        generator: torch.Generator,
    ) -> "PriorFunctions":
        """Raises SpectralDensityMissingError for a kernel without random features, ValueError for counts below 1."""
        check_count("num_paths", num_samples)
        features = RandomFourierFeatures(num_frequencies)
        draws = features.draw(terms, generator)
        count, like = features.num_features(terms), terms[0].inputs
        shape = (count, num_latents * num_samples) if shared else (num_latents, count, num_samples)
        weights = torch.randn(shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)
        return cls(features, draws, weights, num_latents)

    def __call__(self, terms: Sequence[KernelTerm]) -> Tensor:
        """The values at the inputs of the terms: [t, C, s]."""
        values = self.features.apply(terms, self.draws, self.weights)
        if self.weights.dim() == 2:
            return values.unflatten(-1, (self.num_latents, -1))
        return values.movedim(0, 1)


class LaplaceSamplePaths:
    """k functions of Laplace's approximation or of a refinement: the same at each call, at any x, differentiable there.

    They belong to the hyperparameters and data of the time when they were drawn.

    Args:
        snapshot: the model at the time when they were drawn.
        functions: prior samples.
        inputs: training inputs.
        update: v - zeta [n C, k].
        products: how kernel products are computed.
    """

    def __init__(
        self,
        snapshot: ModelSnapshot,
        functions: PriorFunctions,
        inputs: list[Tensor],
        update: Tensor,
        products: KernelProducts,
    ) -> None:
        self._snapshot = snapshot
        self._functions, self._inputs, self._update = functions, inputs, update
        self._products = products

    @property
    def num_paths(self) -> int:
        """How many paths, k."""
        return self._update.shape[-1]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The functions at test inputs [t, d]: [k, t], or [k, t, C] for several latent functions.

        Raises ValueError for inputs that do not fit the training inputs.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            model, _ = self._snapshot.copies()
            points = checked_inputs(self._inputs, inputs)
            if any(x.dim() != 2 for x in points):
                raise ValueError(
                    "Sample paths take test inputs [t, d]: list the points of a batch one after the other."
                )
            blocks = latent_blocks(model, self._inputs, points, self._products)
            latents = self._functions.num_latents
            update = product(blocks.test_train, self._update.to(points[0].dtype))
            update = update.view(len(points[0]), latents, self.num_paths)
            prior = self._functions(latent_terms(prior_at(model, points))[0])
            values = (blocks.mean.unsqueeze(-1) + prior + update).movedim(-1, 0)
            return values.squeeze(-1) if latents == 1 else values

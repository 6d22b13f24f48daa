"""Which targets Laplace's method can take, and which of them are observed."""

from collections.abc import Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor

from gpy_iterative.linear_operators.latent import num_latents


def observed_points(targets: Tensor) -> Tensor | None:
    """Which points have targets, [n] bool, under GPyTorch's `observation_nan_policy` "mask"; None when all have.

    Raises:
        ValueError: under the policy "fill", which has no meaning for a likelihood that is not Gaussian.
    """
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy == "fill":
        raise ValueError("observation_nan_policy('fill') has no meaning here; use 'mask', which drops the points.")
    if policy == "ignore" or not targets.is_floating_point():
        return None
    missing = torch.isnan(targets)
    observed = ~(missing if targets.dim() == 1 else missing.flatten(1).any(-1))
    return None if bool(observed.all()) else observed


def observed_params(params: Sequence[Any], observed: Tensor | None) -> tuple[Any, ...]:
    """The likelihood's arguments at the observed points: tensors with an entry for each point lose the others."""
    if observed is None:
        return tuple(params)
    has_rows = lambda value: isinstance(value, Tensor) and value.shape[:1] == observed.shape
    return tuple(value[observed] if has_rows(value) else value for value in params)


def check_targets_fit(distribution: MultivariateNormal, targets: Tensor) -> None:
    """Raises ValueError unless there is one target, or one row of them, for each of the prior's points."""
    latents = num_latents(distribution)
    points = distribution.mean.numel() // latents
    if not isinstance(targets, Tensor):
        raise ValueError(f"The targets must be a tensor [n], got {type(targets).__name__}.")
    if targets.shape[:1] != (points,) or targets.dim() > 2 or (targets.dim() == 2 and targets.shape[1] != latents):
        hint = " Use targets.squeeze(-1)." if targets.shape[-1:] == (1,) else ""
        raise ValueError(
            f"Laplace's method takes one problem with targets [{points}]; their shape is {tuple(targets.shape)}.{hint}"
        )
    if targets.dim() == 2 and not isinstance(distribution, MultitaskMultivariateNormal):
        hint = "Use targets.squeeze(-1)." if targets.shape[-1] == 1 else "Batches need one model for each problem."
        raise ValueError(f"The targets must be [n], got {tuple(targets.shape)}. {hint}")
    if targets.device != distribution.mean.device:
        raise ValueError(f"The targets are on {targets.device}, the model's output on {distribution.mean.device}.")

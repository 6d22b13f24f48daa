"""Supports of priors, outside which the density is zero or PyTorch raises."""

import math

import gpytorch
import torch
from gpytorch.priors import LKJCovariancePrior
from torch import Tensor
from torch.nn import Parameter

Range = tuple[Tensor, Tensor]


@torch.no_grad()
def is_in_supports(module: gpytorch.Module) -> bool:
    return all(_is_in_support(prior, closure(owner)) for _, owner, prior, closure, _ in module.named_priors())


@torch.enable_grad()
def support_of(module: gpytorch.Module, parameter: Parameter, values: Tensor) -> Range:
    """Least and largest value that the parameter's own priors allow."""
    low, high = torch.full_like(values, -math.inf), torch.full_like(values, math.inf)
    for _, owner, prior, closure, _ in module.named_priors():
        seen = closure(owner)
        if not _has_transform(prior) and _is_value_of(seen, parameter, values):
            least, most = (torch.as_tensor(end, dtype=values.dtype, device=values.device) for end in _ends(prior))
            low, high = low.maximum(least), high.minimum(most)
    return low, high


def _is_value_of(seen: Tensor, parameter: Parameter, values: Tensor) -> bool:
    if not seen.requires_grad or seen.shape != values.shape:
        return False
    (gradient,) = torch.autograd.grad(seen.sum(), [parameter], allow_unused=True)
    return gradient is not None and torch.allclose(seen.detach().to(values), values)


def _ends(prior: gpytorch.priors.Prior) -> tuple[float | Tensor, float | Tensor]:
    support = _support(prior)
    while isinstance(support, torch.distributions.constraints.independent):
        support = support.base_constraint
    return getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)


def _is_in_support(prior: gpytorch.priors.Prior, values: Tensor) -> bool:
    if isinstance(prior, LKJCovariancePrior):  # its density raises outside
        deviations = values.diagonal(dim1=-2, dim2=-1).sqrt()
        if not _is_in_support(prior.sd_prior, deviations):
            return False
    support = _support(prior)
    seen = prior.transform(values) if _has_transform(prior) else values
    if support is not None and not support.check(seen).all():
        return False
    return bool((prior.log_prob(values) > -math.inf).all())  # a uniform density is zero at its upper end


def _has_transform(prior: gpytorch.priors.Prior) -> bool:
    return getattr(prior, "_transform", None) is not None  # LKJCovariancePrior lacks the attribute


def _support(prior: gpytorch.priors.Prior) -> torch.distributions.constraints.Constraint | None:
    try:
        return prior.support
    except NotImplementedError:
        return None

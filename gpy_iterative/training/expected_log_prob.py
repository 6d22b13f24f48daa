"""E log p(y | f) under a normal f, in closed form where there is one."""

import math
from typing import Any

import torch
from gpytorch.distributions import base_distributions
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood, Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor

from gpy_iterative.training.likelihood_forms import computes_as


def expected_log_prob(
    likelihood: Likelihood, target: Tensor, latent: base_distributions.Normal, **kwargs: Any
) -> Tensor:
    """E log p(y | f) of every datum, [b]; `likelihood.expected_log_prob` unless there is a closed form.

    Args:
        likelihood: any.
        target: [b].
        latent: independent normal latent values [b].
        kwargs: passed to the likelihood.
    """
    if computes_as(likelihood, LaplaceLikelihood):
        return _laplace(likelihood, target, latent)
    own = type(likelihood)
    if (
        own.expected_log_prob is BernoulliLikelihood.expected_log_prob
        and own.forward is not BernoulliLikelihood.forward
    ):
        return _OneDimensionalLikelihood.expected_log_prob(likelihood, target, latent, **kwargs)
    return likelihood.expected_log_prob(target, latent, **kwargs)


def _laplace(likelihood: Likelihood, target: Tensor, latent: base_distributions.Normal) -> Tensor:
    # E |y - f| of a normal f; a quadrature has errors of a percent of the deviation at the kink. GPyTorch's `noise` is the
    # square of the scale.
    scale = likelihood.noise.sqrt()
    deviation = latent.stddev.clamp_min(torch.finfo(target.dtype).tiny ** 0.5)
    difference = target - latent.mean
    ratio = difference / deviation
    density = deviation * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square())
    return -(2 * scale).log() - (density + difference * torch.erf(ratio / math.sqrt(2))) / scale

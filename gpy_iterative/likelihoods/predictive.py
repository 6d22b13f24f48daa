"""From latent marginals to predictions: class probabilities, and log densities of targets.

Means are [t, C] and covariances [t, C, C]; everything is float64 inside.
"""

import math
from typing import Literal, get_args

import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.errors import UnsupportedLikelihoodError
from gpy_iterative.likelihoods.bernoulli import LogitBernoulliLikelihood
from gpy_iterative.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.likelihoods.quadrature import normal_nodes
from gpy_iterative.likelihoods.registry import form_of
from gpy_iterative.likelihoods.stock import softmax_logits

PredictiveMethod = Literal["pairwise", "diagonal", "mc", "mode"]
#: Nodes for likelihoods of one latent function.
NUM_QUADRATURE = 101


def check_predictive_method(method: str) -> None:
    """Raises ValueError for anything but a method's name."""
    if method not in get_args(PredictiveMethod):
        raise ValueError(f"method must be one of {', '.join(get_args(PredictiveMethod))}, got {method!r}.")


def class_probabilities(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    method: PredictiveMethod,
    num_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """p(class) [t] of label 1 for binary likelihoods, [t, classes] for a softmax.

    Args:
        likelihood: Bernoulli (either link) or softmax.
        mean: [t, C].
        covariance: [t, C, C].
        method: "mode" takes the latent mean for the truth. Of a softmax: "pairwise" compares classes two by two (the closed
            form with the least error while variances are moderate), "diagonal" is the paper's, which does not see
            covariances, "mc" samples.
        num_samples: of "mc".
        generator: of "mc".

    Raises:
        UnsupportedLikelihoodError: a likelihood without classes.
    """
    if method == "mode":
        covariance = torch.zeros_like(covariance)
    if isinstance(likelihood, BernoulliLikelihood):
        return torch.special.ndtr(mean[:, 0] / (1 + covariance[:, 0, 0]).sqrt())
    if isinstance(likelihood, LogitBernoulliLikelihood):
        return likelihood.log_probability(mean[:, 0], covariance[:, 0, 0]).exp()
    form = form_of(likelihood)
    if form is None or form.visible_basis is None:
        raise UnsupportedLikelihoodError(
            f"{type(likelihood).__name__} has no classes: use predictive_log_prob, or likelihood(model(x))."
        )
    if method == "mc":
        logits = softmax_logits(likelihood, _samples(mean, covariance, num_samples, generator))
        return torch.softmax(logits, -1).mean(0)
    mean = softmax_logits(likelihood, mean)
    if likelihood.mixing_weights is not None:
        weights = likelihood.mixing_weights.detach().to(covariance)
        covariance = weights @ covariance @ weights.mT
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    if method == "diagonal":
        return torch.softmax(mean / (1 + math.pi / 8 * variances).sqrt(), -1)
    spread = variances.unsqueeze(-1) + variances.unsqueeze(-2) - 2 * covariance
    gap = (mean.unsqueeze(-1) - mean.unsqueeze(-2)) / (1 + math.pi / 8 * spread.clamp_min(0)).sqrt()
    # p_c ~ 1 / sum_c' exp(-gap), in log space.
    return torch.softmax(-torch.logsumexp(-gap, -1), -1)


def predictive_log_probs(
    likelihood: PointwiseLikelihood,
    mean: Tensor,
    covariance: Tensor,
    method: PredictiveMethod,
    num_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Log p(y) [t] of the likelihood's targets under latent marginals.

    Class probabilities where there are classes, quadrature for one latent function, samples for more.
    """
    inner = likelihood.likelihood
    if method == "mode":
        covariance = torch.zeros_like(covariance)
    if likelihood.is_categorical:
        probabilities = class_probabilities(inner, mean, covariance, method, num_samples, generator)
        return probabilities.gather(-1, likelihood.targets.unsqueeze(-1)).squeeze(-1).log()
    if isinstance(inner, BernoulliLikelihood):
        return torch.special.log_ndtr((2 * likelihood.targets - 1) * mean[:, 0] / (1 + covariance[:, 0, 0]).sqrt())
    if mean.shape[-1] == 1:
        nodes, log_weights = normal_nodes(mean[:, 0], covariance[:, 0, 0], NUM_QUADRATURE)
        log_probs = torch.stack([likelihood.log_prob(node.unsqueeze(-1)) for node in nodes])
        return torch.logsumexp(log_weights + log_probs.detach(), 0)
    samples = _samples(mean, covariance, num_samples, generator)
    log_probs = torch.stack([likelihood.log_prob(sample) for sample in samples])
    return torch.logsumexp(log_probs.detach(), 0) - math.log(num_samples)


def _samples(mean: Tensor, covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count, t, C] of the latent marginals."""
    check_count("num_samples", count)
    base = torch.randn(count, *mean.shape, 1, generator=generator, device=generator.device, dtype=mean.dtype)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return mean + (root @ base.to(mean.device)).squeeze(-1)

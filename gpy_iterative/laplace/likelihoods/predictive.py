"""Class probabilities and log densities from latent marginals."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, MultitaskGaussianLikelihood
from torch import Tensor
from torch.distributions import MultivariateNormal

from gpy_iterative.checks import check_count
from gpy_iterative.errors import UnsupportedLikelihoodError
from gpy_iterative.laplace.likelihoods.own import LogitBernoulliLikelihood
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.quadrature import dense_marginal, log_concave_marginal
from gpy_iterative.laplace.likelihoods.stock import gaussian_noise, softmax_logits
from gpy_iterative.random_numbers import normal
from gpy_iterative.training.likelihood_forms import computes_as, form_of

PredictiveMethod = Literal["pairwise", "diagonal", "mc", "mode"]


@dataclass(frozen=True)
class LatentMarginals:
    """Latent means [t, C] and covariances [t, C, C], and how predictions average over them."""

    mean: Tensor
    covariance: Tensor
    method: PredictiveMethod
    num_samples: int
    generator: torch.Generator

    @property
    def seen_covariance(self) -> Tensor:
        """Zero for "mode"."""
        return torch.zeros_like(self.covariance) if self.method == "mode" else self.covariance

    def samples(self) -> Iterator[Tensor]:
        """Draws [t, C]; one at a time saves memory."""
        check_count("num_samples", self.num_samples)
        mean, generator = self.mean, self.generator
        values, vectors = torch.linalg.eigh(self.seen_covariance)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        for _ in range(self.num_samples):
            yield mean + (root @ normal((*mean.shape, 1), generator, mean.device, mean.dtype)).squeeze(-1)


def class_probabilities(likelihood: Likelihood, latent: LatentMarginals) -> Tensor:
    """See `IterativeLaplaceGP.predict_proba`."""
    if isinstance(likelihood, BernoulliLikelihood | LogitBernoulliLikelihood):
        ones = PointwiseLikelihood(likelihood, torch.ones_like(latent.mean[:, 0]), 1)
        return predictive_log_probs(ones, latent).exp()
    mean, covariance = latent.mean, latent.seen_covariance
    form = form_of(likelihood)
    if form is None or form.visible_basis is None:
        raise UnsupportedLikelihoodError(
            f"{type(likelihood).__name__} is no classifier with known classes: use predictive_log_prob, or "
            "likelihood(model(x))."
        )
    if latent.method == "mc":
        total = torch.zeros_like(softmax_logits(likelihood, mean))
        for sample in latent.samples():
            total += torch.softmax(softmax_logits(likelihood, sample), -1)
        return total / latent.num_samples
    mean = softmax_logits(likelihood, mean)
    if likelihood.mixing_weights is not None:
        weights = likelihood.mixing_weights.detach().to(covariance)
        covariance = weights @ covariance @ weights.mT
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    if latent.method == "diagonal":
        return torch.softmax(mean / (1 + math.pi / 8 * variances).sqrt(), -1)
    spread = variances.unsqueeze(-1) + variances.unsqueeze(-2) - 2 * covariance
    gap = (mean.unsqueeze(-1) - mean.unsqueeze(-2)) / (1 + math.pi / 8 * spread.clamp_min(0)).sqrt()
    # p_c ~ 1 / sum_c' exp(-gap), in log space.
    return torch.softmax(-torch.logsumexp(-gap, -1), -1)


def predictive_log_probs(likelihood: PointwiseLikelihood, latent: LatentMarginals) -> Tensor:
    """Log p(y) [t]; see `IterativeLaplaceGP.predictive_log_prob`."""
    inner, mean, covariance = likelihood.likelihood, latent.mean, latent.seen_covariance
    if likelihood.is_categorical:
        probabilities = class_probabilities(inner, latent)
        return probabilities.gather(-1, likelihood.targets.unsqueeze(-1)).squeeze(-1).log()
    if computes_as(inner, BernoulliLikelihood):
        return torch.special.log_ndtr((2 * likelihood.targets - 1) * mean[:, 0] / (1 + covariance[:, 0, 0]).sqrt())
    if computes_as(inner, MultitaskGaussianLikelihood):
        noise = gaussian_noise(inner, mean).expand_as(mean)
        marginal = MultivariateNormal(mean, covariance + torch.diag_embed(noise))
        return marginal.log_prob(likelihood.targets).detach()
    if mean.shape[-1] == 1:
        return _quadrature(likelihood, mean[:, 0], covariance[:, 0, 0]).detach()
    total = torch.full_like(mean[:, 0], -torch.inf)
    for sample in latent.samples():
        total = torch.logaddexp(total, likelihood.log_prob(sample).detach())
    return total - math.log(latent.num_samples)


def _quadrature(likelihood: PointwiseLikelihood, mean: Tensor, variance: Tensor) -> Tensor:
    def log_prob(f: Tensor) -> Tensor:
        return likelihood.log_prob(f.unsqueeze(-1))

    if not likelihood.is_log_concave:
        return dense_marginal(log_prob, mean, variance)
    return log_concave_marginal(log_prob, lambda f: likelihood.slope(f.unsqueeze(-1)).squeeze(-1), mean, variance)

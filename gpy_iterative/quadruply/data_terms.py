"""What the data contribute to the evidence lower bound: unbiased for Gaussian noise, a bound for other likelihoods.

Sums over data run in float64: a float32 sum weighted by n over the batch loses what the features were computed with.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import base_distributions
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor

from gpy_iterative.quadruply.control_variate.known_latent import KnownLatent
from gpy_iterative.quadruply.feature_samples import Head, Sample
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.training.likelihood_forms import expected_log_prob


@dataclass(frozen=True)
class Rows:
    """Sampled data.

    Attributes:
        x: [b, d].
        target: [b].
        prior_mean: of the mean module, [b].
        noise: variances of a Gaussian likelihood, [b]; None for another one.
        weight: n / b.
    """

    x: Tensor
    target: Tensor
    prior_mean: Tensor
    noise: Tensor | None
    weight: float

    @property
    def residual(self) -> Tensor:
        """Targets minus prior mean, [b]."""
        return self.target - self.prior_mean


def noise_variances(
    likelihood: Likelihood, index: Tensor, size: int, params: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A Gaussian likelihood's noise variances at some of `size` data, [b].

    Raises ValueError for fixed noises of another number than the data, and for variances that are not positive.
    """
    is_fixed = isinstance(likelihood, FixedNoiseGaussianLikelihood)
    given = kwargs.get("noise", likelihood.noise_covar.noise if is_fixed else None)
    if given is None:
        noise = likelihood._shaped_noise_covar(index.shape, *params, **kwargs).diagonal(dim1=-1, dim2=-2)
    elif given.shape != (size,):
        raise ValueError(
            f"There are noise variances of shape {tuple(given.shape)} for {size} data. For a batch pass its own: "
            "mll(model(x), y, noise=noise)."
        )
    else:
        # Not by the likelihood: given a noise, it takes it for the additional one as well.
        noise = given[index] + (likelihood.second_noise if is_fixed else 0)
    bad = ~(torch.isfinite(noise) & (noise > 0))
    if bad.any():
        raise ValueError(f"Every noise variance must be finite and positive, but one is {noise[bad][0].item()}.")
    return noise


def diagonal_variance(model: QuadruplyStochasticGP, rows: Rows, head: Head, sample: Sample, features: Tensor) -> Tensor:
    """The latent variance from columns of C with a diagonal entry alone, [b]: exact, or unbiased from the sample."""
    weights = model.weights
    if weights.shared_diagonal:
        return head.variance + weights.shared_variance * model.tail_prior_variance(rows.x, head.features)
    return head.variance + sample.weight * (features.square() @ (2 * sample.rows.log_diagonal).exp())


def gaussian_term(model: QuadruplyStochasticGP, rows: Rows, first: Sample, second: Sample) -> Tensor:
    """Unbiased for -2 E_q log p(y | f) from independent samples of groups: [], float64.

    The product of two residuals absorbs the targets' own square, and cancels before anything large is summed.
    """
    head = Head.of(model, model.head_features(rows.x))
    left = model.tail_features(rows.x, head.features, first.groups)
    right = model.tail_features(rows.x, head.features, second.groups)
    target = rows.residual - head.mean
    square = (target - first.mean(left)) * (target - second.mean(right))
    variance = ((head.root + first.root(left)) * (head.root + second.root(right))).sum(-1)
    return _gaussian(model, rows, head, square + variance + diagonal_variance(model, rows, head, first, left))


def known_gaussian_term(
    model: QuadruplyStochasticGP, rows: Rows, latent: KnownLatent, first: Sample, second: Sample
) -> Tensor:
    """-2 E_q log p(y | f) of rows whose latent function is known, with an unbiased gradient: [], float64.

    The sample matters to the gradient alone, and to a diagonal of C that is not shared.
    """
    mean, root, features, head = _known(model, latent, first, second)
    variance = root.square().sum(-1) + diagonal_variance(model, rows, head, first, features)
    return _gaussian(model, rows, head, (rows.residual - mean).square() + variance)


def site_bound(
    likelihood: Likelihood, model: QuadruplyStochasticGP, rows: Rows, sample: Sample, **kwargs: Any
) -> Tensor:
    """In expectation at most E_q log p(y | f) for a log-concave likelihood, and equal for all groups: [], float64.

    By Jensen's inequality: given the weights, the sampled latent value has the right mean. What the sample contributes to
    the variance is taken with whole rows of C; a shared diagonal entry contributes exactly. (Theorem 3 of the paper has the
    variance where its square root belongs, and is no bound.)
    """
    head = Head.of(model, model.head_features(rows.x))
    features = model.tail_features(rows.x, head.features, sample.groups)
    variance = _site_variance(model, rows, head.root + sample.root(features), head, sample, features)
    return _site(likelihood, model, rows, head, head.mean + sample.mean(features), variance, **kwargs)


def known_site_term(
    likelihood: Likelihood,
    model: QuadruplyStochasticGP,
    rows: Rows,
    latent: KnownLatent,
    first: Sample,
    second: Sample,
    **kwargs: Any,
) -> Tensor:
    """E_q log p(y | f) of rows whose latent function is known, with an unbiased gradient: [], float64.

    For any likelihood where the diagonal of C is shared; where it is not, a lower bound in expectation, of a log-concave
    one.
    """
    mean, root, features, head = _known(model, latent, first, second)
    variance = _site_variance(model, rows, root, head, first, features)
    return _site(likelihood, model, rows, head, mean, variance, **kwargs)


def _known(
    model: QuadruplyStochasticGP, latent: KnownLatent, first: Sample, second: Sample
) -> tuple[Tensor, Tensor, Tensor, Head]:
    """Mean [b] and root [b, k] of all features, the first sample's features, and the head."""
    features, _, total = latent.at(model, first, second)
    head = Head.of(model, latent.head)
    return head.mean + total[:, 0], head.root + total[:, 1:], features, head


def _gaussian(model: QuadruplyStochasticGP, rows: Rows, head: Head, square: Tensor) -> Tensor:
    """-2 log p from expected squares [b], weighted and summed."""
    noise = rows.noise.double()
    model.weights.watch(head.features, square)
    return rows.weight * (square.double() / noise + noise.log() + math.log(2 * math.pi)).sum()


def _site(
    likelihood: Likelihood,
    model: QuadruplyStochasticGP,
    rows: Rows,
    head: Head,
    mean: Tensor,
    variance: Tensor,
    **kwargs: Any,
) -> Tensor:
    """E log p of latent values with moments [b], weighted and summed."""
    deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    mean = rows.prior_mean + mean

    def fit(mean: Tensor, deviation: Tensor) -> Tensor:
        latent = base_distributions.Normal(mean, deviation)
        return rows.weight * expected_log_prob(likelihood, rows.target, latent, **kwargs).double().sum()

    fixed = mean.detach(), deviation.detach()
    model.weights.watch(head.features, variance, lambda change: fit(fixed[0] + change, fixed[1]))
    return fit(mean, deviation)


def _site_variance(
    model: QuadruplyStochasticGP, rows: Rows, root: Tensor, head: Head, sample: Sample, features: Tensor
) -> Tensor:
    """Of the latent value, [b]; by Jensen's inequality too much where the diagonal of C is sampled."""
    variance = root.square().sum(-1)
    if model.weights.shared_diagonal:
        return variance + diagonal_variance(model, rows, head, sample, features)
    own = features.square() @ (2 * sample.rows.log_diagonal).exp()
    return variance + head.variance + sample.weight**2 * own

"""Data terms of the evidence lower bound, and initial diagonal of C.

Sums over data are float64: weighted by n / b, float32 would lose digits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import base_distributions
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor

from gpy_iterative.errors import ApproximationWarning, warn
from gpy_iterative.quadruply.bases.nystrom_basis import NystromBasis
from gpy_iterative.quadruply.feature_weights import FeatureWeights, Head
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.quadruply.samples import KnownValues, Sample
from gpy_iterative.training.data_advice import warn_of_targets
from gpy_iterative.training.likelihood_forms import expected_log_prob

#: Rows that tell the scale of targets.
LEAST_ROWS = 20
#: 1 / (largest curvature of a logistic likelihood).
LOGISTIC_NOISE = 4.0
#: Largest omitted prior variance without a warning, relative to the noise.
OMITTED = 0.1


@dataclass(frozen=True)
class Rows:
    x: Tensor  # [b, d]
    target: Tensor  # [b]
    prior_mean: Tensor  # [b]
    noise: Tensor | None  # Gaussian noise variances, [b]
    weight: float  # n / b

    @property
    def residual(self) -> Tensor:
        return self.target - self.prior_mean


@dataclass(frozen=True)
class Call:
    likelihood: Likelihood
    x: Tensor  # [n, d], data or a batch
    target: Tensor  # [n]
    params: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_data: int  # all data
    generator: torch.Generator

    def rows(self, model: QuadruplyStochasticGP, index: Tensor, *, is_gaussian: bool) -> Rows:
        x = self.x[index]
        noise = self.noise(index) if is_gaussian else None
        return Rows(x, self.target[index].to(x), model.prior_mean(x), noise, self.num_data / len(index))

    def noise(self, index: Tensor) -> Tensor:
        """Gaussian noise variances [b] at rows `index`."""
        is_fixed = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        given = self.kwargs.get("noise", self.likelihood.noise_covar.noise if is_fixed else None)
        if given is None:
            covariance = self.likelihood._shaped_noise_covar(index.shape, *self.params, **self.kwargs)
            noise = covariance.diagonal(dim1=-1, dim2=-2)
        elif given.shape != self.x.shape[:1]:
            raise ValueError(
                f"There are noise variances of shape {tuple(given.shape)} for {len(self.x)} data. For a batch pass its "
                "own: mll(model(x), y, noise=noise)."
            )
        else:
            # The likelihood would add its second noise to a passed noise twice.
            noise = given[index] + (self.likelihood.second_noise if is_fixed else 0)
        bad = ~(torch.isfinite(noise) & (noise > 0))
        if bad.any():
            raise ValueError(f"Noise variances must be finite and positive, but one is {noise[bad][0].item()}.")
        return noise


def gaussian_term(
    model: QuadruplyStochasticGP, rows: Rows, first: Sample, second: Sample, known: KnownValues | None = None
) -> Tensor:
    """-2 E_q log p(y | f) with an unbiased gradient: [], float64.

    Without known values, two independent samples estimate squared residuals.
    """
    if known is None:
        head = Head(model.weights, model.head_features(rows.x))
        left = model.tail_features(rows.x, head.features, first.groups)
        right = model.tail_features(rows.x, head.features, second.groups)
        square = _product_of_residuals(rows.residual, head, (first, left), (second, right))
    else:
        head, left, square = known.head, known.left, _square_of_residuals(rows.residual, known)
    square = square + _diagonal_variance(model, rows, head, first, left)
    noise = rows.noise.double()
    model.weights.watch(head.features, square)
    return rows.weight * (square.double() / noise + noise.log() + math.log(2 * math.pi)).sum()


def site_bound(
    likelihood: Likelihood,
    model: QuadruplyStochasticGP,
    rows: Rows,
    sample: Sample,
    known: KnownValues | None = None,
    **kwargs: Any,
) -> Tensor:
    """Lower bound of E_q log p(y | f) for a log-concave likelihood, with an unbiased gradient: [], float64.

    It follows from Jensen's inequality, since the sampled latent mean is unbiased given the weights.
    """
    if known is None:
        head = Head(model.weights, model.head_features(rows.x))
        features = model.tail_features(rows.x, head.features, sample.groups)
        mean, root = head.mean + sample.mean(features), head.root + sample.root(features)
    else:
        head, features, mean, root = known.head, known.left, known.mean, known.root
    # Jensen's inequality weights a sampled diagonal of C twice: its variance is too large.
    diagonal = _diagonal_variance(model, rows, head, sample, features, factor=sample.weight)
    variance = root.square().sum(-1) + diagonal
    deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    mean = rows.prior_mean + mean

    def fit(mean: Tensor, deviation: Tensor) -> Tensor:
        latent = base_distributions.Normal(mean, deviation)
        return rows.weight * expected_log_prob(likelihood, rows.target, latent, **kwargs).double().sum()

    fixed = mean.detach(), deviation.detach()
    model.weights.watch(head.features, variance, lambda change: fit(fixed[0] + change, fixed[1]))
    return fit(mean, deviation)


def control_term(known: KnownValues, first: Sample, second: Sample, residual: Tensor, noise: Tensor) -> Tensor:
    """Control variate for `gaussian_term`, divided by the number of points (Evans and Nair 2018, equation 3).

    Value and gradient have mean zero. `residual` and `noise` [p] must be detached: their gradient would be biased.
    """
    estimate = _product_of_residuals(residual, known.head, (first, known.left), (second, known.right))
    total = _square_of_residuals(residual, known) - estimate
    return (total.double() / noise.double()).sum() / len(residual)


def _square_of_residuals(residual: Tensor, known: KnownValues) -> Tensor:
    """E (r - f)^2 without diagonal columns, [b]."""
    return (residual - known.mean).square() + known.root.square().sum(-1)


def _product_of_residuals(
    residual: Tensor, head: Head, first: tuple[Sample, Tensor], second: tuple[Sample, Tensor]
) -> Tensor:
    (i, left), (j, right) = first, second
    target = residual - head.mean
    roots = (head.root + i.root(left)) * (head.root + j.root(right))
    return (target - i.mean(left)) * (target - j.mean(right)) + roots.sum(-1)


def _diagonal_variance(
    model: QuadruplyStochasticGP, rows: Rows, head: Head, sample: Sample, features: Tensor, factor: float = 1.0
) -> Tensor:
    """Latent variance [b] from C's diagonal columns."""
    if model.weights.shared_diagonal:
        return head.variance + model.weights.shared_variance * model.tail_prior_variance(rows.x, head.features)
    return head.variance + factor * sample.variance(features)


@torch.no_grad()
def begin(model: QuadruplyStochasticGP, rows: Rows, num_data: int, parameters: Iterable[Tensor]) -> None:
    """Sets the diagonal of C, and warns of targets and a basis that do not suit the model."""
    basis, head = model.basis, model.head_features(rows.x)
    noise = LOGISTIC_NOISE if rows.noise is None else float(rows.noise.mean())
    variance = model.tail_prior_variance(rows.x, head) if model.weights.shared_diagonal else None
    mean_variance = None if variance is None else float(variance.mean())
    _initialize_weights(model, rows.x, head, num_data / noise, mean_variance)
    if isinstance(basis, NystromBasis) and not model.num_tail_groups:
        _warn_of_omission(basis.omitted_variance(), noise)
    if rows.noise is None or variance is None:
        return
    if len(rows.target) >= LEAST_ROWS and (rows.target != rows.target[0]).any():  # a batch may have equal targets
        warn_of_targets(head.square().sum(-1) + variance + rows.noise, rows.residual)
    if not basis.num_head_features and any(parameter.requires_grad for parameter in parameters):
        _warn_of_capacity(model.weights.num_tail, num_data * mean_variance / noise)


def _initialize_weights(
    model: QuadruplyStochasticGP, x: Tensor, head: Tensor, scale: float, mean_variance: float | None
) -> None:
    """c_r^2 = 1 / (s_r + scale phi_r^T phi_r / b) (proposition 1); O(b m) without a shared diagonal."""
    weights = model.weights
    weights.head_log_diagonal.copy_(-0.5 * (scale * head.square().mean(0) + model.head_precision()).log())
    if weights.shared_diagonal and weights.num_tail:
        weights.tail_log_diagonal.fill_(-0.5 * math.log(scale * mean_variance / weights.num_tail + 1.0))
    elif not weights.shared_diagonal:
        for groups in model.tail_blocks():
            precision = scale * model.tail_features(x, head, groups).square().mean(0) + model.tail_precision(groups)
            weights.tail_log_diagonal[model.basis.feature_index(groups), 0] = -0.5 * precision.log()
    weights.initialized.fill_(1)


def _warn_of_omission(omitted: float, noise: float) -> None:
    if omitted > OMITTED * noise:
        warn(
            f"The basis omits a prior variance of {omitted:.2g} at its own points, beside a noise of {noise:.2g}: means "
            "and variances will be off. It omits eigenvalues below a millionth of the largest. If a large term of the "
            "kernel, such as a constant or a trend, makes that one large, subtract the trend from the targets and leave "
            "the term out.",
            ApproximationWarning,
        )


def _warn_of_capacity(num_features: int, limit: float) -> None:
    if num_features >= limit:
        warn(
            f"{num_features} random features with independent posterior deviations are more than n outputscale / noise = "
            f"{limit:.3g}: variances stay above half of the prior's, and hyperparameters that are learned from this bound "
            "drift to too much noise and too small an outputscale. Use NystromBasis, fix the hyperparameters with "
            "requires_grad_(False), or learn them with another marginal log likelihood.",
            ApproximationWarning,
        )


@contextmanager
def initialization_undone(weights: FeatureWeights, *, always: bool) -> Iterator[None]:
    """Undoes a first initialisation after an exception, or `always`."""
    # Not the columns, which may be large.
    changed = ("head_log_diagonal", "tail_log_diagonal", "initialized")
    before = None if weights.initialized else {name: getattr(weights, name).detach().clone() for name in changed}
    undo = True
    try:
        yield
        undo = always
    finally:
        if undo and before is not None:
            weights.load_state_dict(before, strict=False)

"""Log density, curvature and support of likelihoods."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import base_distributions
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood, Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor

PointwiseFunction = Callable[[Likelihood, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LikelihoodForm:
    """Functions of a likelihood class, see `register_curvature`.

    Attributes:
        hessian: -d^2 log p / df^2 [n, C, C]; None uses autograd.
        num_latents: C of a likelihood; its value None admits any.
        visible_basis: orthonormal basis [C, r] of the latent directions that matter; None: all.
        target_per_latent: whether targets are [n, C] instead of [n]; None admits both.
        takes_samples: whether `log_prob` takes f [k, n, C].
    """

    log_prob: PointwiseFunction
    hessian: PointwiseFunction | None = None
    fisher: PointwiseFunction | None = None
    log_concave: bool | None = None
    support: tuple[Callable[[Likelihood, Tensor], Tensor], str] | None = None
    num_latents: Callable[[Likelihood], int | None] = lambda _: 1
    visible_basis: Callable[[Likelihood], Tensor] | None = None
    target_per_latent: bool | None = False
    takes_samples: bool = True


FORMS: dict[type[Likelihood], LikelihoodForm] = {}
#: Classes for which Laplace's method is meaningless, and why.
REFUSALS: dict[type[Likelihood], str] = {}


def register_curvature(
    likelihood_class: type[Likelihood],
    log_prob: PointwiseFunction,
    fisher: PointwiseFunction | None = None,
    *,
    log_concave: bool | None = None,
    support: tuple[Callable[[Likelihood, Tensor], Tensor], str] | None = None,
    num_latents: int | None = 1,
) -> None:
    """Registers a likelihood for Laplace's method, or replaces its registration.

    Args:
        likelihood_class: includes subclasses with the same `forward`.
        log_prob: (likelihood, f [n, C], y [n]) -> log p(y_n | f_n) [n], in float64; three times differentiable in f, once
            in the parameters.
        fisher: (likelihood, f, y) -> Fisher information [n, C, C], which replaces an indefinite Hessian.
        log_concave: whether log p is concave in f; None checks each evaluation.
        support: (likelihood, y) -> [n] bool of admissible targets, and their description; None admits all finite ones.
        num_latents: C; None admits any.
    """
    FORMS[likelihood_class] = LikelihoodForm(
        log_prob=log_prob,
        fisher=fisher,
        log_concave=log_concave,
        support=support,
        num_latents=lambda _: num_latents,
        target_per_latent=False if num_latents == 1 else None,
        takes_samples=False,
    )


def form_of(likelihood: Likelihood) -> LikelihoodForm | None:
    """The form of the nearest base class with the same `forward`, or None."""
    base = next((base for base in type(likelihood).__mro__ if base in FORMS), None)
    return FORMS[base] if base is not None and computes_as(likelihood, base) else None


def computes_as(likelihood: Likelihood, likelihood_class: type[Likelihood]) -> bool:
    """Whether it is an instance with this class' `forward`."""
    return isinstance(likelihood, likelihood_class) and type(likelihood).forward is likelihood_class.forward


def check_support(likelihood: Likelihood, targets: Tensor) -> None:
    """Raises ValueError for an inadmissible target."""
    form = form_of(likelihood)
    if form is None or form.support is None:
        return
    admissible, words = form.support
    is_categorical = form.visible_basis is not None
    good = admissible(likelihood, targets.long() if is_categorical else targets.double())
    if not good.all():
        index = tuple((~good).nonzero()[0].tolist())
        raise ValueError(f"{type(likelihood).__name__}: {words}, but targets{list(index)} is {targets[index].item()}.")


def refusal_of(likelihood: Likelihood) -> str | None:
    return next((reason for base, reason in REFUSALS.items() if computes_as(likelihood, base)), None)


def is_log_concave(likelihood: Likelihood) -> bool:
    """Whether log p(y | f) is known to be concave in one latent f per datum."""
    if computes_as(likelihood, LaplaceLikelihood):  # not registered: its curvature is zero almost everywhere
        return True
    form = form_of(likelihood)
    return form is not None and form.log_concave is True and form.num_latents(likelihood) in (1, None)


def expected_log_prob(
    likelihood: Likelihood, target: Tensor, latent: base_distributions.Normal, **kwargs: Any
) -> Tensor:
    """E log p(y | f) [b] for targets y [b] and independent f [b], in closed form or by the likelihood."""
    if computes_as(likelihood, LaplaceLikelihood):
        # Quadrature is inaccurate at the kink. GPyTorch's `noise` is the squared scale.
        scale = likelihood.noise.sqrt()
        deviation = latent.stddev.clamp_min(torch.finfo(target.dtype).tiny ** 0.5)
        difference = target - latent.mean
        ratio = difference / deviation
        density = deviation * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square())
        return -(2 * scale).log() - (density + difference * torch.erf(ratio / math.sqrt(2))) / scale
    own = type(likelihood)
    if (
        own.expected_log_prob is BernoulliLikelihood.expected_log_prob
        and own.forward is not BernoulliLikelihood.forward
    ):
        return _OneDimensionalLikelihood.expected_log_prob(likelihood, target, latent, **kwargs)
    return likelihood.expected_log_prob(target, latent, **kwargs)

"""Log density, curvature and support of likelihood classes, and E log p(y | f) under a normal f."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import base_distributions
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood, Likelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor

#: (likelihood, latents [n, C] in float64, targets [n] or [n, C]) -> [n], or curvature blocks [n, C, C].
PointwiseFunction = Callable[[Likelihood, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LikelihoodForm:
    """Functions of one likelihood class; all differentiable in the latents and the likelihood's parameters.

    Attributes:
        log_prob: log p(y_n | f_n), [n].
        hessian: -d^2 log p / df^2 in closed form, [n, C, C]; None leaves it to autograd.
        fisher: the expected curvature, positive semi-definite, [n, C, C].
        log_concave: whether the negative Hessian is positive semi-definite everywhere; None: looked at as it comes.
        support: where targets are admissible, [n] bool, and in words; None admits all finite targets.
        num_latents: C for a likelihood object; None admits any.
        visible_basis: an orthonormal basis [C, r] of what the likelihood sees of a point's latents, where that is
            less than everything; None is everything.
        target_per_latent: whether targets are [n, C], a value for each latent function, and not [n]; None admits both.
    """

    log_prob: PointwiseFunction
    hessian: PointwiseFunction | None = None
    fisher: PointwiseFunction | None = None
    log_concave: bool | None = None
    support: tuple[Callable[[Likelihood, Tensor], Tensor], str] | None = None
    num_latents: Callable[[Likelihood], int | None] | None = None
    visible_basis: Callable[[Likelihood], Tensor] | None = None
    target_per_latent: bool | None = False


_FORMS: dict[type[Likelihood], LikelihoodForm] = {}
_REFUSALS: dict[type[Likelihood], str] = {}


def register_curvature(
    likelihood_class: type[Likelihood],
    log_prob: PointwiseFunction,
    fisher: PointwiseFunction | None = None,
    *,
    log_concave: bool | None = None,
    support: tuple[Callable[[Likelihood, Tensor], Tensor], str] | None = None,
    num_latents: int | None = 1,
) -> None:
    """Teaches Laplace's method a likelihood, or replaces what it knew.

    A likelihood whose `forward` gives a distribution with a smooth `log_prob` needs no registration. Register one whose
    `forward` loses digits, or whose density is not log-concave and whose Fisher information is known.

    Args:
        likelihood_class: the class; subclasses that do not override `forward` are served too.
        log_prob: (likelihood, f [n, C], y [n]) -> log p(y_n | f_n) [n]. Called in float64; three times differentiable in
            f by autograd, and once in the likelihood's parameters.
        fisher: (likelihood, f, y) -> [n, C, C], positive semi-definite: takes the Hessian's place where that is
            indefinite.
        log_concave: whether log p is concave in f everywhere; None: checked wherever it is evaluated.
        support: a function (likelihood, y) -> [n] bool of admissible targets, and words that say which these are.
        num_latents: C; None admits any.
    """
    _FORMS[likelihood_class] = LikelihoodForm(
        log_prob=log_prob,
        fisher=fisher,
        log_concave=log_concave,
        support=support,
        num_latents=lambda _: num_latents,
        target_per_latent=False if num_latents == 1 else None,
    )


def register_form(likelihood_class: type[Likelihood], form: LikelihoodForm) -> None:
    """As `register_curvature`, with everything a form can say."""
    _FORMS[likelihood_class] = form


def register_refusal(likelihood_class: type[Likelihood], reason: str) -> None:
    """A class for which Laplace's method is meaningless, and why."""
    _REFUSALS[likelihood_class] = reason


def form_of(likelihood: Likelihood) -> LikelihoodForm | None:
    """The form of the nearest base class that computes what this likelihood does; None where there is none."""
    base = next((base for base in type(likelihood).__mro__ if base in _FORMS), None)
    return _FORMS[base] if base is not None and computes_as(likelihood, base) else None


def computes_as(likelihood: Likelihood, likelihood_class: type[Likelihood]) -> bool:
    """Whether a likelihood is of a class and has the class' own `forward`: closed forms of any other are not its own."""
    return isinstance(likelihood, likelihood_class) and type(likelihood).forward is likelihood_class.forward


def check_support(likelihood: Likelihood, targets: Tensor) -> None:
    """Raises ValueError, naming class and index, where a target is outside the likelihood's support."""
    form = form_of(likelihood)
    if form is None or form.support is None:
        return
    admissible, words = form.support
    is_categorical = form.visible_basis is not None
    good = admissible(likelihood, targets.long() if is_categorical else targets.double())
    if not good.all():
        index = int((~good).nonzero()[0, 0])
        raise ValueError(f"{type(likelihood).__name__}: {words}, but targets[{index}] is {targets[index].item()}.")


def refusal_of(likelihood: Likelihood) -> str | None:
    """Why Laplace's method refuses this likelihood; None where it does not."""
    return next((reason for base, reason in _REFUSALS.items() if computes_as(likelihood, base)), None)


def is_log_concave(likelihood: Likelihood) -> bool:
    """Whether log p(y | f) is known to be concave in f, of which there is one at each point."""
    if computes_as(likelihood, LaplaceLikelihood):  # not registered: its curvature is zero almost everywhere
        return True
    form = form_of(likelihood)
    if form is None or form.num_latents is None:
        return False
    return form.log_concave is True and form.num_latents(likelihood) in (1, None)


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

"""Log densities of known likelihoods, exact in tails and for three derivatives.

`forward` is not: `BernoulliLikelihood` clamps probabilities, `SoftmaxLikelihood` transposes an input with as many points
as classes, the rate of `PoissonLikelihood` underflows.
"""

import math
from dataclasses import replace

import gpytorch.likelihoods as gl
import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Beta, Normal, StudentT
from torch.nn.functional import logsigmoid, softplus

from gpy_iterative.laplace.likelihoods.curvature import SoftmaxCurvature
from gpy_iterative.laplace.likelihoods.own import LogitBernoulliLikelihood, PoissonLogLikelihood, times_log_rate
from gpy_iterative.training.likelihood_forms import FORMS, REFUSALS, LikelihoodForm

_LABELS = (lambda _, y: (y == 0) | (y == 1), "labels must be 0 or 1 (for -1 and 1 pass (target + 1) / 2)")
_COUNTS = (lambda _, y: (y >= 0) & (y == y.round()), "counts must be whole numbers, not negative")
_CLASSES = (
    lambda likelihood, y: (y >= 0) & (y < likelihood.num_classes),
    "labels must be whole numbers from 0 to num_classes - 1",
)
_FRACTIONS = (lambda _, y: (y > 0) & (y < 1), "targets must lie strictly between 0 and 1")

#: Below this value a probit is its asymptotic series.
PROBIT_TAIL, TAIL_TERMS = -12.0, 16


def _probit_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    z = (2 * y - 1) * f[..., 0]
    low = z < PROBIT_TAIL
    if not low.any():
        return torch.special.log_ndtr(z)
    return torch.where(
        low, _log_normal_tail(torch.where(low, z, 2 * PROBIT_TAIL)), torch.special.log_ndtr(z.masked_fill(low, 0.0))
    )


def _log_normal_tail(z: Tensor) -> Tensor:
    # Second and third derivatives of `log_ndtr` cancel far below zero.
    x = z.square().reciprocal()
    rest = torch.zeros_like(z)
    for odd in range(2 * TAIL_TERMS - 1, 0, -2):  # 1 - x + 3 x^2 - 15 x^3 + ...
        rest = -odd * x * (1 + rest)
    return -0.5 * z.square() - 0.5 * math.log(2 * math.pi) - (-z).log() + rest.log1p()


def softmax_logits(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Mixed latents [*s, n, classes] of latents [*s, n, C]."""
    weights = likelihood.mixing_weights
    return f if weights is None else f @ weights.mT.to(f.dtype)


def _softmax_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    log_probabilities = torch.log_softmax(softmax_logits(likelihood, f), -1)
    return log_probabilities.gather(-1, y.expand(f.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def mixed_blocks(likelihood: Likelihood, blocks: Tensor) -> Tensor:
    """A^T B A [n, C, C] for mixing weights A."""
    if likelihood.mixing_weights is None:
        return blocks
    weights = likelihood.mixing_weights.to(blocks.dtype)
    return weights.mT @ blocks @ weights


def _softmax_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    return mixed_blocks(likelihood, SoftmaxCurvature(torch.softmax(softmax_logits(likelihood, f), -1)).blocks())


def _softmax_visible(likelihood: Likelihood) -> Tensor:
    """Basis orthogonal to {f: A f is constant}."""
    like = next(likelihood.parameters(), torch.zeros(()))
    centring = torch.eye(likelihood.num_classes, dtype=torch.float64, device=like.device) - 1 / likelihood.num_classes
    if likelihood.mixing_weights is not None:
        centring = centring @ likelihood.mixing_weights.detach().double()
    _, values, vectors = torch.linalg.svd(centring, full_matrices=False)
    return vectors[values > 1e-10 * values.max()].mT


def _softplus_and_log(z: Tensor) -> tuple[Tensor, Tensor]:
    # log softplus(z) -> z, where softplus is rounding noise or zero.
    low = z < -30
    logarithm = torch.where(low, z, softplus(torch.where(low, torch.zeros_like(z), z)).log())
    value = torch.where(low, torch.where(low, z, 0.0).exp(), softplus(z))  # autograd needs both branches finite
    return value, logarithm


def _poisson_softplus_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    rate, log_rate = _softplus_and_log(f[..., 0])
    return y * log_rate - rate - torch.lgamma(y + 1)


def _poisson_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    return times_log_rate(y, f[..., 0]) - f[..., 0].exp() - torch.lgamma(y + 1)


def _negative_binomial_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    probs = likelihood.probs.to(f.dtype).clamp(1e-6, 1 - 1e-6)
    total, log_total = _softplus_and_log(f[..., 0])
    if not likelihood.num_failures_param:
        total, log_total = total * (1 - probs) / probs, log_total + torch.log1p(-probs) - probs.log()
    # Derivatives of lgamma overflow at a total of zero: G(t + y) / G(t) = t G(t + y) / G(t + 1).
    ratio = log_total + torch.lgamma(total + y.clamp_min(1)) - torch.lgamma(total + 1)
    counts = torch.where(y == 0, 0.0, ratio) - torch.lgamma(y + 1)
    return counts + total * torch.log1p(-probs) + y * probs.log()


def _student_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    nu, noise = likelihood.deg_free.to(f.dtype), likelihood.noise.to(f.dtype)
    return StudentT(nu, f[..., 0], noise.sqrt(), validate_args=False).log_prob(y)


def _student_fisher(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    nu, noise = likelihood.deg_free.to(f.dtype), likelihood.noise.to(f.dtype)
    return ((nu + 1) / ((nu + 3) * noise)).expand(len(f))[:, None, None]


def _beta_concentrations(likelihood: Likelihood, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Alpha and beta (one more than GPyTorch documents), and d alpha / df."""
    scale, mixture = likelihood.scale.to(f.dtype), torch.sigmoid(f[..., 0])
    return scale * mixture + 1, scale * (1 - mixture) + 1, scale * mixture * torch.sigmoid(-f[..., 0])


def _beta_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    alpha, beta, _ = _beta_concentrations(likelihood, f)
    return Beta(alpha, beta, validate_args=False).log_prob(y)


def _beta_fisher(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    alpha, beta, slope = _beta_concentrations(likelihood, f)
    # polygamma(1, .) is differentiable.
    return (slope.square() * (torch.polygamma(1, alpha) + torch.polygamma(1, beta)))[:, None, None]


def gaussian_noise(likelihood: Likelihood, f: Tensor) -> Tensor:
    """Noise variances, broadcastable to [n, C]."""
    if isinstance(likelihood, gl.FixedNoiseGaussianLikelihood):
        known = likelihood.noise_covar.noise.shape[-1]
        if known != f.shape[-2]:  # GPyTorch assumes zero noise
            raise ValueError(
                f"FixedNoiseGaussianLikelihood has noise for {known} points, and there are {f.shape[-2]} here: leave "
                "points without a target out of data and noise, and predict latent values at test points."
            )
    is_multitask = isinstance(likelihood, gl.MultitaskGaussianLikelihood)
    covariance = likelihood._shaped_noise_covar(f.shape[-2:] if is_multitask else f.shape[-2:-1])
    return covariance.diagonal(dim1=-1, dim2=-2).to(f.dtype).view(f.shape[-2], f.shape[-1] if is_multitask else 1)


def _gaussian_log_prob(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    return Normal(f, gaussian_noise(likelihood, f).sqrt(), validate_args=False).log_prob(y.view(f.shape[-2:])).sum(-1)


def _gaussian_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed((1 / gaussian_noise(likelihood, f)).expand_as(f))


_GAUSSIAN = LikelihoodForm(_gaussian_log_prob, hessian=_gaussian_hessian, log_concave=True)
FORMS |= {
    gl.BernoulliLikelihood: LikelihoodForm(_probit_log_prob, log_concave=True, support=_LABELS),
    LogitBernoulliLikelihood: LikelihoodForm(
        lambda _, f, y: logsigmoid((2 * y - 1) * f[..., 0]), log_concave=True, support=_LABELS
    ),
    gl.SoftmaxLikelihood: LikelihoodForm(
        _softmax_log_prob,
        hessian=_softmax_hessian,
        log_concave=True,
        support=_CLASSES,
        num_latents=lambda likelihood: likelihood.num_features,
        visible_basis=_softmax_visible,
    ),
    gl.PoissonLikelihood: LikelihoodForm(_poisson_softplus_log_prob, log_concave=True, support=_COUNTS),
    PoissonLogLikelihood: LikelihoodForm(_poisson_log_prob, log_concave=True, support=_COUNTS),
    gl.NegativeBinomialLikelihood: LikelihoodForm(_negative_binomial_log_prob, log_concave=False, support=_COUNTS),
    gl.StudentTLikelihood: LikelihoodForm(_student_log_prob, fisher=_student_fisher, log_concave=False),
    gl.BetaLikelihood: LikelihoodForm(_beta_log_prob, fisher=_beta_fisher, log_concave=False, support=_FRACTIONS),
    gl.GaussianLikelihood: _GAUSSIAN,
    gl.FixedNoiseGaussianLikelihood: _GAUSSIAN,
    gl.MultitaskGaussianLikelihood: replace(
        _GAUSSIAN, num_latents=lambda likelihood: likelihood.num_tasks, target_per_latent=True
    ),
}
REFUSALS |= {
    gl.LaplaceLikelihood: "the second derivative of its log density is zero almost everywhere. Use StudentTLikelihood, "
    "which is robust as well",
    gl.DirichletClassificationLikelihood: "it turns classification into Gaussian regression. Use it with an exact model, "
    "or use SoftmaxLikelihood",
}

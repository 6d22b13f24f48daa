"""Pointwise log densities and derivatives.

All are float64: float32 third derivatives of log Phi have the wrong sign.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood, _GaussianLikelihoodBase
from torch import Tensor
from torch.distributions import Distribution

from gpy_iterative.checks import check_finite
from gpy_iterative.errors import NonFiniteError, UnsupportedLikelihoodError, VarianceWarning, warn
from gpy_iterative.laplace.likelihoods.curvature import Curvature, SoftmaxCurvature, curvature_of_blocks
from gpy_iterative.laplace.likelihoods.stock import mixed_blocks, softmax_logits
from gpy_iterative.training.likelihood_forms import LikelihoodForm, check_support, form_of, refusal_of

#: Relative size of negative eigenvalues from rounding.
INDEFINITE = 1e-8


@dataclass(frozen=True)
class CurvatureFloor:
    """The least eigenvalue, relative to the largest but not above `most`, or a softmax's least class probability."""

    least: float
    most: float = math.inf


#: For Newton steps, where saturated points would dominate W^+; the mode does not change.
STEP_FLOOR = CurvatureFloor(1e-5)
#: For a covariance with W^+ and float64 or float32 kernel products.
COVARIANCE_FLOOR, COVARIANCE_FLOOR_FLOAT32 = CurvatureFloor(1e-10), CurvatureFloor(1e-6)
#: Without W^+.
NO_FLOOR = CurvatureFloor(0.0)


def check_laplace_likelihood(likelihood: Likelihood) -> None:
    name = type(likelihood).__name__
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"likelihood must be a gpytorch Likelihood, got {name}.")
    reason = refusal_of(likelihood)
    if reason is not None:
        raise UnsupportedLikelihoodError(f"Laplace's method does not work with {name}: {reason}.")
    if not isinstance(likelihood, _GaussianLikelihoodBase):
        return
    if getattr(likelihood, "rank", 0):
        raise UnsupportedLikelihoodError(
            f"{name} with rank > 0 has noise that is correlated over tasks, which its own forward leaves out. Use rank=0, "
            "or an exact model with HutchinsonMarginalLogLikelihood."
        )
    if form_of(likelihood) is None:
        raise UnsupportedLikelihoodError(
            f"{name} is Gaussian: its posterior is known exactly. Use a gpytorch.models.ExactGP with "
            "HutchinsonMarginalLogLikelihood."
        )


class PointwiseLikelihood:
    """log p(y_n | f_n) for fixed targets.

    Args:
        targets: [n], or multitask [n, C].
        num_latents: C.
        params: for the likelihood's `forward`.

    Raises:
        UnsupportedLikelihoodError: Laplace's method does not suit the likelihood.
        ValueError: unsuitable targets or number of latents.
    """

    def __init__(self, likelihood: Likelihood, targets: Tensor, num_latents: int, params: Sequence[Any] = ()) -> None:
        check_laplace_likelihood(likelihood)
        self.likelihood, self.num_latents, self.params = likelihood, num_latents, tuple(params)
        if form_of(likelihood) is not None:
            self._check_no_params()
        self._check_latents()
        self._check_targets(targets)
        with torch.inference_mode(False):  # autograd saves them
            kept = targets.clone() if targets.is_inference() else targets.detach()
            self.targets = kept.long() if self.is_categorical else kept.double()
        self._warned = False

    @property
    def _form(self) -> LikelihoodForm:
        unknown = {"num_latents": lambda _: None, "target_per_latent": None, "takes_samples": False}
        return form_of(self.likelihood) or LikelihoodForm(self._generic_log_prob, **unknown)

    @property
    def name(self) -> str:
        """The likelihood's class."""
        return type(self.likelihood).__name__

    @property
    def is_categorical(self) -> bool:
        """Whether this is a softmax."""
        return self._form.visible_basis is not None

    @property
    def visible_basis(self) -> Tensor:
        """Orthonormal basis [C, r] of what a softmax depends on."""
        assert self._form.visible_basis is not None
        return self._form.visible_basis(self.likelihood)

    @property
    def is_log_concave(self) -> bool:
        """Whether log p is known as concave."""
        return self._form.log_concave is True

    @property
    def has_parameters(self) -> bool:
        """Whether any parameter is learned."""
        return any(parameter.requires_grad for parameter in self.likelihood.parameters())

    def log_prob(self, f: Tensor) -> Tensor:
        """Log p(y_n | f_n) [n], differentiable in f [n, C] and parameters. Raises ValueError if points are coupled."""
        log_prob = self._form.log_prob(self.likelihood, f, self.targets)
        if log_prob.shape != f.shape[:-1]:
            raise ValueError(
                f"Laplace's method needs a likelihood that factorises over points, without batch shape; {self.name} gives "
                f"log densities of shape {tuple(log_prob.shape)} for {f.shape[-2]} points."
            )
        return log_prob

    def log_probs(self, samples: Tensor) -> Tensor:
        """`log_prob` [k, n] of samples [k, n, C]."""
        return self.log_prob(samples) if self._form.takes_samples else torch.stack([*map(self.log_prob, samples)])

    def total(self, f: Tensor) -> float:
        """The sum of log densities; NaN where the likelihood refuses f."""
        try:
            with torch.no_grad():
                return float(self.log_prob(f).sum())
        except ValueError:  # of torch for a parameter out of range, such as a rate that underflows
            return math.nan

    def gradient(self, f: Tensor) -> Tensor:
        """The gradient d log p / df [n, C]. Raises NonFiniteError."""
        gradient = self.slope(f)
        check_finite_at(f, f"The gradient of {self.name}'s log density", gradient)
        return gradient

    def slope(self, f: Tensor) -> Tensor:
        """As `gradient`, without the error."""
        with torch.inference_mode(False), torch.enable_grad():
            point = f.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(point).sum(), point)
        return gradient

    def hessian(self, f: Tensor) -> Tensor:
        """-d^2 log p / df^2 [n, C, C], differentiable in f and parameters."""
        if self._form.hessian is not None:
            return self._form.hessian(self.likelihood, f, self.targets)
        with torch.inference_mode(False), torch.enable_grad():
            point = f if f.requires_grad else f.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.log_prob(point).sum(), point, create_graph=True)
            sums = (gradient + 0 * point).sum(0)  # a constant gradient has a derivative, too
            rows = [torch.autograd.grad(total, point, create_graph=True)[0] for total in sums]
        return -torch.stack(rows, dim=-2)

    def fisher(self, f: Tensor) -> Tensor:
        """The registered Fisher information, like `hessian`."""
        assert self._form.fisher is not None
        return self._form.fisher(self.likelihood, f, self.targets)

    def curvature_blocks(self, f: Tensor) -> Tensor:
        """The covariance's curvature, like `hessian`.

        The negative Hessian if log p is concave, else registered Fisher information, else, for one latent function, the
        Hessian's absolute value. Raises UnsupportedLikelihoodError.
        """
        if self._form.log_concave is False:
            return self._definite_blocks(f)
        blocks = self.hessian(f)
        if self._form.log_concave is None and _is_indefinite(blocks.detach()):
            self._warn_of_substitute()
            return self._definite_blocks(f)
        return blocks

    def curvature(self, f: Tensor, floor: CurvatureFloor) -> Curvature:
        """`curvature_blocks` with a floor, without graph. Raises UnsupportedLikelihoodError and NonFiniteError."""
        return self._floored(f, floor, self.curvature_blocks)

    def step_curvature(self, f: Tensor, floor: CurvatureFloor = STEP_FLOOR) -> Curvature:
        """`curvature` for a Newton step: for one latent function the Hessian's absolute value."""
        # At outliers, Fisher information is far from the Hessian and takes more steps.
        is_covariance = self.is_log_concave or self.num_latents > 1
        blocks = self.curvature_blocks if is_covariance else lambda point: self.hessian(point).abs()
        return self._floored(f, floor, blocks)

    def weighted_curvature(self, f: Tensor, weights: Tensor) -> Tensor:
        """-1/2 sum_n <weights_n, W_n(f_n)> for fixed weights [n, C, C]."""
        return -0.5 * (weights * self.curvature_blocks(f)).sum()

    def _floored(self, f: Tensor, floor: CurvatureFloor, blocks_at: Callable[[Tensor], Tensor]) -> Curvature:
        with torch.inference_mode(False), torch.enable_grad():
            if self.is_categorical:
                return self._softmax_curvature(f.detach(), floor)
            blocks = blocks_at(f.detach().clone()).detach()
        check_finite_at(f, f"The curvature of {self.name}", blocks)
        if form_of(self.likelihood) is None and not blocks.any():  # a known density may underflow to zero far out
            raise UnsupportedLikelihoodError(
                f"Laplace's method does not work with {self.name}: the second derivative of its log density is zero at all "
                "data. For outliers use StudentTLikelihood."
            )
        if self.is_log_concave and _is_indefinite(blocks):
            raise UnsupportedLikelihoodError(
                f"{self.name} is registered as log-concave, but its log density is not concave at latent values up to "
                f"{float(f.abs().max()):.3g}: use register_curvature(..., log_concave=None), which checks each value."
            )
        return curvature_of_blocks(blocks, floor=floor.least, most=floor.most)

    def _generic_log_prob(self, likelihood: Likelihood, f: Tensor, targets: Tensor) -> Tensor:
        latents = f.squeeze(-1) if self.num_latents == 1 else f
        try:
            distribution = likelihood(latents, *self.params)
        except torch.OutOfMemoryError:  # a RuntimeError that no arguments mend
            raise
        except (IndexError, RuntimeError, TypeError) as error:
            shapes = ", ".join(str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in self.params)
            raise ValueError(
                f"{self.name}.forward fails at {len(f)} points with {len(self.params)} arguments ({shapes}): pass those of "
                f"these points, as in mll(prior, y, *params) or params=. {error}"
            ) from error
        if not isinstance(distribution, Distribution):
            raise TypeError(
                f"{self.name}.forward must return a torch.distributions.Distribution, got {type(distribution).__name__}."
            )
        return distribution.log_prob(targets)

    def _softmax_curvature(self, f: Tensor, floor: CurvatureFloor) -> Curvature:
        p = torch.softmax(softmax_logits(self.likelihood, f).detach(), -1).clamp_min(floor.least)
        p = p / p.sum(-1, keepdim=True)
        check_finite_at(f, "A class probability", p)
        if self.likelihood.mixing_weights is None:
            return SoftmaxCurvature(p)
        blocks = mixed_blocks(self.likelihood, SoftmaxCurvature(p).blocks()).detach()
        return curvature_of_blocks(blocks, floor=0.0, basis=self.visible_basis.to(f))

    def _definite_blocks(self, f: Tensor) -> Tensor:
        if self._form.fisher is not None:
            return self.fisher(f)
        if self.num_latents > 1:
            raise UnsupportedLikelihoodError(
                f"The log density of {self.name} is not concave, and no Fisher information is registered to replace its "
                "Hessian: call register_curvature(..., fisher=...)."
            )
        return self.hessian(f).abs()

    def _warn_of_substitute(self) -> None:
        if self._warned:
            return
        self._warned = True
        words = "Hessian's absolute value" if self._form.fisher is None else "Fisher information"
        warn(
            f"The log density of {self.name} is not concave: the covariance takes its {words}. To accept this, call "
            "register_curvature(..., log_concave=False).",
            VarianceWarning,
        )

    def _check_no_params(self) -> None:
        if any(isinstance(each, Tensor) for each in self.params):
            raise ValueError(
                f"{self.name} takes no arguments, and would ignore those that were passed: make them part of the mean (the "
                "logarithm of an exposure), or write a likelihood whose forward takes them."
            )

    def _check_latents(self) -> None:
        expected = self._form.num_latents(self.likelihood)
        if expected is not None and expected != self.num_latents:
            raise ValueError(
                f"{self.name} needs {expected} latent function{'s' * (expected > 1)}, the model has {self.num_latents}: "
                + (
                    "give the prior that many (a batch of kernels and means, or a MultitaskMultivariateNormal)."
                    if expected > 1
                    else "for several outputs write a likelihood whose forward returns an Independent distribution."
                )
            )

    def _check_targets(self, targets: Tensor) -> None:
        if not isinstance(targets, Tensor):
            raise TypeError(f"The targets must be a tensor, got {type(targets).__name__}: use torch.as_tensor(...).")
        shape, latents, needed = tuple(targets.shape), self.num_latents, self._form.target_per_latent
        if needed is True and (len(shape) != 2 or shape[1] != latents):
            raise ValueError(
                f"{self.name} needs targets [n, {latents}], a value for each latent function; got {shape}."
            )
        if (needed is False or (needed is None and latents == 1)) and len(shape) != 1:
            hint = " Use targets.squeeze(-1)." if shape[-1:] == (1,) else ""
            raise ValueError(f"{self.name} needs targets [n], one for each point; got {shape}.{hint}")
        if not self.is_categorical:
            check_finite("targets", targets)
        elif targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"{self.name} needs labels of an integer dtype, got {targets.dtype}: call targets.long().")
        check_support(self.likelihood, targets)


def check_finite_at(f: Tensor, name: str, values: Tensor) -> None:
    """Raises NonFiniteError for values [n, *] at latent values f [n, C]."""
    finite = torch.isfinite(values)
    if not finite.all():
        index = int((~finite).nonzero()[0, 0])
        latent = ", ".join(f"{value:.3g}" for value in f[index].tolist())
        raise NonFiniteError(
            f"{name} is not finite at datum {index} (latent value {latent}): check targets, the prior's mean and "
            "outputscale."
        )


def _is_indefinite(blocks: Tensor) -> bool:
    values = blocks[:, 0, 0] if blocks.shape[-1] == 1 else torch.linalg.eigvalsh(blocks)
    return bool(values.numel()) and float(values.min()) < -INDEFINITE * float(values.abs().max())

from collections.abc import Mapping, Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import SumLinearOperator
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gpy_iterative.checks import check_finite, check_same_kind
from gpy_iterative.errors import VarianceWarning, warn
from gpy_iterative.exact.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.linear_operators.kernel_functions import leaves_of
from gpy_iterative.linear_operators.prior_parts import prior_parts
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.training.training_system import (
    TrainingSystem,
    check_gaussian,
    check_hyperparameters,
    check_inputs,
    linear_system,
    prior_at,
)


def check_likelihood(likelihood: gpytorch.likelihoods.Likelihood, model: torch.nn.Module, mll: str) -> None:
    if isinstance(likelihood, gpytorch.models.GP) and isinstance(model, gpytorch.likelihoods.Likelihood):
        raise TypeError(f"The likelihood comes first: {mll}(likelihood, model).")
    check_gaussian(likelihood, mll)
    if not isinstance(model, gpytorch.models.ExactGP):
        is_compiled = hasattr(model, "_orig_mod")  # torch.compile's wrapper
        advice = " Compile only the network inside of it." if is_compiled else ""
        raise TypeError(f"{mll} needs a gpytorch.models.ExactGP, got {type(model).__name__}.{advice}")
    for name, owner, _, closure, _ in likelihood.named_priors():
        if callable(closure(owner)):  # GPyTorch's own marginal likelihood fails, too
            advice = ": register it with a function that returns one, such as lambda own: own.noise."
            if name == "MultitaskErrorCovariancePrior":
                advice = (
                    ", as GPyTorch's does with task_prior=. Leave it out, and call "
                    'likelihood.register_prior("task_prior", prior, lambda own: own._eval_covar_matrix()).'
                )
            raise ValueError(f"{type(likelihood).__name__} gives its prior {name} no tensor{advice}")


def check_fit(model: gpytorch.models.ExactGP, function_dist: MultivariateNormal, target: Tensor) -> None:
    if not isinstance(function_dist, MultivariateNormal):
        raise RuntimeError(
            "An exact marginal log likelihood takes the MultivariateNormal that model(train_x) returns, got "
            f"{type(function_dist).__name__}: call mll(model(train_x), train_y)."
        )
    if not isinstance(target, torch.Tensor):
        raise ValueError(
            f"The targets must be a tensor, got {type(target).__name__}: convert them with torch.as_tensor(...)."
        )
    # In evaluation mode `model(train_x)` is the posterior at the training data.
    is_ours = isinstance(function_dist.lazy_covariance_matrix, PosteriorCovarianceLinearOperator)
    if is_ours or not model.training:
        known = model.train_targets
        is_at_training_data = known is not None and torch.equal(target, known)
        # GPyTorch's posterior has no mark, but a prior has the prior's mean.
        if is_at_training_data and (
            is_ours or not torch.equal(function_dist.mean, prior_at(model, list(model.train_inputs)).mean)
        ):
            raise RuntimeError(
                "This is the model's posterior at its training data, not its prior: the model is in evaluation mode, into "
                "which mll.posterior() puts it. Call model.train() and likelihood.train() before the next training step."
            )
    if isinstance(function_dist.lazy_covariance_matrix, SumLinearOperator):
        noise = prior_parts(function_dist.lazy_covariance_matrix).diagonal  # or jitter of the model's forward
        if noise is not None and _is_of(model.likelihood, noise):
            raise RuntimeError(
                "The noise would count twice: call mll(model(train_x), train_y), without likelihood(...)."
            )
    event_shape, mean = function_dist.event_shape, function_dist.mean
    if target.shape[-len(event_shape) :] != event_shape:
        raise ValueError(
            f"The model's output has shape {tuple(mean.shape)}, and the target {tuple(target.shape)}: "
            + ("use target.squeeze(-1)." if target.shape[-1:] == (1,) else "pass one target for each training input.")
        )
    if target.shape != mean.shape:
        try:
            torch.broadcast_shapes(target.shape, mean.shape)
        except RuntimeError as error:
            raise ValueError(
                f"The target's shape {tuple(target.shape)} does not fit the model's output {tuple(mean.shape)}: their "
                "batch dimensions must broadcast."
            ) from error
    advice = f"Use target.to('{mean.device}', {mean.dtype}), or convert model and inputs."
    kinds = {(x.dtype, x.device) for x in model.train_inputs or ()}
    if target.is_floating_point() and kinds == {(target.dtype, target.device)}:
        advice = f"The inputs are like the target: use model.to('{target.device}', {target.dtype})."
    check_same_kind("The model's output", mean, "the target", target, advice)


def _is_of(likelihood: Likelihood, noise: Tensor) -> bool:
    """Whether this is the likelihood's fixed noise, or depends on its parameters."""
    known = {id(parameter) for parameter in likelihood.parameters()}
    is_fixed = noise is getattr(getattr(likelihood, "noise_covar", None), "noise", None)
    return is_fixed or any(id(leaf) in known for leaf in leaves_of(noise))


def check_layers(model: torch.nn.Module, *, batches: bool) -> None:
    for name, module in model.named_modules():
        is_random = isinstance(module, torch.nn.RReLU) or (isinstance(module, _DropoutNd) and module.p > 0)
        is_of_batch = batches and isinstance(module, _BatchNorm)
        if is_of_batch and module.running_mean is None:
            state, remedy = "with track_running_stats=False", "Take LayerNorm."
        elif module.training and (is_random or is_of_batch):
            state = "in training mode"
            remedy = f"Call model.get_submodule({name!r}).eval() after every model.train(), or take LayerNorm."
        else:
            continue
        raise ValueError(
            f"The layer {name}, a {type(module).__name__} {state}, gives a row other features in another batch or call, "
            f"which a marginal likelihood does not allow. {remedy}"
        )


def checked_system(
    likelihood: Likelihood,
    model: ExactGP,
    function_dist: MultivariateNormal,
    target: Tensor,
    params: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    products: KernelProducts,
    cache: TileCache | None = None,
) -> TrainingSystem:
    """`linear_system` of a training step. Raises as `GaussianMarginalLogLikelihood.forward`, before any work."""
    check_fit(model, function_dist, target)
    check_layers(model, batches=False)
    check_inputs(model)
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy == "fill":
        raise ValueError(
            "observation_nan_policy('fill') has no meaning for a marginal likelihood; use 'mask', which drops the rows."
        )
    is_missing = torch.isnan(target)
    if policy == "ignore" and is_missing.any():
        raise ValueError(
            f"target must be finite, but target{is_missing.nonzero()[0].tolist()} is nan. If it is a missing observation, "
            "train and predict under gpytorch.settings.observation_nan_policy('mask'), which drops it."
        )
    check_finite("target", torch.where(is_missing, 0, target))
    check_hyperparameters(model.named_parameters())
    return linear_system(likelihood, function_dist, target, params, kwargs, products=products, cache=cache)


#: Largest angle of a step straight back, in sqrt(eps).
ANGLE = 5.0
SIGHTINGS = 2

ADVICE = (
    "The hyperparameters move as in a line search (L-BFGS), but value and gradient are separate random estimates, or every "
    "call takes another batch, so the search may stop anywhere and still report success. Use gpi.fit(mll), Adam (in "
    "BoTorch fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_torch, ...)), or for small data "
    "HutchinsonMarginalLogLikelihood(..., solver=Cholesky()), which is exact."
)


class LineSearchWatch:
    """Warns once of a line search: it steps back on the same line; Adam, momentum and gradient descent do not."""

    def __init__(self) -> None:
        self._points: list[Tensor] = []  # the last three
        self._sightings = 0

    @torch.no_grad()
    def see(self, model: ExactGP) -> None:
        """Call it at every step."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters or self._sightings >= SIGHTINGS:
            return
        point = torch.cat([parameter.reshape(-1).double() for parameter in parameters])
        known = [before.to(point.device) for before in self._points[-2:] if before.shape == point.shape]
        self._points = [*known, point]
        if len(self._points) == 3:
            first, second = self._points[1] - self._points[0], self._points[2] - self._points[1]
            has_lines = int(((first != 0) | (second != 0)).sum()) > 1  # one always moves on a line
            gap = (first / first.norm() + second / second.norm()).norm()  # NaN is no sighting
            self._sightings += has_lines and bool(gap < ANGLE * torch.finfo(parameters[0].dtype).eps ** 0.5)
        if self._sightings >= SIGHTINGS:
            self._points = []
            warn(ADVICE, VarianceWarning)

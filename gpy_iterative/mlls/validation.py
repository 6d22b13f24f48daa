"""What a Gaussian marginal log likelihood refuses, before any work and with the reason."""

from collections.abc import Callable

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import _GaussianLikelihoodBase
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gpy_iterative.checks import check_finite
from gpy_iterative.errors import NonFiniteError, UnsupportedLikelihoodError
from gpy_iterative.prediction import PosteriorCovarianceLinearOperator, check_inputs, prior_at

#: Rows that are evaluated by themselves, and beside others.
FEW_ROWS, MANY_ROWS = 2, 16
#: Parts of the largest entry that rounding may change, in half precision too; batches and chance change more.
SAME_ROWS = 0.01


def check_likelihood(likelihood: gpytorch.likelihoods.Likelihood, model: torch.nn.Module, mll: str) -> None:
    """Raises UnsupportedLikelihoodError for a non-Gaussian likelihood and TypeError for a model that is no ExactGP, also
    where the two are swapped.
    """
    if isinstance(likelihood, gpytorch.models.GP) and isinstance(model, gpytorch.likelihoods.Likelihood):
        raise TypeError(f"The likelihood comes first: {mll}(likelihood, model).")
    if not isinstance(likelihood, _GaussianLikelihoodBase):
        raise UnsupportedLikelihoodError(
            f"{mll} needs a Gaussian likelihood, got {type(likelihood).__name__}. Its marginal likelihood has no "
            "closed form: use gpy_iterative.models.IterativeLaplaceGP with LaplaceMarginalLogLikelihood."
        )
    if not isinstance(model, gpytorch.models.ExactGP):
        raise TypeError(f"{mll} needs a gpytorch.models.ExactGP, got {type(model).__name__}.")


def check_hyperparameters(model: torch.nn.Module) -> None:
    """Raises NonFiniteError, which BoTorch's line search steps over, with the parameter's name."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(
                f"The parameter {name} is not finite. A smaller learning rate, or a bound on the parameter, "
                "keeps the optimiser from leaving the domain."
            )


def check_prior(model: gpytorch.models.ExactGP, function_dist: MultivariateNormal, target: Tensor) -> None:
    """Raises RuntimeError for the posterior at the training data, which evaluation mode gives in place of the prior."""
    is_ours = isinstance(function_dist.lazy_covariance_matrix, PosteriorCovarianceLinearOperator)
    if model.training and not is_ours:
        return
    if model.train_targets is None or not torch.equal(target, model.train_targets):
        return
    # GPyTorch's own has no mark; a prior, of `model.forward` or under `settings.prior_mode`, has the prior's mean.
    if is_ours or not torch.equal(function_dist.mean, prior_at(model, list(model.train_inputs)).mean):
        raise RuntimeError(
            "This is the model's posterior at its training data, not its prior: the model is in evaluation mode, into "
            "which mll.posterior() puts it, too. Call model.train() and likelihood.train() before training goes on."
        )


def check_fit(model: gpytorch.models.ExactGP, function_dist: MultivariateNormal, target: Tensor) -> None:
    """Shapes, dtypes and devices of what `mll(model(train_x), train_y)` was called with; looks at no data."""
    if not isinstance(function_dist, MultivariateNormal):
        raise RuntimeError(
            "An exact marginal log likelihood works on the prior that an ExactGP returns, a MultivariateNormal; "
            f"got {type(function_dist).__name__}."
        )
    if not isinstance(target, torch.Tensor):
        raise ValueError(f"The targets must be a tensor [*b, n], got {type(target).__name__}.")
    check_prior(model, function_dist, target)
    event_shape, mean = function_dist.event_shape, function_dist.mean
    if target.shape[-len(event_shape) :] != event_shape:
        raise ValueError(
            f"The target's last dimensions must be {tuple(event_shape)}, as the model's output; its shape is "
            f"{tuple(target.shape)}." + (" Use target.squeeze(-1)." if target.shape[-1:] == (1,) else "")
        )
    if target.shape != mean.shape:
        try:
            torch.broadcast_shapes(target.shape, mean.shape)
        except RuntimeError as error:
            raise ValueError(
                f"The target's shape {tuple(target.shape)} does not fit the model's output {tuple(mean.shape)}."
            ) from error
    for what in ("dtype", "device"):
        ours, theirs = getattr(mean, what), getattr(target, what)
        if ours != theirs:
            raise ValueError(f"The model's output has {what} {ours}, the target {theirs}.")


def check_data(model: gpytorch.models.ExactGP, function_dist: MultivariateNormal, target: Tensor) -> None:
    """Shapes, dtypes, devices and finiteness of what `mll(model(train_x), train_y)` was called with.

    NaN targets pass here under GPyTorch's `observation_nan_policy("mask")`; they are dropped later.
    """
    check_fit(model, function_dist, target)
    check_inputs(model)
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy == "fill":
        raise ValueError(
            "observation_nan_policy('fill') has no meaning for a marginal likelihood; use 'mask', which drops the rows."
        )
    if policy == "ignore" and torch.isnan(target).any():
        index = tuple(torch.isnan(target).nonzero()[0].tolist())
        raise ValueError(
            f"target must be finite, but target{list(index)} is nan. If it is a missing observation, train and predict "
            "under gpytorch.settings.observation_nan_policy('mask'), which drops it."
        )
    if policy == "ignore":
        check_finite("target", target)
    elif torch.isinf(target).any():
        check_finite("target", target.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))


def check_not_empty(num_observed: int) -> None:
    """Raises ValueError where there are no data, or all of them are missing."""
    if not num_observed:
        raise ValueError("There is no observed target: a marginal likelihood needs at least one.")


def check_features(model: gpytorch.models.ExactGP) -> None:
    """Raises ValueError where a layer is known to give a row other features beside other rows, or by chance."""
    for name, module in model.named_modules():
        is_dropout = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (is_dropout or isinstance(module, _BatchNorm | torch.nn.RReLU)):
            raise ValueError(
                f"The layer {name}, a {type(module).__name__} in training mode, gives a row other features in another "
                "batch: then there is no one marginal likelihood. Put it into evaluation mode "
                f"(model.get_submodule({name!r}).eval(), after every model.train()), or take LayerNorm."
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"The layer {name}, a {type(module).__name__} with track_running_stats=False, gives a row other features "
                "in another batch, in evaluation mode too: then there is no one marginal likelihood. Take LayerNorm."
            )


@torch.inference_mode(False)
@torch.no_grad()
def check_rows(model: gpytorch.models.ExactGP, moments: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Raises ValueError where the prior at a row depends on the rows beside it, or on chance: by trying.

    Args:
        model: whose buffers stay as they are, as does torch's generator.
        moments: mean [k] and covariance [k, k] at the first k data.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    found = []
    with torch.random.fork_rng(list(devices)):
        for count in (FEW_ROWS, MANY_ROWS, MANY_ROWS):
            try:
                found.append(moments(count))
            finally:
                for buffer, values in before:  # running statistics, vectors of a power iteration
                    if not torch.equal(buffer, values):
                        buffer.copy_(values)
    (mean, covariance), *others = found
    size = len(mean)
    for other_mean, other_covariance in others:
        for ours, theirs in ((mean, other_mean[:size]), (covariance, other_covariance[:size, :size])):
            if (ours - theirs).abs().max() > SAME_ROWS * ours.abs().max():
                raise ValueError(
                    f"The model gives the first {size} data another mean or covariance beside other rows, or when they are "
                    "evaluated again: a layer depends on the batch, or on chance. Then there is no one marginal "
                    "likelihood. Put such layers into evaluation mode after every model.train(), or take others (LayerNorm "
                    "in place of batch normalisation)."
                )

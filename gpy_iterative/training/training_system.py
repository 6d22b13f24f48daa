"""The linear system of the training data, H = K + D and y - mean, in evaluation mode and cut off from autograd."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_finite
from gpy_iterative.linear_operators.from_gpytorch import flat_targets, noisy_operator, observed_data
from gpy_iterative.linear_operators.prior_parts import KernelTerm, kernel_terms
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.training.shared_columns import unexpanded


@dataclass(frozen=True)
class TrainingSystem:
    """What the training solves are about.

    Attributes:
        prior: the model's prior at all training inputs.
        operator: H of the observed data [*k, m, m]; k is b, or its last dimensions where several targets share a matrix.
        residual: y - mean of the observed data [*b, m].
        observed: [n], which data are observed; None is all (n counts tasks).
    """

    prior: MultivariateNormal
    operator: LinearOperator
    residual: Tensor
    observed: Tensor | None

    @property
    def batch_shape(self) -> torch.Size:
        """*b."""
        return self.residual.shape[:-1]

    @property
    def num_train(self) -> int:
        """n, observed or not."""
        return self.prior.event_shape.numel()

    def terms(self) -> list[KernelTerm]:
        """The prior's kernels at the observed inputs. Raises SpectralDensityMissingError where it is no sum of kernels."""
        return kernel_terms(self.prior.lazy_covariance_matrix, self.observed)


def check_inputs(model: ExactGP) -> None:
    """Raises ValueError with the first training input that is not finite."""
    for i, inputs in enumerate(model.train_inputs or ()):
        if inputs.is_floating_point():
            check_finite("train_inputs" if len(model.train_inputs) == 1 else f"train_inputs[{i}]", inputs)


@torch.no_grad()
def training_system(
    model: ExactGP,
    likelihood: Likelihood,
    params: Sequence[Any],
    products: KernelProducts,
    kwargs: Mapping[str, Any] | None = None,
) -> TrainingSystem:
    """The system of a model and a likelihood that nothing changes, see `ModelSnapshot`.

    Raises:
        ValueError: a model without training data, inputs that are not finite, targets of another shape than the prior,
            infinite ones, NaN targets unless GPyTorch's `observation_nan_policy` is "mask", noise that is not positive.
    """
    if model.train_inputs is None or model.train_targets is None:
        raise ValueError("A posterior needs training data: call model.set_train_data(inputs, targets) first.")
    check_inputs(model)
    prior = prior_at(model, unexpanded(model.train_inputs))
    target = flat_targets(prior, model.train_targets)
    if target.shape[-1:] != prior.loc.shape[-1:]:
        raise ValueError(
            f"The training targets {tuple(model.train_targets.shape)} do not fit the model's output "
            f"{tuple(prior.mean.shape)}."
        )
    residual = target - prior.loc
    observed = observed_data(prior, model.train_targets)
    if observed is None and torch.isnan(target).any():
        raise ValueError(
            "The training targets contain NaN. Under gpytorch.settings.observation_nan_policy('mask') these data are "
            "dropped; otherwise they have no meaning here."
        )
    check_finite("train_targets", torch.where(torch.isnan(model.train_targets), 0, model.train_targets))
    operator = noisy_operator(likelihood, prior, *params, products=products, observed=observed, **(kwargs or {}))
    if observed is not None:
        residual = residual[..., observed]
    batch = torch.broadcast_shapes(operator.batch_shape, residual.shape[:-1])
    is_shared = batch[len(batch) - len(operator.batch_shape) :] == operator.batch_shape
    if not is_shared:
        operator = operator.expand(*batch, *operator.matrix_shape)
    return TrainingSystem(prior, operator.detach(), residual.expand(*batch, residual.shape[-1]), observed)


def prior_at(model: ExactGP, inputs: list[Tensor]) -> MultivariateNormal:
    """The model's prior at any inputs, past the conditioning that `model(x)` does in evaluation mode.

    Raises:
        TypeError: the model's `forward` returns no MultivariateNormal.
        ValueError: a multitask prior that lists all data of the first task first.
    """
    prior = gpytorch.Module.__call__(model, *inputs)
    if not isinstance(prior, MultivariateNormal):
        raise TypeError(f"The model's forward must return a MultivariateNormal, got {type(prior).__name__}.")
    if isinstance(prior, MultitaskMultivariateNormal) and not prior._interleaved:
        raise ValueError(
            "GPyTorch conditions multitask priors in interleaved order only; build the prior with interleaved=True."
        )
    return prior

"""The linear system of the training data, H = K + D and y - mean."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood, _GaussianLikelihoodBase
from gpytorch.models import GP, AbstractModelList, ApproximateGP, ExactGP
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator, RootLinearOperator, ToeplitzLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_finite
from gpy_iterative.errors import ApproximationWarning, NonFiniteError, UnsupportedLikelihoodError, warn
from gpy_iterative.linear_operators.extensions import all_parts, far_field_error, in_float64, sum_terms, with_products
from gpy_iterative.linear_operators.far_field.far_field import automatic_tolerance
from gpy_iterative.linear_operators.from_gpytorch import flat_targets, noisy_operator, observed_data
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.kernel_functions import GPYTORCH_SETTINGS
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import KernelTerm, kernel_terms
from gpy_iterative.linear_operators.products import FAR_FIELD_ROWS, KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.preconditioners.task_noise import of_independent_noise
from gpy_iterative.spectral.finite import has_feature_map

#: Nats that rounding in float32 may move the value of a training step.
ROUNDING_IN_TRAINING = 0.5
#: Rounding errors of sums over all data, over n^1/2 and those of tiles: of a far field, times what `rounding` lacks to one,
#: and of a low rank. Measured for 8,000 to 50,000 rows; on a line the first may be twice as large.
FAR_FIELD_CANCELLATION, LOW_RANK_CANCELLATION = 0.5, 0.125
#: Rows up to which float64 replaces float32 if rounding requires it.
MOST_ROWS_IN_FLOAT64 = 100_000
#: Rows up to which tiles replace an automatic far field that is too crude.
MOST_ROWS_IN_TILES = 20_000


@dataclass(frozen=True)
class TrainingSystem:
    """The system of the m observed of n training data; n counts tasks."""

    prior: MultivariateNormal  # at all training inputs
    operator: LinearOperator  # H [*k, m, m]; k is b, or its last dimensions if targets share a matrix
    residual: Tensor  # y - mean [*b, m]
    observed: Tensor | None  # [n]; None is all

    @property
    def batch_shape(self) -> torch.Size:
        return self.residual.shape[:-1]

    def suited(self, most_rounding: float, *, in_float64: bool = False) -> "TrainingSystem":
        """The system in the precision and with the products that its noise needs, as far as n allows.

        In float64 if `in_float64`, or if rounding moves the value by more than `most_rounding` nats; with tiles if errors
        of an automatic far field would exceed the noise. Warns as `_in_float64`.
        """
        system = self._in_float64() if in_float64 or self._is_rounded(most_rounding) else self
        operator, size = system.operator, system.operator.shape[-1]
        if size > MOST_ROWS_IN_TILES or not isinstance(operator, NoisyLinearOperator):
            return system
        if size < FAR_FIELD_ROWS.on(operator.device):
            return system
        # Entries have independent errors, so those of a product grow with the root of n.
        errors = automatic_tolerance(size, operator.dtype) * size**0.5 * operator.signal_to_noise()
        if not bool((errors > 1).any()):
            return system
        in_tiles = lambda each: replace(each, far_field=None) if each.far_field == "auto" else each
        return replace(system, operator=with_products(operator, in_tiles))

    def _is_rounded(self, limit: float) -> bool:
        """Whether rounding moves the value by more than `limit` nats, and n is small enough for float64."""
        if self.operator.dtype == torch.float64 or self.operator.shape[-1] > MOST_ROWS_IN_FLOAT64:
            return False
        return bool((self.rounding() > limit).any())

    def rounding(self) -> Tensor:
        """Error of -2 log N(y; 0, H) from rounding K, [*b]; zero where noise has an unknown form.

        A relative error eps of K's entries changes eigenvalues as small as the noise by eps K_ii / noise. Tiles of entries
        near one have smaller errors. Sums over all n data that nearly cancel have larger ones, which grow with n^1/2.
        """
        operator, size = self.operator, self.operator.shape[-1]
        noisy = operator if isinstance(operator, NoisyLinearOperator) else of_independent_noise(operator)
        if noisy is None:
            return self.residual.new_zeros((), dtype=torch.float64)
        eps = torch.finfo(operator.dtype).eps
        part = noisy.kernel.tiles().rounding if isinstance(noisy.kernel, TiledLinearOperator) else 1.0
        if part < 1:
            if far_field_error(noisy.kernel) is not None:  # whose blocks have no centre
                part = 1 + FAR_FIELD_CANCELLATION * (1 - part) * size**0.5
            eps *= part
        elif all(_has_low_rank(term) for term, _ in sum_terms(noisy.kernel)):
            eps *= 1 + LOW_RANK_CANCELLATION * size**0.5
        return eps * size * noisy.signal_to_noise()

    def _in_float64(self) -> "TrainingSystem":
        """Warns where rounding remains in matrices that GPyTorch has evaluated in float32."""
        if self.operator.dtype == torch.float64:
            return self
        if has_evaluated_matrix(self.operator, self.operator.shape[-1]) and self._is_rounded(ROUNDING_IN_TRAINING):
            warn(
                "GPyTorch evaluates this model's kernel matrix in float32, and the noise is not large beside its rounding: "
                "likelihoods and predictions may be wrong. Use float64 (model.double(), and the data), or for a product "
                "k1(x).mul(k2(x)) in forward the product kernel k1 * k2.",
                ApproximationWarning,
            )
        return replace(self, operator=in_float64(self.operator), residual=self.residual.double())

    def terms(self) -> list[KernelTerm]:
        """Raises SpectralDensityMissingError if the prior is no sum of kernels."""
        return kernel_terms(self.prior.lazy_covariance_matrix, self.observed)


def has_evaluated_matrix(operator: LinearOperator, num_rows: int) -> bool:
    """Whether a matrix of all pairs of data, or of a grid, was evaluated before this package could choose a precision."""
    is_whole = lambda part: isinstance(part, DenseLinearOperator) and min(part.matrix_shape) >= num_rows
    return any(isinstance(part, ToeplitzLinearOperator) or is_whole(part) for part in all_parts(operator))


def _has_low_rank(term: LinearOperator | Tensor) -> bool:
    is_finite = isinstance(term, GenericKernelLinearOperator) and has_feature_map(term.kernel)
    return is_finite or isinstance(term, RootLinearOperator)


def check_has_data(model: ExactGP) -> None:
    if not model.train_inputs or model.train_targets is None:
        raise ValueError(
            "The model has no training data: call model.set_train_data(inputs, targets, strict=False) first."
        )


def check_order(model: Any, likelihood: Any) -> None:
    """Marginal log likelihoods take them the other way round."""
    is_one = isinstance(model, GP) and not isinstance(model, ApproximateGP | AbstractModelList)
    if not is_one or not isinstance(likelihood, Likelihood):
        raise TypeError(
            "A posterior takes a model, then its likelihood, got "
            f"{type(model).__name__}, then {type(likelihood).__name__}. The model must be one with its own training data, "
            "such as an ExactGP."
        )


def check_gaussian(likelihood: Likelihood, name: str) -> None:
    """`name` needs a Gaussian likelihood."""
    if not isinstance(likelihood, _GaussianLikelihoodBase):
        raise UnsupportedLikelihoodError(
            f"{name} needs a Gaussian likelihood, got {type(likelihood).__name__}. Its marginal likelihood has no "
            "closed form: use gpy_iterative.models.IterativeLaplaceGP with LaplaceMarginalLogLikelihood."
        )


def to_training_mode(*modules: torch.nn.Module) -> None:
    for module in modules:
        if not module.training:  # else the user may hold layers in evaluation mode
            module.train()


def check_inputs(model: ExactGP) -> None:
    for i, inputs in enumerate(model.train_inputs or ()):
        if inputs.is_floating_point():
            check_finite("train_inputs" if len(model.train_inputs) == 1 else f"train_inputs[{i}]", inputs)


def check_hyperparameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError, or NonFiniteError, which BoTorch's line search tolerates."""
    for name, parameter in named:
        if parameter.is_inference() and torch.is_grad_enabled():
            raise ValueError(
                f"The parameter {name} was made under torch.inference_mode, so it can have no gradient: make model and "
                "likelihood outside of it."
            )
        if not torch.isfinite(parameter).all():
            advice = "Use a smaller learning rate, or a constraint on it."
            if parameter.isinf().any():  # as by `likelihood.noise = 1e-4`, GPyTorch's bound
                advice = (
                    "It is infinite where a value was set to a bound of its constraint: set a value inside the bounds, or "
                    "move the bound. Otherwise use a smaller learning rate."
                )
            raise NonFiniteError(f"The parameter {name} is not finite. {advice}")


def num_training_data(model: ExactGP) -> int:
    """Rows of H, observed or not; n tasks count as one."""
    assert model.train_inputs is not None
    assert model.train_targets is not None
    targets, rows = model.train_targets.shape, model.train_inputs[0].shape[-2]
    return targets[-1] if len(targets) == 1 or targets[-1] == rows else rows * targets[-1]


@torch.no_grad()
def training_system(
    model: ExactGP,
    likelihood: Likelihood,
    params: Sequence[Any],
    products: KernelProducts,
    kwargs: Mapping[str, Any] | None = None,
) -> TrainingSystem:
    """The detached system of a `ModelSnapshot`'s copies.

    Raises ValueError for missing, mismatched or non-finite training data (NaN targets may be missing data), or noise that
    is not positive.
    """
    check_has_data(model)
    check_inputs(model)
    prior = prior_at(model, unexpanded(model.train_inputs))
    target = flat_targets(prior, model.train_targets)
    if target.shape[-1:] != prior.loc.shape[-1:]:
        raise ValueError(
            f"The training targets {tuple(model.train_targets.shape)} do not fit the model's output "
            f"{tuple(prior.mean.shape)}: give one target for each training input."
        )
    if observed_data(prior, model.train_targets) is None and torch.isnan(target).any():
        raise ValueError(
            "The training targets contain NaN. If these are missing observations, predict under "
            "gpytorch.settings.observation_nan_policy('mask'), which drops them."
        )
    check_finite("train_targets", torch.where(torch.isnan(model.train_targets), 0, model.train_targets))
    system = linear_system(
        likelihood, prior, model.train_targets, params, kwargs or {}, products=products, shares_matrix=True
    )
    return replace(system, operator=system.operator.detach())


def linear_system(
    likelihood: Likelihood,
    prior: MultivariateNormal,
    target: Tensor,
    params: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    products: KernelProducts,
    cache: TileCache | None = None,
    shares_matrix: bool = False,
) -> TrainingSystem:
    """The system with graph, for targets [*b, n] or [*b, n, T].

    With `shares_matrix`, H has no leading dimensions in which only targets differ. ValueError if no target is observed.
    """
    observed = observed_data(prior, target)
    if not (prior.event_shape.numel() if observed is None else observed.any()):
        raise ValueError("There is no observed target: pass data with at least one target that is not NaN.")
    operator = noisy_operator(likelihood, prior, *params, products=products, cache=cache, observed=observed, **kwargs)
    residual = flat_targets(prior, target) - prior.loc
    if observed is not None:
        residual = residual[..., observed]
    own = operator.batch_shape
    batch = torch.broadcast_shapes(own, residual.shape[:-1])
    is_shared = shares_matrix and batch[len(batch) - len(own) :] == own
    if batch != own and not is_shared:
        operator = operator.expand(*batch, *operator.matrix_shape)
    return TrainingSystem(prior, operator, residual.expand(*batch, residual.shape[-1]), observed)


def prior_at(model: ExactGP, inputs: list[Tensor]) -> MultivariateNormal:
    """The prior, without the conditioning of evaluation mode. Raises TypeError for other outputs."""
    with GPYTORCH_SETTINGS:  # another thread's settings would make GPyTorch evaluate the kernel
        prior = gpytorch.Module.__call__(model, *inputs)
    if not isinstance(prior, MultivariateNormal):
        raise TypeError(f"The model's forward must return a MultivariateNormal, got {type(prior).__name__}.")
    return prior


def unexpanded(inputs: Iterable[Tensor]) -> list[Tensor]:
    """Removes leading dimensions in which all inputs are expanded."""
    inputs = list(inputs)
    while inputs and all(x.dim() > 2 and len(x) and x.stride(0) == 0 for x in inputs):
        inputs = [x[0] for x in inputs]
    return inputs

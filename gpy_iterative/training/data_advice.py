"""Warnings about unsuitable training data and kernels."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel, RFFKernel
from gpytorch.models import ExactGP
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import SumLinearOperator
from torch import Tensor

from gpy_iterative.errors import DataWarning, warn
from gpy_iterative.linear_operators.extensions import dense_rows, sum_terms
from gpy_iterative.linear_operators.from_gpytorch import kernel_operator, operator_of_kernel
from gpy_iterative.linear_operators.module_copies import ModuleCopies
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import kernel_terms
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.training.snapshot import evaluation_copies
from gpy_iterative.training.training_system import TrainingSystem, prior_at

#: Correlation of nearest inputs that makes the kernel matrix diagonal: fits of 600 rows with 30 inputs fail below it.
UNCORRELATED = 1e-5
#: Standard deviation, in lengthscales, of an input that is constant to the kernel.
FLAT = 1e-3
#: Least standard deviation of well-scaled inputs.
SMALL = 0.01
#: Rows whose nearest neighbours are computed.
CENTRES = 64
#: Rows on which terms of a sum are compared, and of which mini-batch methods compute the prior variance.
EQUAL_ROWS, SOME_ROWS = 5, 1000
#: Largest ratio of the standard deviations of targets and prior, and distance of their means in the larger one.
SPREAD, SHIFT = 20.0, 10.0
#: Likelihoods whose targets are latent values with noise.
OF_LOCATION = (
    gpytorch.likelihoods.GaussianLikelihood,
    gpytorch.likelihoods.FixedNoiseGaussianLikelihood,
    gpytorch.likelihoods.StudentTLikelihood,
)
#: Share of copied rows that rounded data may have.
COPIES = 0.05
#: Largest difference of targets of equal inputs, in noise standard deviations.
UNEXPLAINED = 6.0
#: Noise within this factor of its lower bound is at it.
AT_FLOOR = 1.01
EQUAL_TARGETS = "All targets are equal, so there is nothing to learn: check that these are the right targets."
ONE_TARGET = "One datum determines no hyperparameters: set them and predict without a fit, or add data."


def warn_of_model(model: Any) -> None:
    """For models without Gaussian noise."""
    _warn(_constant_columns(model), _equal_components(model), _equal_targets(model))


@torch.no_grad()
def warn_of_latent_model(model: Any) -> None:
    """For Laplace's method. Cost: 64 rows of distances."""
    warn_of_model(model)
    inputs, targets = model.train_inputs, model.train_targets
    if not inputs or targets is None or len(targets) < 2:
        return
    prior, likelihood = _prior(model, model.likelihood)
    kernel = to_linear_operator(kernel_operator(prior.lazy_covariance_matrix, KernelProducts(far_field=None)))
    _warn(_equal_terms(kernel), _inputs_of_another_scale(kernel, inputs))
    if isinstance(likelihood, OF_LOCATION) and targets.dim() == 1 and targets.shape == prior.mean.shape:
        residual = (targets - prior.mean).double()[~torch.isnan(targets)]
        if len(residual) > 1 and (residual != residual[0]).any():
            low, high = residual.sort().values[[len(residual) // 6, len(residual) * 5 // 6]]
            variance = kernel._diagonal() + likelihood.noise.mean()
            _warn(_targets_of_another_scale(variance, residual, outer=(high - low) / 2))


@torch.no_grad()
def warn_of_mini_batches(model: Any, likelihood: gpytorch.likelihoods.Likelihood) -> None:
    """For mini-batch methods. Cost: the mean at all data, the variance at a thousand, and 64 rows of distances."""
    warn_of_model(model)
    inputs, targets = getattr(model, "train_inputs", None), getattr(model, "train_targets", None)
    if not inputs or targets is None or targets.dim() != 1 or len(targets) < 2:
        return
    _warn(_another_likelihood(model, likelihood))
    prior, likelihood = _prior(model, likelihood)
    if not isinstance(likelihood, OF_LOCATION) or targets.shape != prior.mean.shape:
        return
    noise, some = likelihood.noise.expand(len(targets)), slice(None, None, -(-len(targets) // SOME_ROWS))
    covariance = prior.lazy_covariance_matrix
    kernel = to_linear_operator(kernel_operator(covariance[some, some], KernelProducts(far_field=None)))
    every = SumLinearOperator(*(_stationary(term.kernel, term.inputs) for term in kernel_terms(covariance)))
    _warn(_equal_terms(kernel), _inputs_of_another_scale(every, inputs), _equal_rows(model, likelihood, noise))
    if (targets != targets[0]).any():
        _warn(_targets_of_another_scale(kernel._diagonal() + noise[some], targets - prior.mean))


def _stationary(kernel: Kernel, inputs: Tensor) -> LinearOperator:
    """With the RBFKernel that an RFFKernel approximates, whose own operator has features in place of inputs."""
    copies = ModuleCopies(kind=lambda kind: RBFKernel if kind is RFFKernel else kind)
    return operator_of_kernel(copies.of(kernel), inputs, None, KernelProducts(far_field=None))


@torch.no_grad()
def warn_of_targets(variance: Tensor, residual: Tensor) -> None:
    """For prior variances [b], with noise, and targets minus mean [n]."""
    _warn(_targets_of_another_scale(variance, residual))


def _prior(model: Any, likelihood: Any) -> tuple[MultivariateNormal, Any]:
    # A forward pass in training mode changes layers, as BatchNorm.
    copies = ModuleCopies(own=("_parameters", "_buffers"), apart=True, tensor=torch.Tensor.clone)
    copy, likelihood = evaluation_copies(model, likelihood, copies)
    for copied, own in zip(copy.modules(), model.modules(), strict=True):
        copied.training = own.training or not model.training
    return prior_at(copy, list(model.train_inputs)), likelihood


@torch.no_grad()
def warn_of_data(model: ExactGP, likelihood: gpytorch.likelihoods.Likelihood, system: TrainingSystem) -> None:
    """Cost: 64 rows of distances, and a sort."""
    _warn(_constant_columns(model), _equal_components(model), _another_likelihood(model, likelihood))
    operator = system.operator
    if operator.shape[-1] == 1:
        warn(ONE_TARGET, DataWarning)
    if not isinstance(operator, NoisyLinearOperator) or operator.shape[-1] < 2:
        return
    _warn(
        _equal_terms(operator.kernel),
        _inputs_of_another_scale(operator.kernel, model.train_inputs or ()),
        _targets_of_another_scale(operator.kernel._diagonal() + operator.noise, system.residual),
        _equal_rows(model, likelihood, operator.noise),
    )


def _warn(*sentences: Iterator[str]) -> None:
    for sentence in chain(*sentences):
        warn(sentence, DataWarning)


def _another_likelihood(model: ExactGP, likelihood: gpytorch.likelihoods.Likelihood) -> Iterator[str]:
    if model.likelihood is not likelihood:
        yield (
            "The likelihood of the marginal log likelihood is not the model's, whose noise stays as it is, also in "
            "predictions by model(x): pass model.likelihood to both."
        )


def _constant_columns(model: Any) -> Iterator[str]:
    inputs = getattr(model, "train_inputs", None) or ()
    if inputs and all(x.shape[-2] > 1 and (x == x[..., :1, :]).all() for x in inputs):
        yield "All training inputs are equal, so the data determine no lengthscale: check the inputs."
        return
    for x in inputs:
        columns = x.flatten(0, -2)
        constant = set((columns == columns[:1]).all(0).nonzero().reshape(-1).tolist())
        constant &= _columns_with_lengthscales(model, x.shape[-1])
        if constant and len(columns) > 1:
            yield f"The data cannot determine the lengthscale of a constant input: remove {_named(sorted(constant))}."


def _columns_with_lengthscales(model: Any, size: int) -> set[int]:
    found: set[int] = set()
    for module in model.modules():
        lengthscale, dims = getattr(module, "lengthscale", None), getattr(module, "active_dims", None)
        if not isinstance(lengthscale, Tensor) or lengthscale.shape[-1:] <= (1,):
            continue
        if dims is not None:
            found.update(dims.tolist())
        elif lengthscale.shape[-1] == size:  # else `forward` takes some columns, such as all but an exposure
            found.update(range(size))
    return found


def _equal_targets(model: Any) -> Iterator[str]:
    y = getattr(model, "train_targets", None)
    if y is not None and y.dim() == 1 and len(y) and (y == y[0]).all():
        yield EQUAL_TARGETS if len(y) > 1 else ONE_TARGET


def _equal_components(model: Any) -> Iterator[str]:
    for kernel in model.modules():
        if isinstance(kernel, gpytorch.kernels.SpectralMixtureKernel) and kernel.num_mixtures > 1:
            parts = (
                kernel.mixture_means.unbind(-3),
                kernel.mixture_scales.unbind(-3),
                kernel.mixture_weights.unbind(-1),
            )
            if all(torch.equal(part, parts_of_one[0]) for parts_of_one in parts for part in parts_of_one):
                yield (
                    "All components of the spectral mixture are equal, so they stay equal in a fit: call the kernel's "
                    "initialize_from_data, or set different mixture_means."
                )


def _equal_terms(kernel: LinearOperator) -> Iterator[str]:
    if isinstance(kernel, SumLinearOperator):
        rows = torch.arange(min(EQUAL_ROWS, kernel.shape[-1]), device=kernel.device)
        blocks = [dense_rows(term, rows) for term in kernel.linear_ops]
        if any(torch.equal(first, second) for first, second in combinations(blocks, 2)):
            yield (
                "Two terms of the kernel's sum are equal. If their priors are, too, they stay equal in a fit: give them "
                "different hyperparameters before it, such as a short and a long lengthscale."
            )


def _inputs_of_another_scale(kernel: LinearOperator, given: Sequence[Tensor]) -> Iterator[str]:
    terms = [term for term, _ in sum_terms(kernel)]
    is_radial = lambda term: (
        isinstance(term, RadialKernelLinearOperator | RadialProductLinearOperator) and not term.angles
    )
    terms_of_distance = [term for term in terms if is_radial(term) and term.kernel_inputs().shape[-1]]
    inputs = [_of_first_model(term.kernel_inputs(), 2) for term in terms_of_distance]
    correlation, distance = max(map(_nearest, terms_of_distance, inputs), default=(1.0, 0.0))
    if len(inputs) == len(terms) and correlation < UNCORRELATED:
        yield (
            f"The nearest training inputs are {distance:.3g} lengthscales apart, so the kernel matrix is diagonal and the "
            "lengthscales may not be learned: standardise the inputs, or set larger lengthscales before the fit (of many "
            "standardised inputs about the square root of their number)."
        )
    # Large fitted lengthscales of irrelevant inputs need no warning.
    spreads = (_spread(x) for x in given if x.shape[-1])
    least = min((float(spread[spread > 0].min()) for spread in spreads if spread.any()), default=0.0)
    for x in inputs if least < SMALL else ():
        spread = _spread(x)
        flat = ((spread < FLAT) & (x != x[0]).any(0)).nonzero().reshape(-1).tolist()
        if flat:
            yield (
                f"Inputs that vary by only {float(spread[flat].max()):.1g} lengthscales are constant to the kernel: "
                f"standardise {_named(flat)}, or set smaller lengthscales before the fit."
            )


def _spread(x: Tensor) -> Tensor:
    return x.double().flatten(0, -2).std(0)


def _nearest(kernel: LinearOperator, x: Tensor) -> tuple[float, float]:
    """Correlation and distance of the nearest of unequal inputs to some rows; correlation 1 if all are equal."""
    pairs = [(*_nearest_to(x, row), row) for row in range(0, len(x), max(len(x) // CENTRES, 1))]
    distance, nearest, row = min(pairs)
    if distance == math.inf:
        return 1.0, distance
    entries, diagonal = dense_rows(kernel, torch.tensor([row], device=x.device)), kernel._diagonal()
    entry, variances = _of_first_model(entries, 2)[0, nearest], _of_first_model(diagonal, 1)[[row, nearest]]
    return float(entry / variances.prod().sqrt()), distance


def _nearest_to(x: Tensor, row: int) -> tuple[float, int]:
    exact = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(x[row : row + 1], x, compute_mode=exact)[0]
    least, nearest = distances.where(distances > 0, torch.inf).min(0)
    return float(least), int(nearest)


def _of_first_model(tensor: Tensor, dims: int) -> Tensor:
    return tensor[(0,) * (tensor.dim() - dims)]


def _targets_of_another_scale(variance: Tensor, residual: Tensor, outer: Tensor | None = None) -> Iterator[str]:
    """`outer` is a spread that outliers do not raise, for heavy tails; None takes the standard deviation."""
    prior = variance.double().mean(-1).expand(residual.shape[:-1]).sqrt()
    spread, shift = residual.double().std(-1), residual.double().mean(-1).abs()
    is_scaled = ((spread if outer is None else outer) > SPREAD * prior) | (spread < prior / SPREAD)
    if (residual == residual[..., :1]).all(-1).any():
        yield EQUAL_TARGETS
    elif is_scaled.any():
        index = int(is_scaled.reshape(-1).nonzero()[0])
        yield (
            f"The targets minus the mean have a standard deviation of {float(spread.reshape(-1)[index]):.3g}, and the "
            f"prior one of {float(prior.reshape(-1)[index]):.3g}: standardise the targets, and the inputs of a linear "
            "mean, or set mean, outputscale and noise before the fit."
        )
    distance = (shift / spread.maximum(prior)).reshape(-1).max()
    if distance > SHIFT:
        yield (
            f"The targets lie {float(distance):.3g} standard deviations away from the prior's mean: subtract their mean, "
            "or set the model's mean before the fit."
        )


def _equal_rows(model: ExactGP, likelihood: gpytorch.likelihoods.Likelihood, noise: Tensor) -> Iterator[str]:
    inputs, y = model.train_inputs or (), model.train_targets
    if not inputs or any(x.dim() != 2 for x in inputs) or y is None:
        return
    if not y.shape == noise.shape == inputs[0].shape[:1]:
        return
    x = torch.cat([part.double() for part in inputs], dim=-1)
    # A sorted projection makes equal rows adjacent.
    order = (x * torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device).cos()).sum(-1).argsort()
    is_equal = (x[order[:-1]] == x[order[1:]]).all(-1)
    first, second = order[:-1][is_equal], order[1:][is_equal]
    differences = (y[first] - y[second]).double()
    copies = int((differences == 0).sum())
    if copies > COPIES * len(y):
        yield (
            f"{copies} of {len(y)} rows are exact copies of others, targets included, so the data seem to have no noise: "
            "remove the copies."
        )
    is_unexplained = differences.square() > UNEXPLAINED**2 * (noise[first] + noise[second])
    if is_unexplained.any() and _is_at_floor(likelihood):
        yield (
            f"{int(is_unexplained.sum())} rows have the inputs of other rows but very different targets, and the noise of "
            f"{float(noise.min()):.1g} is fixed or at its lower bound: start with a larger noise."
        )


def _is_at_floor(likelihood: gpytorch.likelihoods.Likelihood) -> bool:
    covariance = getattr(likelihood, "noise_covar", None)
    raw, constraint = getattr(covariance, "raw_noise", None), getattr(covariance, "raw_noise_constraint", None)
    if raw is None or constraint is None:
        return not any(parameter.requires_grad for parameter in likelihood.parameters())
    return not raw.requires_grad or bool((constraint.transform(raw) <= AT_FLOOR * constraint.lower_bound).any())


def _named(columns: list[int]) -> str:
    shown = ", ".join(map(str, columns[:5])) + (" and others" if len(columns) > 5 else "")
    return f"column {shown} of the inputs" if len(columns) == 1 else f"columns {shown} of the inputs"

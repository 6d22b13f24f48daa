from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.models import GP, ExactGP
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.checks import check_autocast, check_finite, check_same_kind
from gpy_iterative.linear_operators.extensions import all_parts
from gpy_iterative.linear_operators.from_gpytorch import kernel_operator
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.interpolated import GridLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import prior_parts
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.training.training_system import TrainingSystem, prior_at, unexpanded

ALL = slice(None)
_COMPOSITIONS = (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    HadamardLinearOperator,
    KroneckerProductLinearOperator,
    RadialProductLinearOperator,
    SumLinearOperator,
)


@dataclass(frozen=True)
class JointPrior:
    """Blocks of the joint prior of training data and t test points with T outputs each."""

    mean: Tensor  # [*batch, t T]
    test_train: LinearOperator  # K(x, X) [*batch, t T, n], or one list [batch * t T, n]
    test_test: LinearOperator  # K(x, x) [*batch, t T, t T]
    kind: type[MultivariateNormal]  # or the prior's multitask class
    event_shape: torch.Size  # [t] or [t, T]

    def distribution(self, mean: Tensor, covariance: LinearOperator) -> MultivariateNormal:
        return self.kind(mean.reshape(*mean.shape[:-1], *self.event_shape), covariance)


def joint_prior(
    model: ExactGP, inputs: Sequence[Tensor], batch_shape: torch.Size, products: KernelProducts
) -> JointPrior:
    """The blocks of a model in evaluation mode at inputs [*batch, t, d].

    Without a `batch_shape` in training, batches become one list: training inputs are not repeated.
    """
    train = unexpanded(model.train_inputs or ())
    inputs = checked_inputs(train, inputs)
    batch, num_test = inputs[0].shape[:-2], inputs[0].shape[-2]
    is_list = bool(batch) and not batch_shape
    points = [x.reshape(-1, x.shape[-1]) for x in inputs] if is_list else inputs
    joint = prior_at_both(model, train, points)

    # Also of models whose output is one list, such as BoTorch's HigherOrderGP.
    outputs = joint.loc.shape[-1] // (train[0].shape[-2] + points[0].shape[-2])
    size = train[0].shape[-2] * outputs
    covariance = joint.lazy_covariance_matrix
    once = replace(products, cache_memory=0)
    test_train, test_test = covariance_blocks(covariance, size, once)
    mean = joint.loc[..., size:]
    if is_list:
        test_test = _rounded_as(test_train, kernel_operator(prior_at(model, inputs).lazy_covariance_matrix, once))
        mean = mean.reshape(*batch, num_test * outputs)
    else:
        batch = torch.broadcast_shapes(batch_shape, joint.batch_shape)
        mean, test_train = mean.expand(*batch, mean.shape[-1]), expanded(test_train, batch)
    test_test = expanded(test_test, batch)
    # Copies: variances are evaluated later, at these hyperparameters.
    is_multitask = isinstance(joint, MultitaskMultivariateNormal)
    return JointPrior(
        mean,
        test_train.clone(),
        test_test.clone(),
        type(joint) if is_multitask else MultivariateNormal,
        torch.Size((num_test, outputs) if is_multitask else (num_test * outputs,)),
    )


def checked_inputs(train: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Test inputs, expanded to the same [*batch, t, d]; ValueError if they do not fit."""
    check_autocast()
    if len(inputs) != len(train):
        raise ValueError(f"The model takes {len(train)} input tensor(s), as its training inputs; got {len(inputs)}.")
    for x in inputs:
        if not torch.is_tensor(x):
            raise ValueError(
                f"The inputs must be tensors, got {type(x).__name__}: convert them with torch.as_tensor(...)."
            )
    columns = [x.unsqueeze(-1) if x.dim() == 1 else x for x in inputs]
    for given, x, known in zip(inputs, columns, train, strict=True):
        if x.shape[-1:] != known.shape[-1:]:
            remedy = (
                "for one point use x.unsqueeze(0)." if given.shape == known.shape[-1:] else "pass the same columns."
            )
            raise ValueError(
                f"Inputs of shape {tuple(given.shape)} do not fit the training inputs {tuple(known.shape)}: {remedy}"
            )
        advice = f"Use x.to('{known.device}', {known.dtype})."
        check_same_kind("An input tensor", x, "the training inputs", known, advice)
        if x.is_floating_point():
            check_finite("x", x)
    return in_one_batch(columns)


def prior_at_both(model: GP, train: Sequence[Tensor], test: Sequence[Tensor]) -> MultivariateNormal:
    """The prior at the training inputs, then the test inputs."""
    return prior_at(model, [torch.cat(in_one_batch(pair), dim=-2) for pair in zip(train, test, strict=True)])


def in_one_batch(inputs: Sequence[Tensor]) -> list[Tensor]:
    batch = common_batch(*(x.shape[:-2] for x in inputs))
    return [x.expand(*batch, *x.shape[-2:]) for x in inputs]


def common_batch(*shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"The batch shapes of inputs, targets and noise must broadcast, got {listed}.") from error


def graph_for(inputs: Sequence[Tensor]) -> torch.set_grad_enabled:
    return torch.set_grad_enabled(
        torch.is_grad_enabled() and any(torch.is_tensor(x) and x.requires_grad for x in inputs)
    )


def covariance_blocks(
    covariance: LinearOperator, size: int, products: KernelProducts
) -> tuple[LinearOperator, LinearOperator]:
    """K(x, X) and K(x, x); the first `size` rows are training data."""
    if covariance.shape[-1] == size:
        nothing = torch.zeros(*covariance.batch_shape, 0, size, dtype=covariance.dtype, device=covariance.device)
        return to_linear_operator(nothing), to_linear_operator(nothing[..., :0])
    has_jitter = prior_parts(covariance).diagonal is not None  # of the model's forward
    whole = kernel_operator(covariance, products) if has_jitter else None
    if isinstance(whole, NoisyLinearOperator):
        kernel, jitter = whole.kernel, whole.noise[..., size:]
        return kernel[..., size:, :size], NoisyLinearOperator(kernel[..., size:, size:], jitter)
    # GPyTorch's lazy blocks first, then operators: this keeps Kronecker structure.
    points, tasks = covariance, []
    if type(covariance) is KroneckerProductLinearOperator:
        points, *tasks = covariance.linear_ops
        size = size * points.shape[-1] // covariance.shape[-1]
    blocks = points[..., size:, :size], points[..., size:, size:]
    blocks = [KroneckerProductLinearOperator(block, *tasks) if tasks else block for block in blocks]
    test_train, test_test = (kernel_operator(block, products) for block in blocks)
    return test_train, _rounded_as(test_train, test_test)


def rounded_as_all_data(system: TrainingSystem, products: KernelProducts) -> TrainingSystem:
    """With missing targets, the system at the scaled inputs of K(x, X), whose centre is that of all data."""
    # A grid without bounds is that of the last evaluation.
    if system.observed is None or any(isinstance(part, GridLinearOperator) for part in all_parts(system.operator)):
        return system
    whole = kernel_operator(system.prior.lazy_covariance_matrix, products)
    whole = whole.kernel if isinstance(whole, NoisyLinearOperator) else whole
    return replace(system, operator=_rounded_as(whole, system.operator, system.observed))


def _rounded_as(known: LinearOperator, operator: LinearOperator, rows: Tensor | slice = ALL) -> LinearOperator:
    """K(x, x) at the scaled inputs of these rows of K(x, X): another centre rounds them otherwise."""
    if isinstance(operator, NoisyLinearOperator):
        return NoisyLinearOperator(_rounded_as(known, operator.kernel, rows), operator.noise, **operator._kwargs)
    if isinstance(operator, RadialKernelLinearOperator) and isinstance(known, RadialKernelLinearOperator):
        x1 = known.x1[..., rows, :]
        return operator.at(x1.reshape(operator.x1.shape)) if x1.numel() == operator.x1.numel() else operator
    is_alike = type(operator) is type(known) and len(operator._args) == len(known._args)
    if is_alike and isinstance(operator, _COMPOSITIONS):
        if isinstance(operator, HadamardLinearOperator):
            rows = known.observed[rows][operator.datum_of_points()] // len(known.tasks)
        pairs = zip(known._args, operator._args, strict=True)
        parts = [_rounded_as(*pair, rows) if isinstance(pair[0], LinearOperator) else pair[1] for pair in pairs]
        return type(operator)(*parts, **operator._kwargs)
    return operator


def expanded(operator: LinearOperator, batch: torch.Size) -> LinearOperator:
    """`operator.expand` to a batch shape; without a copy of one that has it."""
    return operator if operator.batch_shape == batch else operator.expand(*batch, *operator.matrix_shape)

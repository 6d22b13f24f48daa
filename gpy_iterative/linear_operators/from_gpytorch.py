"""GPyTorch priors and likelihoods as operators of this package."""

from dataclasses import replace
from functools import reduce
from math import prod
from typing import Any

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import Likelihood, MultitaskGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HeteroskedasticNoise, MultitaskHomoskedasticNoise
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    InterpolatedLinearOperator,
    KroneckerProductLinearOperator,
    MatmulLinearOperator,
    MulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.checks import check_instance
from gpy_iterative.errors import ApproximationWarning, warn
from gpy_iterative.linear_operators.extensions import all_parts
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.interpolated import GridLinearOperator
from gpy_iterative.linear_operators.kernel_functions import GPYTORCH_SETTINGS, evaluated
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.linear_operators.radial_inputs import (
    active_inputs,
    is_smooth_product,
    on_grid,
    radial_factors,
    repeated_points,
    value_dtype,
    with_one_gaussian,
)
from gpy_iterative.linear_operators.tiles.cache import TileCache

#: Refuses `interleaved=False`.
ORDER_OF_TASKS = (
    "The model's output has the order of tasks (interleaved=False): in place of from_independent_mvns take from_batch_mvn "
    "for kernels of one kind, or one model for each task."
)
#: Noise models that need the inputs, or task indices, of the data.
NOISE_OF_INPUTS = HeteroskedasticNoise | MultitaskHomoskedasticNoise

#: To look for the axes of columns takes about as long as so many rows of K(x, X).
ROWS_WITH_AXES = 128
#: Kernels whose own operators have fast products.
_STRUCTURED = (
    kernels.LinearKernel,
    kernels.RFFKernel,
    kernels.GridInterpolationKernel,
    kernels.IndexKernel,
    kernels.InducingPointKernel,
)


def kernel_operator(
    covariance: LinearOperator | Tensor, products: KernelProducts, cache: TileCache | None = None
) -> LinearOperator:
    """The prior covariance, or a part of it, as an operator that stores no kernel matrix.

    Args:
        covariance: `function_dist.lazy_covariance_matrix`.
        products: how kernel products are computed.
        cache: where tiles are kept; None starts an empty one.

    Raises:
        ValueError: inputs do not fit the kernel or the precision.
        RuntimeError: GPyTorch's setting checkpoint_kernel is on.
    """
    if gpytorch.beta_features.checkpoint_kernel.value() > 0:
        raise RuntimeError(
            "gpytorch.beta_features.checkpoint_kernel has no use here (nothing of size n x n is stored) and changes "
            "what lazy kernels mean: leave it off."
        )
    cache = TileCache() if cache is None else cache
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        kernel, x1, x2 = covariance.kernel, covariance.x1, covariance.x2
        check_kernel_dtype(kernel, x1)
        same, by_dimension = are_same_inputs(x1, x2), covariance.last_dim_is_batch
        if by_dimension or covariance.params:
            return evaluated(kernel, x1, x2, diag=False, last_dim_is_batch=by_dimension, **covariance.params)
        return operator_of_kernel(kernel, x1, None if same else x2, products, cache)
    if isinstance(covariance, SumLinearOperator):
        parts = enumerate(covariance.linear_ops)
        return _sum([kernel_operator(part, products, cache.part(str(i))) for i, part in parts])
    if isinstance(covariance, ConstantMulLinearOperator):
        return _times(kernel_operator(covariance.base_linear_op, products, cache), covariance._constant)
    covariance = to_linear_operator(covariance)
    if type(covariance) is KroneckerProductLinearOperator:
        parts = enumerate(covariance.linear_ops)
        return KroneckerLinearOperator(*(kernel_operator(part, products, cache.part(str(i))) for i, part in parts))
    if isinstance(covariance, MulLinearOperator):
        return _entrywise_product(covariance)
    if not any(isinstance(part, LazyEvaluatedKernelTensor | MulLinearOperator) for part in all_parts(covariance)):
        return covariance
    read = lambda name, part: (
        kernel_operator(part, products, cache.part(str(name))) if isinstance(part, LinearOperator) else part
    )
    parts = [read(number, part) for number, part in enumerate(covariance._args)]
    return type(covariance)(*parts, **{name: read(name, part) for name, part in covariance._kwargs.items()})


def _entrywise_product(covariance: MulLinearOperator) -> LinearOperator:
    """Dense unless ranks are low: linear_operator's product with s columns stores n s numbers for each rank."""
    ranks = [part.root.shape[-1] for part in (covariance.left_linear_op, covariance.right_linear_op)]
    size, most = covariance.shape[-1], gpytorch.settings.max_cholesky_size.value()
    is_truncated = gpytorch.settings.max_root_decomposition_size.value() in ranks
    # Equal ranks are those of `prod(-3)`, which for odd numbers of factors of low rank also has a wrong scale.
    if size > most and (is_truncated or ranks[0] == ranks[1]):
        warn(
            f"Beyond {most} rows GPyTorch approximates k(x).prod(-3) and k1(x) * k2(x) by Lanczos, and may be far from the "
            "product: likelihoods and predictions may be wrong. Take a product kernel (k1 * k2 with active_dims), or "
            f"set gpytorch.settings.max_cholesky_size above the {size} rows and test points.",
            ApproximationWarning,
        )
    return covariance if prod(ranks) < size else DenseLinearOperator(covariance.to_dense())


def are_same_inputs(x1: Tensor, x2: Tensor) -> bool:
    """Whether inputs are equal; if one has a gradient, whether they are one tensor."""
    if x1 is x2:
        return True
    has_gradient = torch.is_grad_enabled() and (x1.requires_grad or x2.requires_grad)
    return not has_gradient and x1.shape == x2.shape and torch.equal(x1, x2)


def check_kernel_dtype(kernel: kernels.Kernel, inputs: Tensor) -> None:
    for name, parameter in kernel.named_parameters():
        if inputs.is_floating_point() and parameter.dtype != inputs.dtype:
            raise ValueError(
                f"The inputs have dtype {inputs.dtype} but the kernel's parameter {name} has {parameter.dtype}: "
                "call model.double() or model.float(), or convert the inputs."
            )


def operator_of_kernel(
    kernel: kernels.Kernel,
    x1: Tensor,
    x2: Tensor | None,
    products: KernelProducts,
    cache: TileCache | None = None,
) -> LinearOperator:
    """The operator k(x1, x2) of inputs with active dims only; x2 None is x1. The rest is as in `kernel_operator`."""
    cache = TileCache() if cache is None else cache
    products.check(value_dtype(kernel, x1))
    if type(kernel) is kernels.ScaleKernel:
        # ScaleKernel calls its base's forward: active dims are already selected.
        return _times(operator_of_kernel(kernel.base_kernel, x1, x2, products, cache), kernel.outputscale)
    if type(kernel) is kernels.AdditiveKernel:
        parts = [(part, active_inputs(part, x1), active_inputs(part, x2)) for part in kernel.kernels]
        return _sum([operator_of_kernel(*part, products, cache.part(str(i))) for i, part in enumerate(parts)])
    factors, axes = radial_factors(kernel, x1, x2), []
    if len(factors) > 1 or any(factor.function is RBF for factor in factors):  # separable
        columns = x1 if x2 is None else x2
        may_have_axes = x1.dim() == columns.dim() == 2 and not columns.requires_grad and products.backend != "keops"
        may_have_axes = may_have_axes and (x2 is None or len(x1) >= ROWS_WITH_AXES)
        factors, axes = (on_grid(factors) if may_have_axes else None) or (with_one_gaussian(factors), [])
    if len(factors) == 1 or (factors and products.backend != "keops"):
        if x1.requires_grad:
            # Learned inputs need derivatives by single points, which grids and far fields do not give (accurately).
            products = replace(products, far_field=None)
        parts = [
            RadialKernelLinearOperator(
                factor.x1,
                factor.x1.new_ones(()),
                x2=factor.x2,
                alpha=factor.alpha,
                function=factor.function,
                angles=factor.angles,
                products=products if len(factors) == 1 else replace(products, far_field=None),
                cache=cache,
            )
            for factor in factors
        ]
        operator = parts[0]
        if len(parts) > 1:
            is_smooth = is_smooth_product(kernel, x1)
            operator = RadialProductLinearOperator.of(parts, products=products, axes=axes, is_smooth=is_smooth)
        return reduce(_times, factors[0].outputscales, operator)
    if isinstance(kernel, kernels.MultitaskKernel) and type(kernel).forward is kernels.MultitaskKernel.forward:
        # As in its forward, the data kernel's active dims are ignored.
        data = operator_of_kernel(kernel.data_covar_module, x1, x2, products, cache)
        tasks = to_linear_operator(kernel.task_covar_module.covar_matrix)
        if tasks.shape[-1] == 1:  # as fast as one kernel
            return _times(data, tasks.to_dense()[..., 0, 0])
        return KroneckerLinearOperator(data, tasks)
    if isinstance(kernel, kernels.LCMKernel) and type(kernel).forward is kernels.LCMKernel.forward:
        parts = enumerate(kernel.covar_module_list)
        return _sum([operator_of_kernel(part, x1, x2, products, cache.part(str(i))) for i, part in parts])
    if type(kernel) is kernels.ConstantKernel:
        left, right = (x.new_ones(*x.shape[:-1], 1) for x in (x1, x1 if x2 is None else x2))
        ones = RootLinearOperator(left) if x2 is None else MatmulLinearOperator(left, right.mT)
        return _times(ones, kernel.constant.squeeze(-1))
    product = _product_with_tasks(kernel, x1, x2, products, cache)
    if product is not None:
        return product
    if isinstance(kernel, kernels.GridInterpolationKernel):
        _check_within_grid(kernel, x1 if x2 is None else torch.cat([x1.flatten(0, -2), x2.flatten(0, -2)]))
    inner = kernel
    while type(inner) in (kernels.AdditiveStructureKernel, kernels.ScaleKernel):
        inner = inner.base_kernel
    if isinstance(inner, _STRUCTURED):
        found = evaluated(kernel, x1, x1 if x2 is None else x2)
        return GridLinearOperator(*found._args) if type(found) is InterpolatedLinearOperator else found
    return GenericKernelLinearOperator.of_kernel(kernel, x1, x2, products=products, cache=cache)


def _product_with_tasks(
    kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None, products: KernelProducts, cache: TileCache
) -> LinearOperator | None:
    """A product with an IndexKernel, for unbatched inputs."""
    is_batch = any(x is not None and x.dim() > 2 for x in (x1, x2))
    if type(kernel) is not kernels.ProductKernel or is_batch:
        return None
    is_index = lambda part: type(part).forward is kernels.IndexKernel.forward
    index, *others = sorted(kernel.kernels, key=is_index, reverse=True)
    if not others or not is_index(index) or is_index(others[0]) or index.batch_shape:
        return None
    other = others[0] if len(others) == 1 else kernels.ProductKernel(*others)
    rows, columns = active_inputs(other, x1), active_inputs(other, x2)
    row_tasks = _task_numbers(index, x1)
    column_tasks = row_tasks if x2 is None else _task_numbers(index, x2)
    row_points = column_points = None
    # Of few rows, too: K(x, X) of all columns would have another centre, and round them otherwise than training.
    repeated = repeated_points(other, x1 if x2 is None else x2)
    if repeated is not None:
        # Tasks have data at the same inputs; in the order of data, whose blocks then have few points.
        first, column_points = repeated.in_order_of_data()
        if columns is None:
            rows, row_points = rows[first], column_points
        else:
            columns = columns[first]
    points, tasks = operator_of_kernel(other, rows, columns, products, cache), to_dense(index.covar_matrix)
    return HadamardLinearOperator.of(points, tasks, row_tasks, column_tasks, row_points, column_points)


def _task_numbers(index: kernels.IndexKernel, x: Tensor) -> Tensor:
    count, given = index.covar_factor.shape[-2], active_inputs(index, x).squeeze(-1)
    tasks = given.long()
    is_task = (given == tasks) & (tasks >= 0) & (tasks < count)
    if not is_task.all():
        wrong = given[~is_task][0].item()
        raise ValueError(f"The IndexKernel has {count} tasks, 0 to {count - 1}, but the inputs name a task {wrong:g}.")
    return tasks


def _check_within_grid(kernel: kernels.GridInterpolationKernel, inputs: Tensor) -> None:
    if kernel.grid_is_dynamic or not inputs.numel():
        return
    for dimension, (grid, x) in enumerate(zip(kernel.grid, inputs.unbind(-1), strict=True)):
        low, high = grid.min().item(), grid.max().item()
        least, most = x.min().item(), x.max().item()
        rounding = 1e-6 * (high - low)
        if least < low - rounding or most > high + rounding:
            raise ValueError(
                f"Inputs from {least:.4g} to {most:.4g} (dimension {dimension}) do not lie within the grid of the "
                f"GridInterpolationKernel, {low:.4g} to {high:.4g}. Give it grid_bounds= that hold all inputs, those of "
                "predictions too: without them, the grid is that of the training inputs and a few spacings around them."
            )


def _sum(operators: list[LinearOperator]) -> LinearOperator:
    noises = [part.noise for part in operators if isinstance(part, NoisyLinearOperator)]
    plain = [part.kernel if isinstance(part, NoisyLinearOperator) else part for part in operators]
    others = [part for part in plain if not isinstance(part, DiagLinearOperator)]
    if others:  # jitter from the model's `forward`
        noises += [part.diagonal() for part in plain if isinstance(part, DiagLinearOperator)]
        plain = others
    total = plain[0] if len(plain) == 1 else SumLinearOperator(*plain)
    return NoisyLinearOperator(total, reduce(torch.add, noises).expand(total.shape[:-1])) if noises else total


def _times(operator: LinearOperator, constant: Tensor) -> LinearOperator:
    batch = torch.broadcast_shapes(operator.batch_shape, constant.shape)
    if batch != operator.batch_shape:
        operator = operator.expand(*batch, *operator.matrix_shape)  # linear_operator would multiply dense matrices
    if isinstance(operator, SumLinearOperator):
        return SumLinearOperator(*(_times(part, constant) for part in operator.linear_ops))
    if isinstance(operator, RootLinearOperator):
        # linear_operator would scale the root: K(x, X) has none, and rounds otherwise.
        return ConstantMulLinearOperator(operator, constant)
    return operator * constant.unsqueeze(-1).unsqueeze(-1)


def noise_operator(
    likelihood: Likelihood, function_dist: MultivariateNormal, *params: Any, **kwargs: Any
) -> LinearOperator:
    """The likelihood's noise covariance [*b, n, n]; ValueError if inputs that it needs are missing, or it does not fit."""
    num_data = function_dist.loc.shape[-1]
    noise_model = getattr(likelihood, "noise_covar", None)
    is_given = kwargs.get("noise") is not None
    if is_given:
        check_instance("noise", kwargs["noise"], Tensor, "torch.full((n,), 0.1)")
    if isinstance(noise_model, NOISE_OF_INPUTS) and not (params or is_given):
        raise ValueError(
            f"The noise of {type(likelihood).__name__} depends on the inputs (or task indices) of the data, which were "
            "not passed: call the marginal log likelihood as mll(model(x), y, x), as with GPyTorch's own."
        )
    is_fixed = isinstance(noise_model, FixedGaussianNoise) and not is_given
    if is_fixed and noise_model.noise.dim() == 0:
        raise ValueError(
            "The likelihood has one number for its fixed noise: it needs one noise variance for every datum."
        )
    if not getattr(function_dist, "_interleaved", True):  # GPyTorch's values mix up the tasks, its predictions fail
        raise ValueError(ORDER_OF_TASKS)
    if isinstance(likelihood, MultitaskGaussianLikelihood):
        if function_dist.event_shape[1:] != (likelihood.num_tasks,):
            raise ValueError(
                f"{type(likelihood).__name__} has {likelihood.num_tasks} tasks, the model's output the shape "
                f"{tuple(function_dist.event_shape)}: return a MultitaskMultivariateNormal of these tasks, or use "
                "GaussianLikelihood."
            )
        if 0 < likelihood.rank < likelihood.num_tasks and not likelihood.has_global_noise:
            raise ValueError(
                f"The noise of {likelihood.num_tasks} tasks has rank={likelihood.rank} and no global noise, so some "
                "sums of outputs have none, and solves do not converge: leave has_global_noise=True, or take rank=0."
            )
        noise = likelihood._shaped_noise_covar(function_dist.mean.shape, add_noise=likelihood.has_global_noise)
    else:
        with GPYTORCH_SETTINGS:  # predicted noise changes settings
            noise = likelihood._shaped_noise_covar(function_dist.mean.shape, *params, **kwargs)
    if is_fixed and noise_model.noise.shape[-1] != num_data:
        # GPyTorch would ignore it.
        raise ValueError(
            f"The likelihood has {noise_model.noise.shape[-1]} fixed noise variances, which does not fit the model's "
            f"output of shape {tuple(function_dist.mean.shape)}: it needs one noise variance for every datum. For other "
            "data pass noise=."
        )
    if noise.shape[-1:] != (num_data,):
        raise ValueError(
            f"The likelihood's noise has shape {tuple(noise.shape)}, the model's output {tuple(function_dist.mean.shape)}: "
            "they must be about the same data. Inputs that the noise depends on are passed as mll(model(x), y, x)."
        )
    return noise


def noisy_operator(
    likelihood: Likelihood,
    function_dist: MultivariateNormal,
    *params: Any,
    products: KernelProducts,
    cache: TileCache | None = None,
    observed: Tensor | None = None,
    **kwargs: Any,
) -> LinearOperator:
    """H, the covariance of the observations: prior plus noise.

    Args:
        likelihood: Gaussian.
        function_dist: the prior at the training inputs, [*b, n] or [*b, n, T].
        params, kwargs: the likelihood's arguments.
        products, cache: as in `kernel_operator`.
        observed: [n] or [n * T] bool; None keeps all data.

    Returns:
        A NoisyLinearOperator for diagonal noise, otherwise a sum.

    Raises:
        ValueError: noise of observed data is not positive, not finite, or does not fit the data; mean and covariance do
            not fit.
    """
    covariance, length = function_dist.lazy_covariance_matrix, function_dist.loc.shape[-1]
    if covariance.shape[-1] != length:
        raise ValueError(
            f"The model's output has a mean of {length} values, but its covariance has {covariance.shape[-1]} rows: for a "
            "kernel with several outputs at a point, such as RBFKernelGrad, return a MultitaskMultivariateNormal with a "
            "mean like ConstantMeanGrad."
        )
    noise = noise_operator(likelihood, function_dist, *params, **kwargs)
    if not isinstance(noise, DiagLinearOperator):
        whole = kernel_operator(covariance, products, cache) + kernel_operator(noise, products)
        return whole if observed is None else _restricted(whole, observed)
    variances = noise.diagonal(dim1=-1, dim2=-2)
    # That of missing data has no meaning.
    check_noise(variances if observed is None else torch.where(observed, variances, 1))
    kernel = kernel_operator(
        covariance if observed is None else masked_covariance(covariance, observed), products, cache
    )
    if observed is not None:
        variances = variances[..., observed]
    num_variances = likelihood.num_tasks if isinstance(likelihood, MultitaskGaussianLikelihood) else None
    if isinstance(noise, ConstantDiagLinearOperator):
        num_variances = 1
    if isinstance(kernel, NoisyLinearOperator):
        num_variances = None if kernel.noise.requires_grad else num_variances
        kernel, variances = kernel.kernel, variances + kernel.noise
    return NoisyLinearOperator(kernel, variances, num_variances=num_variances)


def masked_covariance(covariance: LinearOperator | Tensor, observed: Tensor) -> LinearOperator:
    if isinstance(covariance, LazyEvaluatedKernelTensor) and covariance.shape[-1] == covariance.x1.shape[-2]:
        index = observed.nonzero().squeeze(-1)
        return covariance[..., index, :][..., :, index]
    if isinstance(covariance, DiagLinearOperator):
        return DiagLinearOperator(covariance.diagonal()[..., observed])
    if isinstance(covariance, SumLinearOperator):
        return SumLinearOperator(*(masked_covariance(part, observed) for part in covariance.linear_ops))
    if isinstance(covariance, ConstantMulLinearOperator):
        return ConstantMulLinearOperator(masked_covariance(covariance.base_linear_op, observed), covariance._constant)
    return _restricted(to_linear_operator(covariance), observed)


def _restricted(operator: LinearOperator, observed: Tensor) -> ObservedLinearOperator:
    numbers = observed.nonzero().squeeze(-1)
    return ObservedLinearOperator(operator, numbers, numbers)


def check_noise(noise: Tensor) -> None:
    bad = ~(torch.isfinite(noise) & (noise > 0))
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"Every noise variance must be finite and positive, but noise{list(index)} is {noise[index].item()}. "
            "A constraint such as gpytorch.constraints.GreaterThan(1e-4) keeps a learned noise so."
        )


def flat_targets(function_dist: MultivariateNormal, target: Tensor) -> Tensor:
    """Targets in the order of `function_dist.loc`, [*b, n] or [*b, n * T]."""
    return target.flatten(-2) if isinstance(function_dist, MultitaskMultivariateNormal) else target


def observed_data(function_dist: MultivariateNormal, target: Tensor) -> Tensor | None:
    """Observed data by `observation_nan_policy`, [n] bool in the order of `function_dist.loc`; None for all.

    Under "mask", NaN in any batch member is missing. Under "fill", NaN in some members only raises ValueError.
    """
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy == "ignore" or not target.numel():
        return None
    present = ~torch.isnan(flat_targets(function_dist, target))
    present = present.reshape(-1, present.shape[-1])
    observed = present.all(0)
    if policy == "fill" and not torch.equal(observed, present.any(0)):
        raise ValueError(
            "Under observation_nan_policy('fill') the members of a batch must miss the same targets here: they share one "
            "linear system. Use observation_nan_policy('mask'), which drops a datum for all members, or one model each."
        )
    return None if bool(observed.all()) else observed

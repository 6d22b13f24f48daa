"""From a GPyTorch prior and likelihood to the operators of this package: the only reader of GPyTorch's internals.

Nothing is evaluated that a user's kernel would store as an n x n matrix; what a model has already built
(a dense matrix, a Kronecker or Toeplitz structure) is taken as it is.
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import Likelihood, MultitaskGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HeteroskedasticNoise, MultitaskHomoskedasticNoise
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantMulLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    MaskedLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import MATERN, RATIONAL_QUADRATIC, RBF
from gpy_iterative.linear_operators.tile_cache import TileCaches

#: Kernels whose own operator is cheap to evaluate and has a fast product.
_STRUCTURED = (
    kernels.LinearKernel,
    kernels.RFFKernel,
    kernels.GridInterpolationKernel,
    kernels.IndexKernel,
    kernels.InducingPointKernel,
)


@dataclass(frozen=True)
class KernelTerm:
    """One kernel of the sum that a prior covariance is.

    Attributes:
        kernel: the kernel.
        inputs: [*b, n, d], already reduced to the kernel's active dims.
        scale: multiplies the kernel; None for 1.
    """

    kernel: kernels.Kernel
    inputs: Tensor
    scale: Tensor | None = None


def kernel_operator(
    covariance: LinearOperator | Tensor, products: KernelProducts, caches: TileCaches | None = None
) -> LinearOperator:
    """The prior covariance as an operator that stores no kernel matrix.

    Args:
        covariance: `function_dist.lazy_covariance_matrix`.
        products: how products with kernel matrices are computed.
        caches: where the operators keep their tiles; None gives each a cache of its own.

    Raises:
        ValueError: inputs and kernel parameters of different dtypes, or inputs whose dtype or device does not allow the
            precision that `products` asks for.
        RuntimeError: under GPyTorch's checkpoint_kernel setting, which changes what its lazy tensors mean.
    """
    if gpytorch.beta_features.checkpoint_kernel.value() > 0:
        raise RuntimeError(
            "gpytorch.beta_features.checkpoint_kernel has no use here (nothing of size n x n is stored) and changes "
            "what lazy kernels mean: leave it off."
        )
    if caches is None:
        caches = TileCaches()
    caches.restart()
    return _read(covariance, _How(products, caches))


@dataclass(frozen=True)
class _How:
    products: KernelProducts
    caches: TileCaches

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the next operator."""
        return {"products": self.products, "cache": self.caches.take()}


def _read(covariance: LinearOperator | Tensor, how: _How) -> LinearOperator:
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        return _of_lazy_kernel(covariance, how)
    if isinstance(covariance, AddedDiagLinearOperator):
        jitter = _diagonal_of(covariance._diag_tensor, covariance.shape)
        return NoisyLinearOperator(_read(covariance._linear_op, how), jitter)
    if isinstance(covariance, SumLinearOperator):
        return _sum([_read(part, how) for part in covariance.linear_ops])
    if isinstance(covariance, ConstantMulLinearOperator):
        return _times(_read(covariance.base_linear_op, how), covariance._constant)
    covariance = to_linear_operator(covariance)
    if not _is_lazy(covariance):
        return covariance
    # Any other composition (batches summed or interleaved, masks, ...) of kernels that nobody has evaluated yet.
    parts = [_read(part, how) if isinstance(part, LinearOperator) else part for part in covariance._args]
    options = {
        name: _read(part, how) if isinstance(part, LinearOperator) else part
        for name, part in covariance._kwargs.items()
    }
    return type(covariance)(*parts, **options)


def _is_lazy(covariance: LinearOperator) -> bool:
    """Whether some part of it is a kernel that nobody has evaluated yet."""
    parts = (*covariance._args, *covariance._kwargs.values())
    return isinstance(covariance, LazyEvaluatedKernelTensor) or any(
        _is_lazy(part) for part in parts if isinstance(part, LinearOperator)
    )


def _of_lazy_kernel(lazy: LazyEvaluatedKernelTensor, how: _How) -> LinearOperator:
    x1, x2 = lazy.x1, lazy.x2
    kernel = lazy.kernel
    check_kernel_dtype(kernel, x1)
    same = x1 is x2 or (x1.shape == x2.shape and torch.equal(x1, x2))
    if lazy.last_dim_is_batch or lazy.params:
        with gpytorch.settings.lazily_evaluate_kernels(False):
            evaluated = gpytorch.Module.__call__(
                kernel, x1, x2, diag=False, last_dim_is_batch=lazy.last_dim_is_batch, **lazy.params
            )
        return to_linear_operator(evaluated)
    return _of_kernel(kernel, x1, None if same else x2, how)


def check_kernel_dtype(kernel: kernels.Kernel, inputs: Tensor) -> None:
    """Raises ValueError with the first parameter of another dtype than the inputs."""
    for name, parameter in kernel.named_parameters():
        if inputs.is_floating_point() and parameter.dtype != inputs.dtype:
            raise ValueError(
                f"The inputs have dtype {inputs.dtype} but the kernel's parameter {name} has {parameter.dtype}: "
                "call model.double() or model.float(), or convert the inputs."
            )


def operator_of_kernel(
    kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None, products: KernelProducts
) -> LinearOperator:
    """The operator k(x1, x2) of one kernel, whose inputs are already reduced to its active dims; x2 None is x1."""
    return _of_kernel(kernel, x1, x2, _How(products, TileCaches()))


def _of_kernel(kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None, how: _How) -> LinearOperator:
    """The operator of k(x1, x2), whose inputs are already reduced to the kernel's active dims."""
    how.products.check(x1.dtype, x1.device)
    if type(kernel) is kernels.ScaleKernel:
        # ScaleKernel calls its base's forward: the base's active dims are already selected.
        return _times(_of_kernel(kernel.base_kernel, x1, x2, how), kernel.outputscale)
    if type(kernel) is kernels.AdditiveKernel:
        return _sum(
            [
                _of_kernel(part, active_inputs(part, x1), None if x2 is None else active_inputs(part, x2), how)
                for part in kernel.kernels
            ]
        )
    if _is_radial(kernel):
        return _radial(kernel, x1, x2, how)
    if isinstance(kernel, kernels.MultitaskKernel) and type(kernel).forward is kernels.MultitaskKernel.forward:
        # It calls its data kernel's forward, past the data kernel's active dims; so do predictions with model(x).
        data = _of_kernel(kernel.data_covar_module, x1, x2, how)
        return KroneckerProductLinearOperator(data, to_linear_operator(kernel.task_covar_module.covar_matrix))
    if isinstance(kernel, kernels.LCMKernel) and type(kernel).forward is kernels.LCMKernel.forward:
        return _sum([_of_kernel(part, x1, x2, how) for part in kernel.covar_module_list])
    if isinstance(kernel, _STRUCTURED):
        with gpytorch.settings.lazily_evaluate_kernels(False):
            return to_linear_operator(gpytorch.Module.__call__(kernel, x1, x1 if x2 is None else x2))
    return GenericKernelLinearOperator.of_kernel(kernel, x1, x2, **how.options())


def active_inputs(kernel: kernels.Kernel, x: Tensor) -> Tensor:
    """The columns of x [*b, n, D] that the kernel sees, [*b, n, d]."""
    return x if kernel.active_dims is None else x.index_select(-1, kernel.active_dims)


def _is_radial(kernel: kernels.Kernel) -> bool:
    """Whether the kernel computes exactly what its GPyTorch base does, whatever its priors and constraints."""
    for base in (kernels.RBFKernel, kernels.MaternKernel, kernels.RQKernel):
        if isinstance(kernel, base):
            own = type(kernel)
            return (
                own.forward is base.forward
                and own.__call__ is kernels.Kernel.__call__
                and own.covar_dist is kernels.Kernel.covar_dist
                and own.lengthscale is kernels.Kernel.lengthscale
                and "forward" not in kernel.__dict__
            )
    # GPyTorch's KeOps kernels compute the same functions of the same lengthscales.
    return type(kernel) in (kernels.keops.RBFKernel, kernels.keops.MaternKernel)


def _radial(kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None, how: _How) -> LinearOperator:
    function, alpha = RBF, None
    if isinstance(kernel, (kernels.MaternKernel, kernels.keops.MaternKernel)):
        function = MATERN[kernel.nu]
    elif isinstance(kernel, kernels.RQKernel):
        function, alpha = RATIONAL_QUADRATIC, kernel.alpha
    lengthscale = kernel.lengthscale
    # Distances do not depend on the centre; without it float32 loses their digits far from the origin.
    centre = x1.detach().mean(dim=-2, keepdim=True)
    return RadialKernelLinearOperator(
        (x1 - centre) / lengthscale,
        x1.new_ones(()),
        x2=None if x2 is None else (x2 - centre) / lengthscale,
        alpha=alpha,
        function=function,
        **how.options(),
    )


def _sum(operators: list[LinearOperator]) -> LinearOperator:
    """The sum, with all diagonals that were added on the way collected in one noise vector."""
    noises = [part.noise for part in operators if isinstance(part, NoisyLinearOperator)]
    plain = [part.kernel if isinstance(part, NoisyLinearOperator) else part for part in operators]
    total = plain[0] if len(plain) == 1 else SumLinearOperator(*plain)
    return NoisyLinearOperator(total, reduce(torch.add, noises)) if noises else total


def _times(operator: LinearOperator, constant: Tensor) -> LinearOperator:
    """The operator times one constant a batch member, [*b]."""
    return operator * constant.unsqueeze(-1).unsqueeze(-1)


def _diagonal_of(diagonal: LinearOperator, shape: torch.Size) -> Tensor:
    return diagonal.diagonal(dim1=-1, dim2=-2).expand(shape[:-1])


def noise_operator(
    likelihood: Likelihood, function_dist: MultivariateNormal, *params: Any, **kwargs: Any
) -> LinearOperator:
    """The likelihood's noise covariance [*b, n, n], without evaluating the prior.

    Raises:
        ValueError: noise that depends on inputs which were not passed, or fixed noise of another size than the data.
    """
    num_data = function_dist.loc.shape[-1]
    noise_model = getattr(likelihood, "noise_covar", None)
    is_given = kwargs.get("noise") is not None
    if not (params or is_given) and isinstance(noise_model, (HeteroskedasticNoise, MultitaskHomoskedasticNoise)):
        raise ValueError(
            f"The noise of {type(likelihood).__name__} depends on the inputs (or task indices) of the data, which were "
            "not passed: call the marginal log likelihood as mll(model(x), y, x), as with GPyTorch's own."
        )
    if isinstance(likelihood, MultitaskGaussianLikelihood):
        interleaved = getattr(function_dist, "_interleaved", True)
        noise = likelihood._shaped_noise_covar(
            function_dist.mean.shape, add_noise=likelihood.has_global_noise, interleaved=interleaved
        )
    else:
        noise = likelihood._shaped_noise_covar(function_dist.mean.shape, *params, **kwargs)
    if isinstance(noise_model, FixedGaussianNoise) and not is_given and noise_model.noise.shape[-1] != num_data:
        # GPyTorch leaves such noise out, and then trains on the rest.
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
    caches: TileCaches | None = None,
    observed: Tensor | None = None,
    **kwargs: Any,
) -> LinearOperator:
    """H: the covariance of the observations, prior and noise.

    Args:
        likelihood: a Gaussian likelihood.
        function_dist: the prior at the training inputs, [*b, n] or [*b, n, T].
        params: the likelihood's own arguments.
        kwargs: likewise.
        products: how products with kernel matrices are computed.
        caches: where the operators keep their tiles.
        observed: [n] or [n * T], which data are observed; None is all.

    Returns:
        A NoisyLinearOperator where the noise is diagonal; the sum of both covariances where it is not.

    Raises:
        ValueError: noise that is not positive, not finite, or of another size than the data.
    """
    noise = noise_operator(likelihood, function_dist, *params, **kwargs)
    covariance = function_dist.lazy_covariance_matrix
    if not isinstance(noise, DiagLinearOperator):
        whole = kernel_operator(covariance, products, caches) + noise
        return whole if observed is None else MaskedLinearOperator(whole, observed, observed)
    variances = noise.diagonal(dim1=-1, dim2=-2)
    check_noise(variances)
    kernel = kernel_operator(
        covariance if observed is None else masked_covariance(covariance, observed), products, caches
    )
    if observed is not None:
        variances = variances[..., observed]
    if isinstance(kernel, NoisyLinearOperator):  # jitter from the model's own forward
        kernel, variances = kernel.kernel, variances + kernel.noise
    return NoisyLinearOperator(kernel, variances)


def masked_covariance(covariance: LinearOperator | Tensor, observed: Tensor) -> LinearOperator:
    """The rows and columns of observed data: taken from the inputs of kernels, cut out of everything else."""
    if isinstance(covariance, LazyEvaluatedKernelTensor) and covariance.shape[-1] == covariance.x1.shape[-2]:
        index = observed.nonzero().squeeze(-1)
        return covariance[..., index, :][..., :, index]
    if isinstance(covariance, AddedDiagLinearOperator):
        jitter = _diagonal_of(covariance._diag_tensor, covariance.shape)[..., observed]
        return AddedDiagLinearOperator(masked_covariance(covariance._linear_op, observed), DiagLinearOperator(jitter))
    if isinstance(covariance, SumLinearOperator):
        return SumLinearOperator(*(masked_covariance(part, observed) for part in covariance.linear_ops))
    if isinstance(covariance, ConstantMulLinearOperator):
        return ConstantMulLinearOperator(masked_covariance(covariance.base_linear_op, observed), covariance._constant)
    return MaskedLinearOperator(to_linear_operator(covariance), observed, observed)


def check_noise(noise: Tensor) -> None:
    """Raises ValueError with the first variance that is not finite and positive."""
    bad = ~(torch.isfinite(noise) & (noise > 0))
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"Every noise variance must be finite and positive, but noise{list(index)} is {noise[index].item()}. "
            "A constraint such as gpytorch.constraints.GreaterThan(1e-4) keeps a learned noise so."
        )


def flat_targets(function_dist: MultivariateNormal, target: Tensor) -> Tensor:
    """Targets [*b, n] or [*b, n, T] in the order of `function_dist.loc`: [*b, n] or [*b, n * T]."""
    if not isinstance(function_dist, MultitaskMultivariateNormal):
        return target
    if not function_dist._interleaved:
        target = target.mT
    return target.flatten(-2)


def observed_data(function_dist: MultivariateNormal, target: Tensor) -> Tensor | None:
    """Which of the data (in the order of `function_dist.loc`, [n] bool) are observed; None when all are.

    A datum counts as missing when its target is NaN, and only under GPyTorch's `observation_nan_policy`: under "mask"
    when it is NaN in any member of a batch, under "fill" when it is in all.

    Raises:
        ValueError: under "fill", targets that are NaN in some members of a batch and present in others.
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


@dataclass(frozen=True)
class PriorParts:
    """What a prior covariance is the sum of.

    Attributes:
        terms: kernels that nobody has evaluated yet.
        diagonal: [*b, n], jitter that the model's `forward` added; None for none.
        others: matrices that the model built.
    """

    terms: list[KernelTerm]
    diagonal: Tensor | None
    others: list[LinearOperator]


def prior_parts(covariance: LinearOperator | Tensor) -> PriorParts:
    """Takes sums, constants and added diagonals apart; evaluates nothing."""
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        return PriorParts([KernelTerm(covariance.kernel, covariance.x1)], None, [])
    if isinstance(covariance, AddedDiagLinearOperator):
        inner = prior_parts(covariance._linear_op)
        jitter = _diagonal_of(covariance._diag_tensor, covariance.shape)
        return replace(inner, diagonal=jitter if inner.diagonal is None else inner.diagonal + jitter)
    if isinstance(covariance, SumLinearOperator):
        parts = [prior_parts(part) for part in covariance.linear_ops]
        diagonals = [part.diagonal for part in parts if part.diagonal is not None]
        return PriorParts(
            [term for part in parts for term in part.terms],
            reduce(torch.add, diagonals) if diagonals else None,
            [other for part in parts for other in part.others],
        )
    if isinstance(covariance, ConstantMulLinearOperator):
        constant, inner = covariance._constant, prior_parts(covariance.base_linear_op)
        return PriorParts(
            [
                KernelTerm(term.kernel, term.inputs, constant if term.scale is None else constant * term.scale)
                for term in inner.terms
            ],
            None if inner.diagonal is None else inner.diagonal * constant.unsqueeze(-1),
            [other * constant for other in inner.others],
        )
    return PriorParts([], None, [to_linear_operator(covariance)])


def kernel_terms(covariance: LinearOperator | Tensor, observed: Tensor | None = None) -> list[KernelTerm]:
    """The sum of kernels that a prior covariance is, at the observed inputs.

    Raises:
        SpectralDensityMissingError: a part of the covariance is no kernel but a matrix that the model built.
    """
    parts = prior_parts(covariance if observed is None else masked_covariance(covariance, observed))
    if parts.others:
        raise SpectralDensityMissingError(
            f"The prior covariance contains a {type(parts.others[0]).__name__}, which is no kernel and has no random "
            "features. HutchinsonMarginalLogLikelihood needs none; PathwiseMarginalLogLikelihood(prior='exact') serves "
            "small data; posterior(x).rsample() draws from a posterior without them."
        )
    return parts.terms

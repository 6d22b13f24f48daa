"""The covariance of the observations: prior and noise, at the data that are observed."""

from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.lazy import LazyEvaluatedKernelTensor
from gpytorch.likelihoods import Likelihood, MultitaskGaussianLikelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HeteroskedasticNoise, MultitaskHomoskedasticNoise
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantMulLinearOperator,
    DiagLinearOperator,
    MaskedLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.linear_operators.from_gpytorch import added_diagonal, kernel_operator
from gpy_iterative.linear_operators.kernel_functions import GPYTORCH_SETTINGS
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCaches


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
        with GPYTORCH_SETTINGS:  # noise that is a model's prediction enters some of GPyTorch's
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
        jitter = added_diagonal(covariance)[..., observed]
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

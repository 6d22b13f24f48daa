"""The finite feature maps of GPyTorch's kernels, one registry entry a kernel."""

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import cast

import torch
from gpytorch import kernels
from linear_operator.operators import MatmulLinearOperator, RootLinearOperator
from torch import Tensor

from gpy_iterative.features.finite_feature_kernel import FiniteFeatureKernel, WeightSpaceFeatures
from gpy_iterative.linear_operators.from_gpytorch import active_inputs

#: From inputs [*b, n, d], reduced to the kernel's active dims, to its features.
FeatureMap = Callable[[Tensor], WeightSpaceFeatures]
_REGISTRY: dict[type[kernels.Kernel], Callable[[kernels.Kernel], FeatureMap]] = {}


def register_feature_map(
    kernel_class: type[kernels.Kernel],
) -> Callable[[Callable[..., FeatureMap]], Callable[..., FeatureMap]]:
    """Decorator: registers what makes the feature map of a kernel. Subclasses may compute anything, and are not covered.

    A kernel of your own needs no registration: derive it from `FiniteFeatureKernel`.
    """

    def register(make: Callable[..., FeatureMap]) -> Callable[..., FeatureMap]:
        _REGISTRY[kernel_class] = make
        return make

    return register


def has_feature_map(kernel: kernels.Kernel) -> bool:
    """Whether `feature_map` knows the kernel and all of its parts."""
    try:
        feature_map(kernel)
    except ValueError:
        return False
    return True


def feature_map(kernel: kernels.Kernel) -> FeatureMap:
    """The feature map of a kernel, which follows its hyperparameters.

    Raises:
        ValueError: the kernel, or a part of it, has none; the text names it and those that have.
    """
    if isinstance(kernel, FiniteFeatureKernel):
        return kernel.weight_space_features
    if type(kernel) in _REGISTRY:
        return _REGISTRY[type(kernel)](kernel)
    known = ", ".join(sorted(kernel_class.__name__ for kernel_class in _REGISTRY))
    raise ValueError(
        f"{type(kernel).__name__} has no finite feature map. Kernels that have one: {known}, DeepFeatureKernel, and any "
        "subclass of FiniteFeatureKernel. RFFKernel approximates an RBFKernel; for any other kernel take "
        "HutchinsonMarginalLogLikelihood."
    )


@register_feature_map(kernels.LinearKernel)
def _linear(kernel: kernels.LinearKernel) -> FeatureMap:
    def features(x: Tensor) -> WeightSpaceFeatures:
        variance = kernel.variance.squeeze(-2)
        return WeightSpaceFeatures(x, variance.expand(*variance.shape[:-1], x.shape[-1]))

    return features


@register_feature_map(kernels.ConstantKernel)
def _constant(kernel: kernels.ConstantKernel) -> FeatureMap:
    def features(x: Tensor) -> WeightSpaceFeatures:
        return WeightSpaceFeatures(x.new_ones(*x.shape[:-1], 1), kernel.constant)

    return features


@register_feature_map(kernels.RFFKernel)
def _random_fourier(kernel: kernels.RFFKernel) -> FeatureMap:
    def features(x: Tensor) -> WeightSpaceFeatures:
        covariance = kernel.forward(x, x)
        if isinstance(covariance, MatmulLinearOperator):  # x with NaN, which equals nothing
            return WeightSpaceFeatures.standard(covariance.left_linear_op.to_dense())
        return WeightSpaceFeatures.standard(cast(RootLinearOperator, covariance).root.to_dense())

    return features


@register_feature_map(kernels.PolynomialKernel)
def _polynomial(kernel: kernels.PolynomialKernel) -> FeatureMap:
    """(x^T x' + c)^p has the monomials of degree up to p, each with its multinomial coefficient times a power of c."""

    def features(x: Tensor) -> WeightSpaceFeatures:
        columns, counts, constants = (tensor.to(x.device) for tensor in _monomials(x.shape[-1], kernel.power))
        one = torch.ones_like(x[..., :1])
        padded, basis = torch.cat([x, one], dim=-1), one
        for factor in columns.unbind(-1):  # a third of the time of one gather and `prod`
            basis = basis * padded.index_select(-1, factor)
        offset = kernel.offset  # [*b, 1]
        return WeightSpaceFeatures(basis, counts.to(x) * offset.pow(constants))

    return features


@lru_cache(maxsize=8)
def _monomials(dims: int, degree: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of each monomial [m, degree], its multinomial coefficient and its power of the constant (index `dims`), [m].

    Kept from step to step: counting a thousand of them takes as long as a step of training.
    """
    with torch.inference_mode(False):
        monomials = list(combinations_with_replacement(range(dims + 1), degree))
        counts = [math.factorial(degree) / math.prod(map(math.factorial, Counter(m).values())) for m in monomials]
        constants = [m.count(dims) for m in monomials]
        return torch.tensor(monomials), torch.tensor(counts, dtype=torch.float64), torch.tensor(constants)


@register_feature_map(kernels.ScaleKernel)
def _scale(kernel: kernels.ScaleKernel) -> FeatureMap:
    # It calls its base's forward: the base's active dims are its own, applied already.
    base = feature_map(kernel.base_kernel)

    def features(x: Tensor) -> WeightSpaceFeatures:
        unscaled = base(x)
        return WeightSpaceFeatures(unscaled.basis, unscaled.variances * kernel.outputscale.unsqueeze(-1))

    return features


@register_feature_map(kernels.AdditiveKernel)
def _additive(kernel: kernels.AdditiveKernel) -> FeatureMap:
    parts = [(child, feature_map(child)) for child in kernel.kernels]
    return lambda x: concatenated([features(active_inputs(child, x)) for child, features in parts])


@register_feature_map(kernels.ProductKernel)
def _product(kernel: kernels.ProductKernel) -> FeatureMap:
    parts = [(child, feature_map(child)) for child in kernel.kernels]

    def features(x: Tensor) -> WeightSpaceFeatures:
        (child, first), *rest = parts
        result = first(active_inputs(child, x))
        for child, factor in rest:
            result = _times(result, factor(active_inputs(child, x)))
        return result

    return features


def concatenated(parts: list[WeightSpaceFeatures]) -> WeightSpaceFeatures:
    """The features of a sum of kernels."""
    if len(parts) == 1:
        return parts[0]
    batch = torch.broadcast_shapes(*(part.basis.shape[:-1] for part in parts))
    basis = torch.cat([part.basis.expand(*batch, part.basis.shape[-1]) for part in parts], dim=-1)
    batch = torch.broadcast_shapes(*(part.variances.shape[:-1] for part in parts))
    return WeightSpaceFeatures(
        basis, torch.cat([part.variances.expand(*batch, part.variances.shape[-1]) for part in parts], dim=-1)
    )


def _times(left: WeightSpaceFeatures, right: WeightSpaceFeatures) -> WeightSpaceFeatures:
    """The features of a product: all products of two, row by row."""
    outer = lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
    return WeightSpaceFeatures(outer(left.basis, right.basis), outer(left.variances, right.variances))

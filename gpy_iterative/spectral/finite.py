"""Kernels with finitely many features."""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import combinations_with_replacement
from typing import Any, cast

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy, LinearPredictionStrategy
from linear_operator import LinearOperator
from linear_operator.operators import LowRankRootLinearOperator, MatmulLinearOperator, RootLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.from_gpytorch import are_same_inputs
from gpy_iterative.linear_operators.kernel_functions import class_of
from gpy_iterative.linear_operators.radial_inputs import active_inputs, side_by_side


@dataclass(frozen=True)
class WeightSpaceFeatures:
    """k(x, x') = sum_j variances_j basis_j(x) basis_j(x'): a linear model with weights N(0, variances).

    Attributes:
        basis: [*b, n, m].
        variances: [*b, m], positive, with outputscales.
    """

    basis: Tensor
    variances: Tensor

    @classmethod
    def standard(cls, basis: Tensor) -> "WeightSpaceFeatures":
        """Weights of variance 1."""
        return cls(basis, basis.new_ones(*basis.shape[:-2], basis.shape[-1]))

    def scaled(self) -> Tensor:
        """phi(x) [*b, n, m] with k(x, x') = phi(x)^T phi(x')."""
        return self.basis * self.variances.sqrt().unsqueeze(-2)


class FiniteFeatureKernel(Kernel):
    """Base of kernels features(x)^T features(x') with m features.

    A subclass defines `features`, and `weight_space_features` to separate scales.
    """

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """phi(x) [*b, n, m] at inputs [*b, n, d] with active dims only, row by row."""
        raise NotImplementedError(f"{type(self).__name__} must define features(x).")

    def weight_space_features(self, x: Tensor) -> WeightSpaceFeatures:
        """Basis and variances. Raises ValueError if `features` changes the rows."""
        features = self.features(x)
        if features.shape[-2:-1] != x.shape[-2:-1]:
            raise ValueError(
                f"{type(self).__name__}.features must map [*b, n, d] to [*b, n, m]; it mapped {tuple(x.shape)} to "
                f"{tuple(features.shape)}."
            )
        return WeightSpaceFeatures.standard(features)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> LinearOperator | Tensor:
        """k(x1, x2) or its diagonal; a root for equal inputs."""
        if last_dim_is_batch or params:
            raise ValueError(
                f"{type(self).__name__} does not support the kernel argument {', '.join(params) or 'last_dim_is_batch'}."
            )
        left = self.features(x1)
        if are_same_inputs(x1, x2):
            if diag:
                return left.square().sum(-1)
            low_rank = left.shape[-1] < left.shape[-2]
            return LowRankRootLinearOperator(left) if low_rank else RootLinearOperator(left)
        right = self.features(x2)
        return (left * right).sum(-1) if diag else MatmulLinearOperator(left, right.mT)

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: Any, train_labels: Any, likelihood: Any
    ) -> DefaultPredictionStrategy:
        """GPyTorch's for features."""
        return LinearPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood)


#: From inputs [*b, n, d] with active dims only.
FeatureMap = Callable[[Tensor], WeightSpaceFeatures]
_REGISTRY: dict[type[Kernel], Callable[[Kernel], FeatureMap]] = {}


def register_feature_map(
    kernel_class: type[Kernel],
) -> Callable[[Callable[..., FeatureMap]], Callable[..., FeatureMap]]:
    """Decorator: registers the function from a kernel of exactly this class to its feature map."""

    def register(make: Callable[..., FeatureMap]) -> Callable[..., FeatureMap]:
        _REGISTRY[kernel_class] = make
        return make

    return register


def has_feature_map(kernel: Kernel) -> bool:
    """Whether `feature_map` knows the kernel."""
    try:
        feature_map(kernel)
    except ValueError:
        return False
    return True


def feature_map(kernel: Kernel) -> FeatureMap:
    """The kernel's feature map, which follows its hyperparameters.

    Raises:
        ValueError: the kernel or a part has none.
    """
    if isinstance(kernel, FiniteFeatureKernel):
        return kernel.weight_space_features
    kind = class_of(kernel)
    if kind in _REGISTRY:
        return _REGISTRY[kind](kernel)
    known = ", ".join(sorted(kernel_class.__name__ for kernel_class in _REGISTRY))
    raise ValueError(
        f"{type(kernel).__name__} has no finite feature map. Kernels that have one: {known}, DeepFeatureKernel, and any "
        "subclass of FiniteFeatureKernel. RFFKernel approximates an RBFKernel; for any other kernel take "
        "HutchinsonMarginalLogLikelihood."
    )


@register_feature_map(kernels.LinearKernel)
def _linear(kernel: kernels.LinearKernel) -> FeatureMap:
    variance = lambda: kernel.variance.squeeze(-2)
    return lambda x: WeightSpaceFeatures(x, variance().expand(*variance().shape[:-1], x.shape[-1]))


@register_feature_map(kernels.ConstantKernel)
def _constant(kernel: kernels.ConstantKernel) -> FeatureMap:
    return lambda x: WeightSpaceFeatures(x.new_ones(*x.shape[:-1], 1), kernel.constant)


@register_feature_map(kernels.RFFKernel)
def _random_fourier(kernel: kernels.RFFKernel) -> FeatureMap:
    def features(x: Tensor) -> WeightSpaceFeatures:
        covariance = kernel.forward(x, x)
        if isinstance(covariance, MatmulLinearOperator):  # x with NaN, not equal to itself
            return WeightSpaceFeatures.standard(covariance.left_linear_op.to_dense())
        return WeightSpaceFeatures.standard(cast(RootLinearOperator, covariance).root.to_dense())

    return features


@register_feature_map(kernels.PolynomialKernel)
def _polynomial(kernel: kernels.PolynomialKernel) -> FeatureMap:
    def features(x: Tensor) -> WeightSpaceFeatures:
        columns, counts, constants = (tensor.to(x.device) for tensor in _monomials(x.shape[-1], kernel.power))
        one = x.new_ones(*x.shape[:-1], 1)
        padded, basis = torch.cat([x, one], dim=-1), one
        for factor in columns.unbind(-1):  # faster than a gather
            basis = basis * padded.index_select(-1, factor)
        offset = kernel.offset  # [*b, 1]
        return WeightSpaceFeatures(basis, counts.to(x) * offset.pow(constants))

    return features


@lru_cache(maxsize=8)
def _monomials(dims: int, degree: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factors [m, degree], multinomial coefficients [m] and powers of the constant [m]."""
    with torch.inference_mode(False):
        monomials = list(combinations_with_replacement(range(dims + 1), degree))
        counts = [math.factorial(degree) / math.prod(map(math.factorial, Counter(m).values())) for m in monomials]
        constants = [m.count(dims) for m in monomials]
        return torch.tensor(monomials), torch.tensor(counts, dtype=torch.float64), torch.tensor(constants)


@register_feature_map(kernels.ScaleKernel)
def _scale(kernel: kernels.ScaleKernel) -> FeatureMap:
    # GPyTorch calls the base's forward, which ignores active dims.
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
    return lambda x: reduce(_times, (features(active_inputs(child, x)) for child, features in parts))


def concatenated(parts: list[WeightSpaceFeatures]) -> WeightSpaceFeatures:
    """Features of a sum of kernels."""
    basis, variances = ([getattr(part, name) for part in parts] for name in ("basis", "variances"))
    return WeightSpaceFeatures(side_by_side(basis), side_by_side(variances))


def _times(left: WeightSpaceFeatures, right: WeightSpaceFeatures) -> WeightSpaceFeatures:
    outer = lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
    return WeightSpaceFeatures(outer(left.basis, right.basis), outer(left.variances, right.variances))


class DeepFeatureKernel(FiniteFeatureKernel):
    """k(x, x') = base_kernel(network(x), network(x')).

    Mini-batch methods run this network on their batch, but one in the model's `forward` on all data.

    Args:
        feature_extractor: a module from [*b, n, d] to [*b, n, e], row by row: batch normalisation in evaluation mode.
        base_kernel: such as `ScaleKernel(LinearKernel())`, m = e, or
            `ScaleKernel(RFFKernel(num_samples=500, num_dims=e))`, m = 1000.

    Raises:
        ValueError: base_kernel has no finite feature map.
    """

    def __init__(self, feature_extractor: torch.nn.Module, base_kernel: Kernel, **kwargs: Any) -> None:
        if not isinstance(feature_extractor, torch.nn.Module):
            raise TypeError(f"feature_extractor must be a torch.nn.Module, got {feature_extractor!r}.")
        feature_map(base_kernel)
        super().__init__(**kwargs)
        self.feature_extractor = feature_extractor
        self.base_kernel = base_kernel

    def features(self, x: Tensor) -> Tensor:
        return self.weight_space_features(x).scaled()

    def weight_space_features(self, x: Tensor) -> WeightSpaceFeatures:
        extracted = self.feature_extractor(x)
        if extracted.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"feature_extractor must map [*b, n, d] to [*b, n, e], row by row; it mapped {tuple(x.shape)} to "
                f"{tuple(extracted.shape)}."
            )
        return feature_map(self.base_kernel)(active_inputs(self.base_kernel, extracted))

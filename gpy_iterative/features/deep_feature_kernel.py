"""A deep kernel whose network is a part of the kernel."""

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpy_iterative.features.feature_maps import feature_map
from gpy_iterative.features.finite_feature_kernel import FiniteFeatureKernel, WeightSpaceFeatures
from gpy_iterative.linear_operators.from_gpytorch import active_inputs


class DeepFeatureKernel(FiniteFeatureKernel):
    """k(x, x') = base_kernel(network(x), network(x')), for a base kernel with a finite feature map.

    Inside the kernel the network runs when the kernel is evaluated, and `model(train_x)` evaluates nothing: a mini-batch
    method runs it on its batch. A network that the model's `forward` calls runs on all data at every step.

    Args:
        feature_extractor: a module from [*b, n, d] to [*b, n, e], row by row: its batch normalisation, if it has any,
            must be in evaluation mode.
        base_kernel: any of the kernels that `feature_map` knows, such as `ScaleKernel(LinearKernel())`, m = e, or
            `ScaleKernel(RFFKernel(num_samples=500, num_dims=e))`, m = 1000. With a linear kernel a variance of 1 / e at the
            start keeps the prior of f at the size of one feature.
        kwargs: passed to `gpytorch.kernels.Kernel`.

    Raises:
        ValueError: a base kernel without a finite feature map.
        TypeError: an extractor that is no module.
    """

    def __init__(self, feature_extractor: torch.nn.Module, base_kernel: Kernel, **kwargs: Any) -> None:
        if not isinstance(feature_extractor, torch.nn.Module):
            raise TypeError(f"feature_extractor must be a torch.nn.Module, got {feature_extractor!r}.")
        feature_map(base_kernel)
        super().__init__(**kwargs)
        self.feature_extractor = feature_extractor
        self.base_kernel = base_kernel

    def features(self, x: Tensor) -> Tensor:
        """phi(x) [*b, n, m]."""
        return self.weight_space_features(x).scaled()

    def weight_space_features(self, x: Tensor) -> WeightSpaceFeatures:
        """The base kernel's, at the network's output. Raises ValueError where that has other rows than the input."""
        extracted = self.feature_extractor(x)
        if extracted.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"feature_extractor must map [*b, n, d] to [*b, n, e], row by row; it mapped {tuple(x.shape)} to "
                f"{tuple(extracted.shape)}."
            )
        return feature_map(self.base_kernel)(active_inputs(self.base_kernel, extracted))

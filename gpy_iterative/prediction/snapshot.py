"""What a posterior was computed from, compared by value.

GPyTorch writes parameters through `.data` (`initialize`, BoTorch's bounds, optimisers in evaluation mode), so neither
object identity nor a tensor's version tells whether a model has moved.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.prediction.shared_columns import unexpanded


@dataclass(frozen=True)
class ModelSnapshot:
    """Copies of all numbers that a posterior depends on.

    Attributes:
        tensors: parameters, buffers and fixed noises of model and likelihood, training inputs and targets, by name.
        nan_policy: GPyTorch's `observation_nan_policy` at the time.
    """

    tensors: dict[str, Tensor]
    nan_policy: str

    @classmethod
    def of(cls, model: ExactGP, likelihood: Likelihood) -> "ModelSnapshot":
        """Copies; cost O(n d)."""
        tensors = {name: tensor.detach().clone() for name, tensor in _numbers(model, likelihood)}
        return cls(tensors, gpytorch.settings.observation_nan_policy.value())

    def describes(self, model: ExactGP, likelihood: Likelihood) -> bool:
        """Whether every number, its dtype and its device are still the same. Cost O(n d)."""
        if self.nan_policy != gpytorch.settings.observation_nan_policy.value():
            return False
        current = dict(_numbers(model, likelihood))
        return current.keys() == self.tensors.keys() and all(
            same_tensor(tensor, self.tensors[name]) for name, tensor in current.items()
        )


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype, device and values; NaN equals NaN, since missing targets are NaN."""
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    if torch.equal(left, right):
        return True
    return left.is_floating_point() and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _numbers(model: ExactGP, likelihood: Likelihood) -> Iterator[tuple[str, Tensor]]:
    for owner_name, owner in (("model", model), ("likelihood", likelihood)):
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            yield f"{owner_name}.{name}", tensor
    for module_name, module in likelihood.named_modules():
        # Fixed noises are plain attributes, neither parameters nor buffers.
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"likelihood.{module_name}.{name}", value
    for index, inputs in enumerate(unexpanded(model.train_inputs or ())):
        yield f"train_inputs.{index}", inputs
    if model.train_targets is not None:
        yield "train_targets", model.train_targets

"""A tensor that depends on a kernel's hyperparameters alone, kept for as long as these stay what they are."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch import kernels
from torch import Tensor


@dataclass
class KeptAt:
    """One value and the hyperparameters that it belongs to, recognised by value (`initialize` moves no version)."""

    parameters: Tensor | None = None
    value: Tensor | None = None

    @torch.no_grad()
    def get(self, kernel: kernels.Kernel, evaluate: Callable[[], Tensor]) -> Tensor:
        """The kept value, or a new one where hyperparameters have moved; without a graph."""
        parameters = torch.cat([parameter.reshape(-1).double() for parameter in kernel.parameters()])
        if self.value is None or self.parameters is None or not torch.equal(self.parameters, parameters):
            self.value = evaluate()
            self.parameters = parameters
        return self.value

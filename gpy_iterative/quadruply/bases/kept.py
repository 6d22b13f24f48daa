"""A tensor that depends on a kernel's hyperparameters alone, kept for as long as these stay what they are."""

from collections.abc import Callable
from typing import Any

import torch
from gpytorch import kernels
from torch import Tensor


class KeptAt(torch.nn.Module):
    """One value and the hyperparameters that it belongs to, recognised by value (`initialize` moves no version).

    A part of the basis that keeps it, so that it is forgotten when that is converted, moved or loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    @torch.inference_mode(False)  # later calls may ask for gradients
    @torch.no_grad()
    def get(self, kernel: kernels.Kernel, evaluate: Callable[[], Tensor]) -> Tensor:
        """The kept value, or a new one where hyperparameters have moved; without a graph."""
        current = [*kernel.parameters(), *kernel.buffers()]
        stays = len(current) == len(self.hyperparameters) and all(map(torch.equal, current, self.hyperparameters))
        if self.value is None or not stays:
            self.value = evaluate()
            self.hyperparameters = [tensor.detach().clone() for tensor in current]
        return self.value

    def forget(self) -> None:
        """Evaluates anew when it is next asked."""
        self.value: Tensor | None = None
        self.hyperparameters: list[Tensor] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeptAt":
        self.forget()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args, **kwargs)

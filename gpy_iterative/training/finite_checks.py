"""Gradients are checked before an optimiser sees them: one that is not finite ends the backward pass."""

from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from gpy_iterative.errors import NonFiniteError


def with_checked_gradient(value: Tensor, module: torch.nn.Module) -> Tensor:
    """The value itself, whose backward pass raises NonFiniteError where the gradient of a parameter is not finite.

    Args:
        value: of a marginal log likelihood, [*b].
        module: whose parameters are checked.

    Parameters and their `.grad` are then as they were before the pass. Checked is what reaches the parameters, after
    whatever else their graphs have made of the value's derivative: a kernel may be finite, and its own derivative not.
    """
    if value.requires_grad:
        value.register_hook(_Watch(module).begin)
    return value


class _Watch:
    """The parameters' hooks of one backward pass at a time, and the gradients that they had before it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = [
            (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
        ]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._graph_task = -1

    def begin(self, gradient: Tensor) -> None:
        """The value's own hook, called before anything behind the value is differentiated."""
        self._end()  # after a pass that something else has ended
        self._graph_task = torch._C._current_graph_task_id()
        self._handles = [p.register_hook(partial(self._check, name, p)) for name, p in self._parameters]
        Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _check(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """A parameter's hook, called before its gradient is added to `.grad`."""
        if torch._C._current_graph_task_id() != self._graph_task:
            self._end()
            return
        entries = gradient._values() if gradient.is_sparse else gradient
        if torch.isfinite(entries).all():
            self._before.append((parameter, None if parameter.grad is None else parameter.grad.clone()))
            return
        for other, before in self._before:
            other.grad = before
        self._end()
        raise NonFiniteError(
            f"The gradient of the parameter {name} is not finite, though the value is; no parameter and no .grad was "
            "changed. Either a derivative of the kernel or mean is not finite, as that of a square root of a distance of "
            "zero (add a small number to it, or clamp it), or the numbers are too large for their dtype (standardise the "
            "targets, or use float64)."
        )

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._before = [], []


def check_hyperparameters(model: torch.nn.Module) -> None:
    """Raises NonFiniteError, which BoTorch's line search steps over, with the parameter's name."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(
                f"The parameter {name} is not finite. A smaller learning rate, or a bound on the parameter, "
                "keeps the optimiser from leaving the domain."
            )

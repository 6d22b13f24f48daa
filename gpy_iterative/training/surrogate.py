"""A scalar with one value and another function's gradient.

The gradient of the log marginal likelihood is that of

    1/2 a^T H a - 1/(2s) sum_j w_j^T H z_j - a^T (y - mean)

with constant a = H^-1 (y - mean), w_j = H^-1 xi_j, z_j = S^-1 xi_j.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor
from torch.autograd import Variable

from gpy_iterative.checks import check_autocast
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import matrix_derivative
from gpy_iterative.worker_threads import divided

PullBack = Callable[..., Sequence[Tensor | None]]


class _GivenGradient(torch.autograd.Function):
    """A value with another gradient by some tensors, a function of the incoming gradient and of saved tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pull_back: PullBack, saved: Sequence[Tensor | None], *_: Tensor) -> Tensor:
        ctx.pull_back = pull_back
        # Saved through autograd, so that in-place changes before backward raise an error.
        ctx.save_for_backward(*saved)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The gradient of an iterative marginal log likelihood cannot be differentiated again: it is an estimate "
                "whose solves are held fixed. Call backward() without create_graph=True."
            )
        return (*gradients, None, None, *ctx.pull_back(*gradients, *ctx.saved_tensors))


def with_derivatives(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A value [*b] with gradient: pairs of a tensor [*b, ...] or [...] and the derivative by it [*b, ...].

    Tensors without a gradient are left out.
    """
    moving = [(tensor, derivative) for tensor, derivative in pairs if tensor.requires_grad]
    tensors, derivatives = [tensor for tensor, _ in moving], [derivative for _, derivative in moving]
    return _GivenGradient.apply(value, partial(_scaled, [tensor.shape for tensor in tensors]), derivatives, *tensors)


def _scaled(shapes: Sequence[torch.Size], gradient: Tensor, *derivatives: Tensor) -> list[Tensor]:
    factors = (gradient.reshape((*gradient.shape, *[1] * (part.dim() - gradient.dim()))) for part in derivatives)
    parts = zip(factors, derivatives, shapes, strict=True)
    return [(factor * derivative).sum_to_size(shape) for factor, derivative, shape in parts]


def surrogate(operator: LinearOperator, value: Tensor, left: Tensor, right: Tensor | None = None) -> Tensor:
    """The value [*b] with a gradient by an operator H [*b, n, n], which has a graph.

    Args:
        left: [*b, n, k]; without right, the derivatives by the entries of H [*b, n, n].
        right: [*b, n, k]; the derivative is sum_k left_k^T dH right_k.
    """
    tensors = operator.representation()
    pull_back = partial(_bilinear, operator.representation_tree())
    return _GivenGradient.apply(value, pull_back, (left, right, *tensors), *tensors)


def _bilinear(
    tree: Any, gradient: Tensor, left: Tensor, right: Tensor | None, *tensors: Tensor
) -> Sequence[Tensor | None]:
    """Of sum_k left_k^T H right_k, or of sum_ij left_ij H_ij without `right`."""
    check_autocast()
    operator, left = tree(*tensors), gradient[..., None, None] * left
    if right is None:
        return matrix_derivative(operator, left)
    with divided():
        return operator._bilinear_derivative(left, right)


def with_checked_gradient(value: Tensor, module: torch.nn.Module) -> Tensor:
    """A backward pass with a parameter's non-finite gradient raises NonFiniteError; every `.grad` stays unchanged."""
    if value.requires_grad:
        value.register_hook(partial(_watch, module))
    return value


def _watch(module: torch.nn.Module, _: Tensor) -> None:
    """The value's hook, called first: adds hooks of parameters."""
    watched = _BackwardPass(torch._C._current_graph_task_id())
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    watched.handles += [parameter.register_hook(partial(watched.check, name, parameter)) for name, parameter in trained]
    Variable._execution_engine.queue_callback(watched.end)


@dataclass
class _BackwardPass:
    graph_task: int
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    changed: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # gradients before the pass

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.changed.clear()

    @torch.no_grad()
    def check(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Called before `.grad` changes."""
        if torch._C._current_graph_task_id() != self.graph_task:  # another error ended this pass
            self.end()
            return
        entries = gradient._values() if gradient.is_sparse else gradient
        if torch.isfinite(entries).all():
            self.changed.append((parameter, None if parameter.grad is None else parameter.grad.clone()))
            return
        for other, before in self.changed:
            other.grad = before
        self.end()
        raise NonFiniteError(
            f"The gradient of the parameter {name} is not finite, though the value is; no parameter and no .grad was "
            "changed. Either a derivative of the kernel or mean is not finite, as that of a square root of a distance of "
            "zero (add a small number to it, or clamp it), or the numbers are too large for their dtype (standardise "
            "inputs and targets, or use float64)."
        )

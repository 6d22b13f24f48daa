"""A scalar with one value and another function's gradient.

The gradient of the log marginal likelihood with respect to everything is the gradient of

    1/2 a^T H a - 1/(2s) sum_j w_j^T H z_j - a^T (y - mean)

in which a = H^-1 (y - mean), w_j = H^-1 xi_j and z_j = S^-1 xi_j are held fixed. Every term that
contains H is a column of `left` times H times the same column of `right`, so the whole derivative is one
closed-form pass of the operator: no second graph, no n x n matrix. (Where H^-1 is known as a matrix, the weight of
every entry of dH is, and the pass takes these.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import matrix_derivative
from gpy_iterative.worker_threads import divided


class _BilinearSurrogate(torch.autograd.Function):
    """Returns `value`; differentiates as sum_k left_k^T H right_k, or as sum_ij left_ij H_ij without `right`."""

    @staticmethod
    def forward(
        ctx: Any,
        tree: Any,
        value: Tensor,
        left: Tensor,
        right: Tensor | None,
        *representation: Tensor,
    ) -> Tensor:
        ctx.tree = tree
        # Saved through autograd, so that parameters changed in place between forward and backward
        # raise an error instead of giving a gradient of two different models.
        ctx.save_for_backward(left, right, *representation)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        (gradient,) = gradients
        left, right, *representation = ctx.saved_tensors
        operator = ctx.tree(*representation)
        scale = gradient[..., None, None]
        if right is None:
            derivatives = matrix_derivative(operator, scale * left)
        else:
            with divided():
                derivatives = operator._bilinear_derivative(scale * left, right)
        return (None, None, None, None, *derivatives)


class _GivenDerivatives(torch.autograd.Function):
    """Returns `value`; its derivatives with respect to as many tensors are given."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, derivatives: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*derivatives)
        ctx.shapes = [tensor.shape for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        (gradient,) = gradients

        def scaled(derivative: Tensor, shape: torch.Size) -> Tensor:
            factor = gradient.reshape(*gradient.shape, *[1] * (derivative.dim() - gradient.dim()))
            return (factor * derivative).sum_to_size(shape)

        parts = zip(ctx.needs_input_grad[2:], ctx.saved_tensors, ctx.shapes, strict=True)
        return (None, None, *(scaled(derivative, shape) if needed else None for needed, derivative, shape in parts))


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The gradient of an iterative marginal log likelihood cannot be differentiated again: it is an "
            "estimate whose solves are held fixed. Call backward() without create_graph=True."
        )


def with_derivatives(value: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A value whose derivatives are known, with the gradient attached.

    Args:
        value: [*b], detached.
        pairs: tensors [*b, ...] with the graph to the user's parameters, or without the batch, and the derivatives
            [*b, ...] of the value with respect to each, detached.

    Returns:
        [*b] tensor. Its backward raises RuntimeError under `create_graph=True`.
    """
    tensors, derivatives = zip(*pairs, strict=True)
    return _GivenDerivatives.apply(value, derivatives, *tensors)


def surrogate(
    operator: LinearOperator,
    value: Tensor,
    left: Tensor,
    right: Tensor | None,
    weights: Tensor,
    residual: Tensor,
) -> Tensor:
    """The log marginal likelihood's value, with its gradient estimator attached.

    Args:
        operator: H [*b, n, n], with the graph to the user's parameters.
        value: [*b], detached.
        left: [*b, n, k], detached.
        right: [*b, n, k], detached: d/dtheta of the result is sum_k left_k^T dH/dtheta right_k. With None, left is
            the whole weight matrix [*b, n, n] and d/dtheta of the result sum_ij left_ij dH_ij/dtheta.
        weights: a = H^-1 (y - mean) [*b, n], detached.
        residual: y - mean [*b, n], with the graph to the mean's parameters (and the targets, if they have one).

    Returns:
        [*b] tensor. Its backward costs one derivative pass of the operator, n^2 (d + k) multiply-adds for a
        kernel matrix, and raises RuntimeError under `create_graph=True`.
    """
    result = _BilinearSurrogate.apply(operator.representation_tree(), value, left, right, *operator.representation())
    if residual.requires_grad:
        result = result + with_derivatives(torch.zeros_like(value), [(residual, -weights)])
    return result

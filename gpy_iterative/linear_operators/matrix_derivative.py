"""The derivative of a weighted sum of a matrix's entries: what an exact gradient, whose weights are no product of a few
vectors, is made of.

`LinearOperator._bilinear_derivative` takes weights of low rank, L R^T. For a dense weight matrix that detour would cost
another n^3.
"""

from functools import singledispatch

import torch
from linear_operator import LinearOperator
from linear_operator.operators import ConstantMulLinearOperator, SumLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator


@singledispatch
def matrix_derivative(operator: LinearOperator, weights: Tensor) -> tuple[Tensor | None, ...]:
    """The derivatives of `(weights * operator).sum()` with respect to `operator.representation()`.

    Args:
        operator: [*b, n, m].
        weights: [*b, n, m], constant.

    Returns:
        One tensor, or None, for each of the representation. Cost: one evaluation of the matrix where it is a kernel's;
        n^2 m multiply-adds for operators that only know bilinear derivatives.
    """
    identity = torch.eye(operator.shape[-1], dtype=weights.dtype, device=weights.device)
    return operator._bilinear_derivative(weights, identity.expand(*weights.shape[:-2], *identity.shape))


@matrix_derivative.register
def _(operator: TiledLinearOperator, weights: Tensor) -> tuple[Tensor | None, ...]:
    return operator.matrix_derivative(weights)


@matrix_derivative.register
def _(operator: SumLinearOperator, weights: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(derivative for term in operator.linear_ops for derivative in matrix_derivative(term, weights))


@matrix_derivative.register
def _(operator: ConstantMulLinearOperator, weights: Tensor) -> tuple[Tensor | None, ...]:
    constant, base = operator._constant, operator.base_linear_op
    derivatives = matrix_derivative(base, weights * constant.unsqueeze(-1).unsqueeze(-1))
    if not constant.requires_grad:
        return (*derivatives, None)
    return (*derivatives, (weights * base.to_dense()).sum((-2, -1)).sum_to_size(constant.shape))


@matrix_derivative.register
def _(operator: NoisyLinearOperator, weights: Tensor) -> tuple[Tensor | None, ...]:
    kernel = matrix_derivative(operator.kernel, weights)
    if not operator.noise.requires_grad:
        return (*kernel, None)
    return (*kernel, weights.diagonal(dim1=-2, dim2=-1).sum_to_size(operator.noise.shape))

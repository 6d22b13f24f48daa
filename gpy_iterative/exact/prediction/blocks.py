"""Products, rows and small blocks of any prior covariance, with its structure kept."""

import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.linear_operators import extensions
from gpy_iterative.linear_operators.masked import spread_rows


def product(operator: LinearOperator, columns: Tensor) -> Tensor:
    """`operator @ columns` in the columns' dtype, without a graph where no tensor requires a gradient."""
    operator = converted(operator, columns.dtype)
    tensors = (columns, *operator.representation())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return operator @ columns
    with torch.no_grad():
        return operator._matmul(columns)


def converted(operator: LinearOperator, dtype: torch.dtype) -> LinearOperator:
    if dtype != torch.float64 or operator.dtype == dtype:
        return operator
    return extensions.in_float64(operator, keeps_tiles=False)


def rows_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows [*f, *b, t, n] times matrix [*b, n, s]; `@` would copy matrices."""
    return torch.einsum("...tn,...ns->...ts", rows, matrix)


@torch.no_grad()
def principal_blocks(operator: LinearOperator, index: Tensor) -> Tensor:
    """operator[index, index] for index [*batch, *b, t, k]: [*batch, *b, t, k, k]."""
    if not operator.batch_shape:
        sets = index.reshape(-1, index.shape[-1])
        return extensions.principal_blocks(operator, sets).reshape(*index.shape, index.shape[-1])
    first, dims = operator.batch_shape[0], len(operator.batch_shape)
    position = index.dim() - 2 - dims
    members = [principal_blocks(operator[i], index.select(position, i)) for i in range(first)]
    return torch.stack(members, dim=position)


def row_block(operator: LinearOperator, rows: slice) -> LinearOperator:
    """`operator[..., rows, :]`; linear_operator would interpolate the whole matrix."""
    group = row_group(operator)
    points = slice(rows.start // group, rows.stop // group)
    if isinstance(operator, KroneckerProductLinearOperator):
        data, *task = operator.linear_ops
        return type(operator)(row_block(data, points), *task)
    if isinstance(operator, BlockInterleavedLinearOperator):
        return BlockInterleavedLinearOperator(row_block(operator.base_linear_op, points))
    if isinstance(operator, SumLinearOperator):
        return SumLinearOperator(*(row_block(part, rows) for part in operator.linear_ops))
    if isinstance(operator, ConstantMulLinearOperator):
        return ConstantMulLinearOperator(row_block(operator.base_linear_op, rows), operator._constant)
    return operator[..., rows, :]


def row_group(operator: LinearOperator) -> int:
    """Number of consecutive rows that `row_block` cannot separate."""
    if isinstance(operator, KroneckerProductLinearOperator):
        return operator.shape[-2] // operator.linear_ops[0].shape[-2]
    if isinstance(operator, BlockInterleavedLinearOperator):
        return operator.base_linear_op.shape[-3]
    if isinstance(operator, SumLinearOperator):
        return max(row_group(part) for part in operator.linear_ops)
    if isinstance(operator, ConstantMulLinearOperator):
        return row_group(operator.base_linear_op)
    return 1


def scatter_rows(columns: Tensor, observed: Tensor | None) -> Tensor:
    """[*b, m, s] to [*b, n, s], zero for unobserved data."""
    return columns if observed is None else spread_rows(columns, observed.nonzero().squeeze(-1), len(observed))


def as_columns(rhs: Tensor, dims: int) -> Tensor:
    """[*f, *k, m, s] to [*k, m, s * F] of so many dimensions, for one product with [*k, m, m]."""
    extra = rhs.dim() - dims
    if extra <= 0:
        return rhs
    return rhs.flatten(0, extra - 1).movedim(0, -1).flatten(-2)


def from_columns(columns: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_columns`, also of other rows."""
    extra = like.dim() - columns.dim()
    if extra <= 0:
        return columns
    members = like.shape[:extra]
    return columns.unflatten(-1, (like.shape[-1], members.numel())).movedim(-1, 0).unflatten(0, members)

"""Parts of a product with a symmetric operator: some rows, some columns, a block on the diagonal.

Solvers that visit the matrix block by block call these instead of slicing: an operator that keeps tiles serves them
from its tiles. The defaults work for any LinearOperator. All take unbatched operators and run without autograd.
"""

from functools import singledispatch

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.linear_operators.tiles.tiles import Rows


@singledispatch
def rows_matmul(operator: LinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    """operator[rows, :] @ rhs: rhs [n, s] gives [len(rows), s]; rows is a slice or an index tensor.

    Raises:
        ValueError: rhs has another number of rows.
    """
    return operator[rows, :] @ rhs


@singledispatch
def columns_matmul(operator: LinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    """operator[:, columns] @ rhs: rhs [len(columns), s] gives [n, s].

    Raises:
        ValueError: rhs has another number of rows.
    """
    return operator[:, columns] @ rhs


@singledispatch
def principal_block(operator: LinearOperator, block: slice) -> Tensor:
    """operator[block, block] as a dense tensor that the caller may overwrite."""
    return to_dense(operator[block, block]).clone()


@singledispatch
def dense_rows(operator: LinearOperator, rows: Tensor) -> Tensor:
    """operator[..., rows, :] as a dense [*b, len(rows), n]: what a pivoted Cholesky factor is made of."""
    return to_dense(operator[..., rows, :])


@dense_rows.register
def _(operator: TiledLinearOperator, rows: Tensor) -> Tensor:
    return operator.tiles().dense_rows(rows) * operator.tile_scale  # not in place: several scales may share the tiles


@rows_matmul.register
def _(operator: TiledLinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    _check_rows(rhs, operator.shape[-1])
    return operator.tiles().rows_matmul(rows, rhs).mul_(operator.tile_scale)


@columns_matmul.register
def _(operator: TiledLinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    _check_rows(rhs, len(range(*columns.indices(operator.shape[-1]))))
    return operator.tiles().columns_matmul(columns, rhs).mul_(operator.tile_scale)


@principal_block.register
def _(operator: TiledLinearOperator, block: slice) -> Tensor:
    return operator.tiles().principal_block(block).mul_(operator.tile_scale)


@rows_matmul.register
def _(operator: SumLinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    return sum(rows_matmul(part, rows, rhs) for part in operator.linear_ops)


@columns_matmul.register
def _(operator: SumLinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    return sum(columns_matmul(part, columns, rhs) for part in operator.linear_ops)


@principal_block.register
def _(operator: SumLinearOperator, block: slice) -> Tensor:
    return sum(principal_block(part, block) for part in operator.linear_ops)


@rows_matmul.register
def _(operator: ConstantMulLinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    return operator._constant * rows_matmul(operator.base_linear_op, rows, rhs)


@rows_matmul.register
def _(operator: KroneckerProductLinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    # Sliced, it would be interpolated: the same product, and sparse matrices on top.
    return operator._matmul(rhs)[rows]


@rows_matmul.register
def _(operator: BlockInterleavedLinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    base = operator.base_linear_op
    members, index = base.shape[-3], torch.arange(operator.shape[-2], device=rhs.device)[rows]
    points, position = (index // members).unique(return_inverse=True)
    parts = rhs.view(-1, members, rhs.shape[-1]).unbind(1)
    found = torch.stack([rows_matmul(base[member], points, part) for member, part in enumerate(parts)], dim=1)
    return found[position, index % members]


@columns_matmul.register
def _(operator: ConstantMulLinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    return operator._constant * columns_matmul(operator.base_linear_op, columns, rhs)


@principal_block.register
def _(operator: ConstantMulLinearOperator, block: slice) -> Tensor:
    return operator._constant * principal_block(operator.base_linear_op, block)


def _check_rows(rhs: Tensor, expected: int) -> None:
    if rhs.shape[-2] != expected:
        raise ValueError(f"{expected} columns of a matrix times {rhs.shape[-2]} rows: the two numbers must be equal.")


__all__ = ["Rows", "columns_matmul", "dense_rows", "principal_block", "rows_matmul"]

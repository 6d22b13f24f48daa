"""Parts of a product with a symmetric operator: some rows, some columns, a block on the diagonal.

Solvers that visit the matrix block by block call these instead of slicing: an operator that keeps tiles serves them
from its tiles. The defaults work for any LinearOperator. All take unbatched operators and run without autograd.
"""

from functools import singledispatch

from linear_operator import LinearOperator, to_dense
from linear_operator.operators import ConstantMulLinearOperator, SumLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.tiles import TiledLinearOperator, add_product

Rows = slice | Tensor


@singledispatch
def rows_matmul(operator: LinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    """operator[rows, :] @ rhs: rhs [n, s] gives [len(rows), s]; rows is a slice or an index tensor."""
    return operator[rows, :] @ rhs


@singledispatch
def columns_matmul(operator: LinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    """operator[:, columns] @ rhs: rhs [len(columns), s] gives [n, s]."""
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
    return operator.tiles().block(rows, slice(None)) * operator.tile_scale


@rows_matmul.register
def _(operator: TiledLinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    tiles = operator.tiles()
    if not isinstance(rows, slice):
        return (tiles.block(rows, slice(None)) @ rhs).mul_(operator.tile_scale)
    size = len(range(*rows.indices(operator.shape[-2])))
    # Columns contiguous, as in Tiles.matmul.
    rhs = rhs.mT.contiguous()
    result = rhs.new_zeros(rhs.shape[-2], size)
    for i, part, outer in _overlaps(tiles.rows, rows):
        for j, columns in enumerate(tiles.columns):
            if operator.symmetric and i > j:
                add_product(result[:, outer], rhs[:, columns], tiles.tile(j, i)[:, part])
            else:
                add_product(result[:, outer], rhs[:, columns], tiles.tile(i, j)[part, :].mT)
    return result.mul_(operator.tile_scale).mT


@columns_matmul.register
def _(operator: TiledLinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    tiles = operator.tiles()
    rhs = rhs.mT.contiguous()
    result = rhs.new_zeros(rhs.shape[-2], operator.shape[-2])
    for j, part, outer in _overlaps(tiles.columns, columns):
        for i, rows in enumerate(tiles.rows):
            if operator.symmetric and i > j:
                add_product(result[:, rows], rhs[:, outer], tiles.tile(j, i)[part, :])
            else:
                add_product(result[:, rows], rhs[:, outer], tiles.tile(i, j)[:, part].mT)
    return result.mul_(operator.tile_scale).mT


@principal_block.register
def _(operator: TiledLinearOperator, block: slice) -> Tensor:
    if not operator.symmetric:
        raise ValueError("A rectangular kernel matrix has no principal blocks.")
    tiles = operator.tiles()
    overlaps = list(_overlaps(tiles.rows, block))
    if len(overlaps) == 1:
        i, part, _ = overlaps[0]
        values = tiles.tile(i, i)[part, part].clone()
    else:
        values = tiles.block(block, block)
    return values.mul_(operator.tile_scale)


def _overlaps(tiles: list[slice], wanted: slice) -> list[tuple[int, slice, slice]]:
    """(tile, slice inside the tile, slice inside `wanted`) for every tile that `wanted` touches."""
    size = tiles[-1].stop if tiles else 0
    start, stop, _ = wanted.indices(size)
    length = tiles[0].stop if tiles else 1
    overlaps = []
    for index in range(start // length, -(-stop // length)):
        first, last = max(start, tiles[index].start), min(stop, tiles[index].stop)
        inner = slice(first - tiles[index].start, last - tiles[index].start)
        overlaps.append((index, inner, slice(first - start, last - start)))
    return overlaps


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


@columns_matmul.register
def _(operator: ConstantMulLinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    return operator._constant * columns_matmul(operator.base_linear_op, columns, rhs)


@principal_block.register
def _(operator: ConstantMulLinearOperator, block: slice) -> Tensor:
    return operator._constant * principal_block(operator.base_linear_op, block)


__all__ = ["columns_matmul", "dense_rows", "principal_block", "rows_matmul"]

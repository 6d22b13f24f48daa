"""Parts of prior covariances that predictions need: products, rows, many small blocks.

Each has a default for any LinearOperator, and keeps the structure of those that have some.
"""

from functools import singledispatch

import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    InterpolatedLinearOperator,
    KroneckerProductLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator

#: Numbers that a step of evaluating blocks may hold at a time.
MAX_NUMBERS = 2**25


def product(operator: LinearOperator, columns: Tensor) -> Tensor:
    """The product of operator and columns, without autograd where no tensor requires a gradient."""
    tensors = (columns, *operator.representation())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return operator @ columns
    with torch.no_grad():
        return operator._matmul(columns)


def dense(operator: LinearOperator) -> Tensor:
    """The matrix, not the one that linear_operator memoises, which would stay in memory and may have no graph."""
    return operator.representation_tree()(*operator.representation()).to_dense()


@torch.no_grad()
def principal_blocks(operator: LinearOperator, index: Tensor) -> Tensor:
    """Dense operator[index, index]: [*b, n, n] at index [*batch, *b, t, k] gives [*batch, *b, t, k, k]."""
    if not operator.batch_shape:
        return _blocks(operator, index.reshape(-1, index.shape[-1])).reshape(*index.shape, index.shape[-1])
    first, dims = operator.batch_shape[0], len(operator.batch_shape)
    position = index.dim() - 2 - dims
    members = [principal_blocks(operator[i], index.select(position, i)) for i in range(first)]
    return torch.stack(members, dim=position)


@singledispatch
def _blocks(operator: LinearOperator, index: Tensor) -> Tensor:
    """operator[index, index] of an unbatched operator for an index [p, k]."""
    shape = (*index.shape, index.shape[-1])
    return operator._get_indices(
        index.unsqueeze(-1).expand(shape).contiguous(), index.unsqueeze(-2).expand(shape).contiguous()
    )


@_blocks.register
def _(operator: NoisyLinearOperator, index: Tensor) -> Tensor:
    is_same = index.unsqueeze(-1) == index.unsqueeze(-2)
    return _blocks(operator.kernel, index) + is_same * operator.noise[index].unsqueeze(-1)


@_blocks.register
def _(operator: RadialKernelLinearOperator, index: Tensor) -> Tensor:
    x = operator.x1[index]
    distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square_()
    scale = operator.function.scale(operator.alpha)
    return operator.outputscale * operator.function.value(distances * scale, operator.alpha)


@_blocks.register
def _(operator: GenericKernelLinearOperator, index: Tensor) -> Tensor:
    if operator.shape[-1] != operator.x1.shape[-2]:  # several outputs an input
        return dense(operator)[index.unsqueeze(-1), index.unsqueeze(-2)]
    # One by one: kernels that users write need not know batches.
    points = (operator.x1[..., part, :] for part in index)
    return torch.stack([operator.evaluate(x, x) for x in points])


@_blocks.register
def _(operator: SumLinearOperator, index: Tensor) -> Tensor:
    return sum((_blocks(part, index) for part in operator.linear_ops[1:]), _blocks(operator.linear_ops[0], index))


@_blocks.register
def _(operator: ConstantMulLinearOperator, index: Tensor) -> Tensor:
    return operator._constant * _blocks(operator.base_linear_op, index)


@_blocks.register
def _(operator: InterpolatedLinearOperator, index: Tensor) -> Tensor:
    # A datum's column of the grid's covariance times its interpolation weights, once; then, for every pair, a few of its
    # entries. Pair by pair from the start, the grid would be evaluated once for every pair of interpolation points.
    grid, count = operator.base_linear_op, operator.left_interp_indices.shape[-1]
    data, position = index.unique(return_inverse=True)
    if len(index) > 1 and max(grid.shape[-1] * len(data), index.numel() * index.shape[-1] * count) > MAX_NUMBERS:
        return torch.cat([_blocks(operator, part) for part in index.tensor_split(2)])
    weights = torch.zeros(len(data), grid.shape[-1], dtype=operator.dtype, device=operator.device)
    weights.scatter_add_(-1, operator.right_interp_indices[data], operator.right_interp_values[data])
    columns = grid._matmul(weights.mT)
    nodes, shares = operator.left_interp_indices[index], operator.left_interp_values[index]  # [p, k, count]
    found = columns[nodes.unsqueeze(-2), position.unsqueeze(-2).unsqueeze(-1)]
    return (found * shares.unsqueeze(-2)).sum(-1)


def row_block(operator: LinearOperator, rows: slice) -> LinearOperator:
    """operator[..., rows, :], with structure kept where linear_operator would interpolate the whole matrix."""
    if isinstance(operator, KroneckerProductLinearOperator):
        data, *task = operator.linear_ops
        return KroneckerProductLinearOperator(row_block(data, _shrunk(rows, row_group(operator))), *task)
    if isinstance(operator, BlockInterleavedLinearOperator):
        base = row_block(operator.base_linear_op, _shrunk(rows, row_group(operator)))
        return BlockInterleavedLinearOperator(base)
    if isinstance(operator, SumLinearOperator):
        return SumLinearOperator(*(row_block(part, rows) for part in operator.linear_ops))
    if isinstance(operator, ConstantMulLinearOperator):
        return ConstantMulLinearOperator(row_block(operator.base_linear_op, rows), operator._constant)
    return operator[..., rows, :]


def row_group(operator: LinearOperator) -> int:
    """How many neighbouring rows `row_block` can only take together."""
    if isinstance(operator, KroneckerProductLinearOperator):
        return operator.shape[-2] // operator.linear_ops[0].shape[-2]
    if isinstance(operator, BlockInterleavedLinearOperator):
        return operator.base_linear_op.shape[-3]
    if isinstance(operator, SumLinearOperator):
        return max(row_group(part) for part in operator.linear_ops)
    if isinstance(operator, ConstantMulLinearOperator):
        return row_group(operator.base_linear_op)
    return 1


def _shrunk(rows: slice, group: int) -> slice:
    return slice(rows.start // group, rows.stop // group)

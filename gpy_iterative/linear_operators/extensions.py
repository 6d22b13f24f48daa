"""Operations that `LinearOperator` lacks; an operator's own method of the same name comes first."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.linear_operators.products import KernelProducts

Rows = slice | Tensor
Operation = ParamSpec("Operation")


# Parts of unbatched operators (`dense_rows` also of batches), without autograd but for `principal_blocks`


def _by_parts(operation: Callable[Operation, Tensor]) -> Callable[Operation, Tensor]:
    """Calls the operator's own method, or adds the parts of a sum or multiple, or calls the function."""

    @wraps(operation)
    def asked(operator: Any, *given: Any, **named: Any) -> Tensor:
        if hasattr(operator, operation.__name__):
            return getattr(operator, operation.__name__)(*given, **named)
        if isinstance(operator, SumLinearOperator):
            return sum(asked(part, *given, **named) for part in operator.linear_ops)
        if isinstance(operator, ConstantMulLinearOperator):
            return _factor(operator) * asked(operator.base_linear_op, *given, **named)
        return operation(operator, *given, **named)

    return asked


@_by_parts
def rows_matmul(operator: LinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    """operator[rows, :] @ rhs for rhs [n, s]."""
    if isinstance(operator, DiagLinearOperator):
        return operator._diagonal()[rows].unsqueeze(-1) * rhs[rows]
    if isinstance(operator, BlockInterleavedLinearOperator):
        base = operator.base_linear_op
        members = base.shape[-3]
        points, position, inner = points_of(torch.arange(operator.shape[-2], device=rhs.device)[rows], members)
        parts = rhs.view(-1, members, rhs.shape[-1]).unbind(1)
        found = torch.stack([rows_matmul(base[member], points, part) for member, part in enumerate(parts)], dim=1)
        return found[position, inner]
    return operator[rows, :] @ rhs


def points_of(rows: Tensor, repeats: int) -> tuple[Tensor, Tensor, Tensor]:
    """The points of rows if each has `repeats` rows, and each row's place among them and in its point."""
    points, position = (rows // repeats).unique(return_inverse=True)
    return points, position, rows % repeats


@_by_parts
def columns_matmul(operator: LinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    """operator[:, columns] @ rhs for rhs [len(columns), s]."""
    start, stop, _ = columns.indices(operator.shape[-1])
    if isinstance(operator, DiagLinearOperator):
        return pad(operator._diagonal()[columns].unsqueeze(-1) * rhs, (0, 0, start, operator.shape[-2] - stop))
    return operator[:, columns] @ rhs


@_by_parts
def principal_block(operator: LinearOperator, block: slice) -> Tensor:
    """operator[block, block], a dense tensor that the caller may overwrite."""
    if hasattr(operator, "principal_blocks"):
        rows = torch.arange(operator.shape[-1], device=operator.device)[block]
        return operator.principal_blocks(rows.unsqueeze(0))[0]
    return to_dense(operator[block, block]).clone()


@_by_parts
def principal_blocks(operator: LinearOperator, rows: Tensor) -> Tensor:
    """operator[rows_i, rows_i] for sets of rows [c, k]: [c, k, k]."""
    if isinstance(operator, RootLinearOperator):
        # `_get_indices` would pick two rows of the root for every entry.
        root = dense_rows(operator.root, rows.flatten()).unflatten(0, rows.shape)
        return root @ root.mT
    shape = (*rows.shape, rows.shape[-1])
    left, right = rows.unsqueeze(-1).expand(shape), rows.unsqueeze(-2).expand(shape)
    return operator._get_indices(left.contiguous(), right.contiguous())


@_by_parts
def dense_rows(operator: LinearOperator, rows: Tensor) -> Tensor:
    """operator[..., rows, :] as a dense [*b, len(rows), n]."""
    if isinstance(operator, DenseLinearOperator):
        return operator.tensor.index_select(-2, rows)  # four times as fast as an index
    if isinstance(operator, BlockInterleavedLinearOperator):
        base = operator.base_linear_op
        members = base.shape[-3]
        points, position, inner = points_of(rows, members)
        picked = dense_rows(base, points)[..., inner, position, :]
        is_own = torch.arange(members, device=rows.device) == inner.unsqueeze(-1)
        return (picked.unsqueeze(-1) * is_own.unsqueeze(-2)).flatten(-2)
    return to_dense(operator[..., rows, :])


def dense(operator: LinearOperator) -> Tensor:
    """The matrix, with its graph. linear_operator's memoised one stays in memory and may lack a graph."""
    return operator.representation_tree()(*operator.representation()).to_dense()


def kernel_inputs(operator: LinearOperator) -> Tensor | None:
    """The kernel's inputs over its lengthscales, [n, d]; those of a sum are concatenated."""
    if hasattr(operator, "kernel_inputs"):
        return operator.kernel_inputs()
    terms = [term.kernel_inputs() for term, _ in sum_terms(operator) if hasattr(term, "kernel_inputs")]
    found = [inputs for inputs in terms if inputs is not None]
    return torch.cat(found, dim=-1) if found else None


def matrix_derivative(operator: LinearOperator, weights: Tensor) -> tuple[Tensor | None, ...]:
    """Derivatives of `(weights * operator).sum()` by `operator.representation()`, for constant weights [*b, n, m].

    Cost: one evaluation of the matrix, or n m^2 multiply-adds for operators without this method.
    """
    if hasattr(operator, "matrix_derivative"):
        return operator.matrix_derivative(weights)
    if isinstance(operator, SumLinearOperator):
        return tuple(part for term in operator.linear_ops for part in matrix_derivative(term, weights))
    if isinstance(operator, ConstantMulLinearOperator):
        constant, base = operator._constant, operator.base_linear_op
        derivatives = matrix_derivative(base, weights * constant.unsqueeze(-1).unsqueeze(-1))
        if not constant.requires_grad:
            return (*derivatives, None)
        root = to_dense(base.root) if isinstance(base, RootLinearOperator) else None
        total = weights * base.to_dense() if root is None else root * (weights @ root)
        return (*derivatives, total.sum((-2, -1)).sum_to_size(constant.shape))
    if isinstance(operator, RootLinearOperator):
        root = to_dense(operator.root)
        return matrix_derivative(operator.root, weights @ root + weights.mT @ root)
    if isinstance(operator, BlockInterleavedLinearOperator):
        return matrix_derivative(operator.base_linear_op, function_blocks(weights, operator.num_blocks))
    identity = torch.eye(operator.shape[-1], dtype=weights.dtype, device=weights.device)
    return operator._bilinear_derivative(weights, identity.expand(*weights.shape[:-2], *identity.shape))


def function_blocks(matrix: Tensor, count: int) -> Tensor:
    """Blocks [*b, C, n, m] of C single functions in a matrix [*b, n C, m C], ordered point by point."""
    by_point = matrix.unflatten(-1, (-1, count)).unflatten(-3, (-1, count))
    return by_point.diagonal(dim1=-3, dim2=-1).movedim(-1, -3)


def is_principal(row_index: Any, col_index: Any) -> bool:
    """Whether rows and columns are the same slice."""
    return isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index


def whole_points(index: Any, repeats: int, size: int) -> Any:
    """The points of a row index, if each has `repeats` rows; None if the index divides one."""
    if repeats == 1:
        return index
    if not isinstance(index, slice):
        return None
    start, stop, step = index.indices(size)
    if step != 1 or start % repeats or stop % repeats:
        return None
    return slice(start // repeats, stop // repeats)


def sum_terms(
    operator: LinearOperator, factor: Tensor | float = 1.0
) -> Iterator[tuple[LinearOperator, Tensor | float]]:
    """The terms of sums and multiples, and their factors."""
    if isinstance(operator, ConstantMulLinearOperator):
        yield from sum_terms(operator.base_linear_op, factor * _factor(operator))
    elif isinstance(operator, SumLinearOperator):
        for part in operator.linear_ops:
            yield from sum_terms(part, factor)
    else:
        yield operator, factor


def _factor(operator: ConstantMulLinearOperator) -> Tensor:
    """The constant, [*b, 1, 1] or []."""
    constant = operator._constant
    return constant[..., None, None] if constant.numel() > 1 else constant.reshape(())


def all_parts(operator: LinearOperator) -> Iterator[LinearOperator]:
    yield operator
    for part in (*operator._args, *operator._kwargs.values()):
        if isinstance(part, LinearOperator):
            yield from all_parts(part)


def far_field_error(operator: LinearOperator) -> float | None:
    """The largest measured error of far fields over the entries' standard deviation, if any."""
    found = [part.far_field_error() for part in all_parts(operator) if hasattr(part, "far_field_error")]
    return max((error for error in found if error is not None), default=None)


def has_fast_products(operator: LinearOperator) -> bool:
    """Whether products with a part cost less than its entries: by a far field, or a grid."""
    found = (part.has_fast_products() for part in all_parts(operator) if hasattr(part, "has_fast_products"))
    return any(found) or far_field_error(operator) is not None


def low_precision_copy(operator: LinearOperator) -> LinearOperator | None:
    """A float32 copy without gradient; None where no kernel has `precision="float32"`.

    A kernel whose dtype or code does not allow float32 raises ValueError.
    """
    if all(part.products.precision == "native" for part in all_parts(operator) if hasattr(part, "products")):
        return None
    return _converted(operator, "low_precision_copy", lambda tensor: tensor.detach().float(), torch.float32)


def with_products(part: Any, change: Callable[[KernelProducts], KernelProducts]) -> Any:
    """The operator with other `KernelProducts`; it shares tensors, gradients and kept tiles."""
    if isinstance(part, KernelProducts):
        return change(part)
    is_same = hasattr(part, "products") and change(part.products) == part.products
    if is_same or not isinstance(part, LinearOperator):
        return part
    return rebuilt(part, lambda inner: with_products(inner, change))


def in_float64(operator: LinearOperator, *, keeps_tiles: bool = True) -> LinearOperator:
    """The differentiable operator in float64, whose tiles take the place of kept ones.

    Entries of a kernel whose code does not allow float64 are converted.
    """
    return _converted(operator, "in_float64", torch.Tensor.double, torch.float64, keeps_tiles=keeps_tiles)


def _converted(part: Any, method: str, convert: Callable[[Tensor], Tensor], dtype: torch.dtype, **options: Any) -> Any:
    """Converts all parts of an operator, by their own `method` if any; `dtype` replaces dtypes."""
    if hasattr(part, method):
        return getattr(part, method)(**options)
    if isinstance(part, LinearOperator):
        return rebuilt(part, lambda inner: _converted(inner, method, convert, dtype, **options))
    if isinstance(part, torch.dtype):
        return dtype if part.is_floating_point else part
    return convert(part) if torch.is_tensor(part) and part.is_floating_point() else part


def rebuilt(operator: LinearOperator, convert: Callable[[Any], Any], **changes: Any) -> LinearOperator:
    options = {name: convert(part) for name, part in operator._kwargs.items()}
    return type(operator)(*map(convert, operator._args), **options | changes)

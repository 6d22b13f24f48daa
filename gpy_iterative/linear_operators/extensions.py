"""Operations on operators beyond those of `LinearOperator`, which solvers, preconditioners and gradients call.

Products with some rows or columns, dense parts, the derivative of a weighted sum of all entries, and copies in float32.
Operators of this package implement them as an `ExtendedLinearOperator`. `extended` wraps any other operator: sums,
multiples and a few structures pass the call on to their parts, and all others are sliced.
"""

from typing import Any

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

Rows = slice | Tensor
Derivatives = tuple[Tensor | None, ...]


class Extension:
    """The operations, by slicing or rebuilding `operator`; see the functions of the same names for arguments."""

    @property
    def operator(self) -> LinearOperator:
        """The operator whose parts these are."""
        raise NotImplementedError

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        """operator[rows, :] @ rhs."""
        return self.operator[rows, :] @ rhs

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        """operator[:, columns] @ rhs."""
        return self.operator[:, columns] @ rhs

    def principal_block(self, block: slice) -> Tensor:
        """operator[block, block]."""
        return to_dense(self.operator[block, block]).clone()

    def dense_rows(self, rows: Tensor) -> Tensor:
        """operator[..., rows, :]."""
        return to_dense(self.operator[..., rows, :])

    def matrix_derivative(self, weights: Tensor) -> Derivatives:
        """The derivatives of `(weights * operator).sum()`."""
        identity = torch.eye(self.operator.shape[-1], dtype=weights.dtype, device=weights.device)
        return self.operator._bilinear_derivative(weights, identity.expand(*weights.shape[:-2], *identity.shape))

    @property
    def has_low_precision(self) -> bool:
        """Whether a kernel in the operator has `precision="float32"`."""
        parts = (*self.operator._args, *self.operator._kwargs.values())
        return any(extended(part).has_low_precision for part in parts if isinstance(part, LinearOperator))

    def low_precision_copy(self) -> LinearOperator:
        """A copy in float32, without gradient."""
        options = {name: _in_float32(part) for name, part in self.operator._kwargs.items()}
        return type(self.operator)(*map(_in_float32, self.operator._args), **options)

    def native_precision(self) -> LinearOperator:
        """The same operator, whose kernels have `precision="native"`."""
        options = {name: _native(part) for name, part in self.operator._kwargs.items()}
        return type(self.operator)(*map(_native, self.operator._args), **options)


class ExtendedLinearOperator(Extension, LinearOperator):
    """A linear operator with its own implementations of some of the operations."""

    @property
    def operator(self) -> LinearOperator:
        return self


class _Sliced(Extension):
    """The extension of another package's operator."""

    def __init__(self, operator: LinearOperator) -> None:
        self._operator = operator

    @property
    def operator(self) -> Any:
        return self._operator


class _Sum(_Sliced):
    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        return sum(rows_matmul(term, rows, rhs) for term in self.operator.linear_ops)

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        return sum(columns_matmul(term, columns, rhs) for term in self.operator.linear_ops)

    def principal_block(self, block: slice) -> Tensor:
        return sum(principal_block(term, block) for term in self.operator.linear_ops)

    def matrix_derivative(self, weights: Tensor) -> Derivatives:
        return tuple(part for term in self.operator.linear_ops for part in matrix_derivative(term, weights))


class _Multiple(_Sliced):
    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        return self.operator._constant * rows_matmul(self.operator.base_linear_op, rows, rhs)

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        return self.operator._constant * columns_matmul(self.operator.base_linear_op, columns, rhs)

    def principal_block(self, block: slice) -> Tensor:
        return self.operator._constant * principal_block(self.operator.base_linear_op, block)

    def matrix_derivative(self, weights: Tensor) -> Derivatives:
        constant, base = self.operator._constant, self.operator.base_linear_op
        derivatives = matrix_derivative(base, weights * constant.unsqueeze(-1).unsqueeze(-1))
        if not constant.requires_grad:
            return (*derivatives, None)
        return (*derivatives, (weights * base.to_dense()).sum((-2, -1)).sum_to_size(constant.shape))


class _Kronecker(_Sliced):
    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        # Sliced, it would be interpolated: the same product, and sparse matrices on top.
        return self.operator._matmul(rhs)[rows]


class _Interleaved(_Sliced):
    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        base = self.operator.base_linear_op
        members, index = base.shape[-3], torch.arange(self.operator.shape[-2], device=rhs.device)[rows]
        points, position = (index // members).unique(return_inverse=True)
        parts = rhs.view(-1, members, rhs.shape[-1]).unbind(1)
        found = torch.stack([rows_matmul(base[member], points, part) for member, part in enumerate(parts)], dim=1)
        return found[position, index % members]


_WRAPPERS: tuple[tuple[type[LinearOperator], type[_Sliced]], ...] = (
    (SumLinearOperator, _Sum),
    (ConstantMulLinearOperator, _Multiple),
    (KroneckerProductLinearOperator, _Kronecker),
    (BlockInterleavedLinearOperator, _Interleaved),
)


def extended(operator: LinearOperator) -> Extension:
    """The operator itself where it is one of this package's, and its wrapper where it is not."""
    if isinstance(operator, Extension):
        return operator
    return next((wrapper(operator) for kind, wrapper in _WRAPPERS if isinstance(operator, kind)), _Sliced(operator))


# Parts of unbatched operators, without autograd


def rows_matmul(operator: LinearOperator, rows: Rows, rhs: Tensor) -> Tensor:
    """operator[rows, :] @ rhs: rhs [n, s] gives [len(rows), s]; rows is a slice or an index tensor.

    Raises:
        ValueError: rhs has another number of rows.
    """
    return extended(operator).rows_matmul(rows, rhs)


def columns_matmul(operator: LinearOperator, columns: slice, rhs: Tensor) -> Tensor:
    """operator[:, columns] @ rhs: rhs [len(columns), s] gives [n, s].

    Raises:
        ValueError: rhs has another number of rows.
    """
    return extended(operator).columns_matmul(columns, rhs)


def principal_block(operator: LinearOperator, block: slice) -> Tensor:
    """operator[block, block] as a dense tensor that the caller may overwrite."""
    return extended(operator).principal_block(block)


def dense_rows(operator: LinearOperator, rows: Tensor) -> Tensor:
    """operator[..., rows, :] as a dense [*b, len(rows), n]: a pivoted Cholesky factor is made of them."""
    return extended(operator).dense_rows(rows)


def matrix_derivative(operator: LinearOperator, weights: Tensor) -> Derivatives:
    """The derivatives of `(weights * operator).sum()` with respect to `operator.representation()`.

    An exact gradient needs it: its weights are a dense matrix, for which `LinearOperator._bilinear_derivative` costs n^3.

    Args:
        operator: [*b, n, m].
        weights: [*b, n, m], constant.

    Returns:
        One tensor, or None, for each of the representation. Cost: one evaluation of a kernel matrix; n^2 m multiply-adds
        for operators that only know bilinear derivatives.
    """
    return extended(operator).matrix_derivative(weights)


def low_precision_copy(operator: LinearOperator) -> LinearOperator | None:
    """A copy of the operator in float32, without gradient; None where no kernel in it has `precision="float32"`.

    The iterations of a solve multiply by it. Iterative refinement measures true residuals with the operator itself.
    Nothing is evaluated here.

    Raises:
        ValueError: a kernel's dtype or own code does not allow float32.
    """
    extension = extended(operator)
    return extension.low_precision_copy() if extension.has_low_precision else None


def native_precision(operator: LinearOperator) -> LinearOperator:
    """The same operator with `precision="native"`: it shares tensors, gradients and kept tiles. Nothing is evaluated."""
    extension = extended(operator)
    return extension.native_precision() if extension.has_low_precision else operator


def _in_float32(part: Any) -> Any:
    if isinstance(part, LinearOperator):
        return extended(part).low_precision_copy()
    if isinstance(part, torch.dtype):  # an argument of operators without tensors
        return torch.float32 if part.is_floating_point else part
    return part.detach().float() if torch.is_tensor(part) and part.is_floating_point() else part


def _native(part: Any) -> Any:
    return extended(part).native_precision() if isinstance(part, LinearOperator) else part

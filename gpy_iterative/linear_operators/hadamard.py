"""Kernel matrices of points times covariances of tasks, entry by entry: one row per observation (Hadamard product)."""

from functools import cached_property
from typing import Any

import torch
from linear_operator import LinearOperator, to_dense, to_linear_operator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import (
    Rows,
    columns_matmul,
    dense_rows,
    kernel_inputs,
    matrix_derivative,
    principal_block,
    principal_blocks,
    rows_matmul,
)
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator


class HadamardLinearOperator(LinearOperator):
    """K_ab B[t_a, t_b]: the rows (a, t_a) and columns (b, t_b) of the Kronecker product K x B.

    Args:
        points: K [*b, n, m].
        tasks: B [T, T].
        row_tasks, column_tasks: t, [n] and [m].

    Cost of a product: one of K with T times the columns.
    """

    def __init__(self, points: LinearOperator, tasks: Tensor, row_tasks: Tensor, column_tasks: Tensor) -> None:
        super().__init__(points, tasks, row_tasks, column_tasks)
        self.points, self.tasks, self.row_tasks, self.column_tasks = points, tasks, row_tasks, column_tasks

    @property
    def whole(self) -> KroneckerLinearOperator:
        return KroneckerLinearOperator(self.points, to_linear_operator(self.tasks))

    @cached_property
    def rows_of_whole(self) -> Tensor:
        return _numbers(self.row_tasks, len(self.tasks))

    @cached_property
    def columns_of_whole(self) -> Tensor:
        return _numbers(self.column_tasks, len(self.tasks))

    def _size(self) -> torch.Size:
        return self.points.shape

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.whole._matmul(self._spread(rhs, self.columns_of_whole))[..., self.rows_of_whole, :]

    def _transpose_nonbatch(self) -> LinearOperator:
        points = self.points._transpose_nonbatch()
        if points is self.points and self.row_tasks is self.column_tasks:
            return self
        return type(self)(points, self.tasks.mT, self.column_tasks, self.row_tasks)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        left = self._spread(left_vecs, self.rows_of_whole)
        right = self._spread(right_vecs, self.columns_of_whole)
        *of_points, of_tasks = self.whole._bilinear_derivative(left, right)
        # The product repeats them for a batch of points.
        return (*of_points, None if of_tasks is None else of_tasks.sum_to_size(self.tasks.shape), None, None)

    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        """See `extensions.matrix_derivative`."""
        of_points = matrix_derivative(self.points, weights * self._factors())
        if not self.tasks.requires_grad:
            return (*of_points, None, None, None)
        of_pairs = weights * to_dense(self.points)
        by_row = weights.new_zeros(*weights.shape[:-2], len(self.tasks), weights.shape[-1])
        by_row.index_add_(-2, self.row_tasks, of_pairs)
        of_tasks = weights.new_zeros(*weights.shape[:-2], *self.tasks.shape)
        of_tasks.index_add_(-1, self.column_tasks, by_row)
        return (*of_points, of_tasks.sum_to_size(self.tasks.shape), None, None)

    def _diagonal(self) -> Tensor:
        return self.points._diagonal() * self.tasks[self.row_tasks, self.column_tasks]

    def to_dense(self) -> Tensor:
        return to_dense(self.points) * self._factors()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        points = self.points._getitem(row_index, col_index, *batch_indices)
        is_same = self.row_tasks is self.column_tasks and isinstance(row_index, slice) and row_index == col_index
        row_tasks = self.row_tasks[row_index]
        return type(self)(points, self.tasks, row_tasks, row_tasks if is_same else self.column_tasks[col_index])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        factors = self.tasks[self.row_tasks[row_index], self.column_tasks[col_index]]
        return self.points._get_indices(row_index, col_index, *batch_indices) * factors

    def _on_points(self, points: LinearOperator) -> LinearOperator:
        return type(self)(points, self.tasks, self.row_tasks, self.column_tasks)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._on_points(self.points._expand_batch(batch_shape))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._on_points(self.points._unsqueeze_batch(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._on_points(self.points._permute_batch(*dims))

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        return self._on_points(self.points._mul_constant(other))

    # Documented in `extensions.py`

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        found = rows_matmul(self.points, rows, self._by_task(rhs, self.column_tasks))
        return _summed(found, self.tasks[self.row_tasks[rows]])

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        found = columns_matmul(self.points, columns, self._by_task(rhs, self.column_tasks[columns]))
        return _summed(found, self.tasks[self.row_tasks])

    def principal_block(self, block: slice) -> Tensor:
        tasks = self.row_tasks[block]
        return principal_block(self.points, block) * self.tasks[tasks.unsqueeze(-1), tasks]

    def principal_blocks(self, rows: Tensor) -> Tensor:
        tasks = self.row_tasks[rows]
        return principal_blocks(self.points, rows) * self.tasks[tasks.unsqueeze(-1), tasks.unsqueeze(-2)]

    def dense_rows(self, rows: Tensor) -> Tensor:
        return dense_rows(self.points, rows) * self.tasks[self.row_tasks[rows].unsqueeze(-1), self.column_tasks]

    def kernel_inputs(self) -> Tensor | None:
        return kernel_inputs(self.points)

    def _factors(self) -> Tensor:
        return self.tasks[self.row_tasks.unsqueeze(-1), self.column_tasks]

    def _spread(self, vectors: Tensor, rows: Tensor) -> Tensor:
        """[*b, n, s] to [*b, n T, s], zero for other tasks."""
        whole = vectors.new_zeros(*vectors.shape[:-2], len(rows) * len(self.tasks), vectors.shape[-1])
        return whole.index_copy(-2, rows, vectors)

    def _by_task(self, vectors: Tensor, tasks: Tensor) -> Tensor:
        """[m, s] to [m, T s]."""
        return self._spread(vectors, _numbers(tasks, len(self.tasks))).view(len(vectors), -1)


def _numbers(tasks: Tensor, count: int) -> Tensor:
    return torch.arange(len(tasks), device=tasks.device) * count + tasks


def _summed(products: Tensor, factors: Tensor) -> Tensor:
    """Products [r, T s] by task of the column, times factors [r, T]."""
    return (factors.unsqueeze(-2) @ products.unflatten(-1, (factors.shape[-1], -1))).squeeze(-2)

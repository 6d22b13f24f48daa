"""Kernel matrices of points times covariances of tasks, entry by entry: one row per observation (Hadamard product)."""

from functools import cached_property
from typing import Any

import torch
from linear_operator import LinearOperator, to_dense, to_linear_operator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import dense_rows, matrix_derivative, principal_block
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator


class HadamardLinearOperator(ObservedLinearOperator):
    """K_ab B[t_a, t_b]: the rows (a, t_a) and columns (b, t_b) of the Kronecker product K x B of points and tasks.

    Cost of a product: one of K with T times the columns.
    """

    @classmethod
    def of(
        cls, points: LinearOperator, tasks: Tensor, row_tasks: Tensor, column_tasks: Tensor
    ) -> "HadamardLinearOperator":
        """Of K [*b, n, m], B [T, T] and the tasks t of rows [n] and columns [m]."""
        count = len(tasks)
        observed = [torch.arange(len(own), device=own.device) * count + own for own in (row_tasks, column_tasks)]
        masks = [own.new_zeros(len(own) * count, dtype=torch.bool).index_fill_(0, own, True) for own in observed]
        found = cls(KroneckerLinearOperator(points, to_linear_operator(tasks)), *masks)
        found.observed, found.observed_columns = observed  # to read them from masks takes most of the time
        return found

    @property
    def points(self) -> LinearOperator:
        return self.base.points

    @property
    def tasks(self) -> Tensor:
        """B, which the Kronecker product repeats for a batch."""
        return to_dense(self.base.tasks)[(0,) * len(self.batch_shape)]

    @cached_property
    def row_tasks(self) -> Tensor:
        return self.observed % len(self.tasks)

    @cached_property
    def column_tasks(self) -> Tensor:
        return self.observed_columns % len(self.tasks)

    def _size(self) -> torch.Size:
        return self.points.shape

    def _diagonal(self) -> Tensor:
        return self.points._diagonal() * self.tasks[self.row_tasks, self.column_tasks]

    def to_dense(self) -> Tensor:
        return to_dense(self.points) * self._factors()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        points = self.points._getitem(row_index, col_index, *batch_indices)
        return self.of(points, self.tasks, self.row_tasks[row_index], self.column_tasks[col_index])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        factors = self.tasks[self.row_tasks[row_index], self.column_tasks[col_index]]
        return self.points._get_indices(row_index, col_index, *batch_indices) * factors

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        return self.of(self.points._mul_constant(other), self.tasks, self.row_tasks, self.column_tasks)

    # Documented in `extensions.py`

    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        of_points = matrix_derivative(self.points, weights * self._factors())
        if not self.tasks.requires_grad:
            return (*of_points, None, None, None)
        of_pairs = weights * to_dense(self.points)
        by_row = weights.new_zeros(*weights.shape[:-2], len(self.tasks), weights.shape[-1])
        by_row.index_add_(-2, self.row_tasks, of_pairs)
        of_tasks = weights.new_zeros(*weights.shape[:-2], *self.tasks.shape)
        of_tasks.index_add_(-1, self.column_tasks, by_row)
        return (*of_points, of_tasks.sum_to_size(self.base.tasks.shape), None, None)

    def principal_block(self, block: slice) -> Tensor:
        tasks = self.row_tasks[block]
        return principal_block(self.points, block) * self.tasks[tasks.unsqueeze(-1), tasks]

    def dense_rows(self, rows: Tensor) -> Tensor:
        return dense_rows(self.points, rows) * self.tasks[self.row_tasks[rows].unsqueeze(-1), self.column_tasks]

    def _factors(self) -> Tensor:
        return self.tasks[self.row_tasks.unsqueeze(-1), self.column_tasks]

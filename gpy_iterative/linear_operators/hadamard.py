"""Kernel matrices of points times covariances of tasks, entry by entry: one row per observation (Hadamard product)."""

from typing import Any

import torch
from linear_operator import LinearOperator, to_dense, to_linear_operator
from torch import Tensor

from gpy_iterative.linear_operators import extensions
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator, spread_rows

#: Columns with so many times as many points between them cost less by themselves, though their tiles are not kept.
MOST_SPREAD = 4
_ALL = slice(None)


class HadamardLinearOperator(ObservedLinearOperator):
    """K[a_i, b_j] B[t_i, u_j]: rows (a_i, t_i) and columns (b_j, u_j) of the Kronecker product K x B of points and tasks.

    Rows that are as many as the points of K are at them, in order. Cost of a product: one of K with T times the columns.
    """

    @classmethod
    def of(
        cls,
        points: LinearOperator,
        tasks: Tensor,
        row_tasks: Tensor,
        column_tasks: Tensor,
        row_points: Tensor | None = None,
        column_points: Tensor | None = None,
    ) -> "HadamardLinearOperator":
        """Of K [*b, P, Q], B [T, T], and the tasks and points of rows [n] and columns [m]; None if each has its own."""
        own = lambda found, like: torch.arange(len(like), device=like.device) if found is None else found
        rows = own(row_points, row_tasks) * len(tasks) + row_tasks
        columns = own(column_points, column_tasks) * len(tasks) + column_tasks
        return cls(KroneckerLinearOperator(points, to_linear_operator(tasks)), rows, columns)

    @property
    def points(self) -> LinearOperator:
        return self.base.points

    @property
    def tasks(self) -> Tensor:
        """B, which the Kronecker product repeats for a batch."""
        return to_dense(self.base.tasks)[(0,) * len(self.batch_shape)]

    @property
    def row_tasks(self) -> Tensor:
        return self.observed % len(self.tasks)

    @property
    def column_tasks(self) -> Tensor:
        return self.observed_columns % len(self.tasks)

    @property
    def row_points(self) -> Tensor | None:
        """None if each row has its own."""
        size = self.points.shape[-2]
        return None if len(self.observed) == size else self.observed // len(self.tasks)

    @property
    def column_points(self) -> Tensor | None:
        size = self.points.shape[-1]
        return None if len(self.observed_columns) == size else self.observed_columns // len(self.tasks)

    def datum_of_points(self) -> Tensor:
        """A row of each point, for points that all have one."""
        rows = torch.arange(len(self.observed), device=self.device)
        return rows.new_empty(self.points.shape[-2]).index_copy_(0, self.observed // len(self.tasks), rows)

    def _diagonal(self) -> Tensor:
        if self.row_points is not None or self.column_points is not None:
            each = torch.arange(len(self.observed), device=self.device)
            return self._getitem(each, each)._diagonal()
        return self.points._diagonal() * self.tasks[self.row_tasks, self.column_tasks]

    def to_dense(self) -> Tensor:
        return self._at_rows(self._at_columns(to_dense(self.points))) * self._factors()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        row_points, row_index_of_points = _picked(self.row_points, row_index)
        column_points, column_index_of_points = _picked(self.column_points, col_index)
        points = self.points
        if torch.is_tensor(row_index_of_points) and torch.is_tensor(column_index_of_points):
            points = points._getitem(row_index_of_points, _ALL)  # both at a time would be pairs
            row_index_of_points = _ALL
        points = points._getitem(row_index_of_points, column_index_of_points, *batch_indices)
        tasks = self.row_tasks[row_index], self.column_tasks[col_index]
        return self.of(points, self.tasks, *tasks, row_points, column_points)

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        points = self.points._mul_constant(other)
        return type(self)(KroneckerLinearOperator(points, self.base.tasks), self.observed, self.observed_columns)

    # Documented in `extensions.py`

    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        of_points = weights * self._factors()
        if self.row_points is not None:
            of_points = spread_rows(of_points, self.row_points, self.points.shape[-2])
        if self.column_points is not None:
            of_points = spread_rows(of_points.mT, self.column_points, self.points.shape[-1]).mT
        found = extensions.matrix_derivative(self.points, of_points)
        if not self.tasks.requires_grad:
            return (*found, None, None, None)
        of_pairs = weights * self._at_rows(self._at_columns(to_dense(self.points)))
        by_row = spread_rows(of_pairs, self.row_tasks, len(self.tasks))
        of_tasks = spread_rows(by_row.mT, self.column_tasks, len(self.tasks)).mT
        return (*found, of_tasks.sum_to_size(self.base.tasks.shape), None, None)

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        points = self.observed_columns[columns] // len(self.tasks)
        is_scattered = len(points) > 0 and int(points.max() - points.min()) > MOST_SPREAD * len(points)
        return self[:, columns]._matmul(rhs) if is_scattered else super().columns_matmul(columns, rhs)

    def principal_block(self, block: slice) -> Tensor:
        if self.row_points is not None:
            rows = torch.arange(len(self.observed), device=self.device)[block]
            return self.principal_blocks(rows.unsqueeze(0))[0]
        tasks = self.row_tasks[block]
        return extensions.principal_block(self.points, block) * self.tasks[tasks.unsqueeze(-1), tasks]

    def dense_rows(self, rows: Tensor) -> Tensor:
        points = rows if self.row_points is None else self.row_points[rows]
        factors = self.tasks[self.row_tasks[rows].unsqueeze(-1), self.column_tasks]
        return self._at_columns(extensions.dense_rows(self.points, points)) * factors

    def _at_rows(self, of_points: Tensor) -> Tensor:
        return of_points if self.row_points is None else of_points.index_select(-2, self.row_points)

    def _at_columns(self, of_points: Tensor) -> Tensor:
        return of_points if self.column_points is None else of_points.index_select(-1, self.column_points)

    def _factors(self) -> Tensor:
        return self.tasks[self.row_tasks.unsqueeze(-1), self.column_tasks]


def _picked(points: Tensor | None, index: Any) -> tuple[Tensor | None, Any]:
    """The points of picked rows, and the index that picks the rows of K for them."""
    if points is None or (isinstance(index, slice) and index == _ALL):
        return points, index
    return None, points[index]

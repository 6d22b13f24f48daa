"""Kronecker products K x B of kernel matrices of points and of tasks, by their factors."""

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import KroneckerProductLinearOperator
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.linear_operators import extensions


class KroneckerLinearOperator(KroneckerProductLinearOperator):
    """A Kronecker product whose last factor, of the tasks, is small.

    Parts of linear_operator's product are products with sparse matrices, its derivatives store the other factors, and its
    products fail for one task.
    """

    @property
    def points(self) -> LinearOperator:
        """K, all factors but the last."""
        *others, _ = self.linear_ops
        return others[0] if len(others) == 1 else KroneckerLinearOperator(*others)

    @property
    def tasks(self) -> LinearOperator:
        """B [*b, T, U]."""
        return self.linear_ops[-1]

    def _matmul(self, rhs: Tensor) -> Tensor:
        by_task = rhs.unflatten(-2, (-1, self.tasks.shape[-1]))
        mixed = to_dense(self.tasks).unsqueeze(-3) @ by_task
        return self.points._matmul(mixed.flatten(-2)).unflatten(-1, mixed.shape[-2:]).flatten(-3, -2)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.mT._matmul(rhs)

    def to_dense(self) -> Tensor:
        entries = torch.einsum("...ab,...ij->...aibj", to_dense(self.points), to_dense(self.tasks))
        return entries.flatten(-2).flatten(-3, -2)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        points, tasks = self.points, self.tasks
        left = left_vecs.unflatten(-2, (-1, tasks.shape[-2]))
        right = right_vecs.unflatten(-2, (-1, tasks.shape[-1]))
        mixed = (to_dense(tasks).unsqueeze(-3) @ right).flatten(-2)
        of_points = points._bilinear_derivative(left.flatten(-2), mixed)
        if not tasks.requires_grad:
            return (*of_points, *[None] * len(tasks.representation()))
        product = points._matmul(right.flatten(-2)).unflatten(-1, right.shape[-2:])
        return (*of_points, *extensions.matrix_derivative(tasks, torch.einsum("...ais,...ajs->...ij", left, product)))

    # Documented in `extensions.py`

    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        points, tasks = self.points, self.tasks
        blocks = weights.unflatten(-1, (-1, tasks.shape[-1])).unflatten(-3, (-1, tasks.shape[-2]))
        of_points = extensions.matrix_derivative(points, torch.einsum("...aibj,...ij->...ab", blocks, to_dense(tasks)))
        if not tasks.requires_grad:
            return (*of_points, *[None] * len(tasks.representation()))
        of_tasks = torch.einsum("...aibj,...ab->...ij", blocks, to_dense(points))
        return (*of_points, *extensions.matrix_derivative(tasks, of_tasks))

    def rows_matmul(self, rows: extensions.Rows, rhs: Tensor) -> Tensor:
        tasks = to_dense(self.tasks)
        count = tasks.shape[-1]
        points, position, inner = extensions.points_of(torch.arange(self.shape[-2], device=rhs.device)[rows], count)
        found = extensions.rows_matmul(self.points, points, (tasks @ rhs.unflatten(0, (-1, count))).flatten(1))
        return found.unflatten(-1, (count, -1))[position, inner]

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        tasks = to_dense(self.tasks)
        start, stop, _ = columns.indices(self.shape[-1])
        count = tasks.shape[-1]
        points = slice(start // count, -(-stop // count))
        whole = pad(rhs, (0, 0, start - points.start * count, points.stop * count - stop)).unflatten(0, (-1, count))
        found = extensions.columns_matmul(self.points, points, (tasks @ whole).flatten(1))
        return found.unflatten(-1, (count, -1)).flatten(0, 1)

    def principal_blocks(self, rows: Tensor) -> Tensor:
        tasks = to_dense(self.tasks)
        index = rows % tasks.shape[-1]
        blocks = extensions.principal_blocks(self.points, rows // tasks.shape[-1])
        return blocks * tasks[index.unsqueeze(-1), index.unsqueeze(-2)]

    def dense_rows(self, rows: Tensor) -> Tensor:
        tasks = to_dense(self.tasks)
        of_tasks = tasks[..., rows % tasks.shape[-1], :].unsqueeze(-2)
        return (extensions.dense_rows(self.points, rows // tasks.shape[-1]).unsqueeze(-1) * of_tasks).flatten(-2)

    def kernel_inputs(self) -> Tensor | None:
        """Those of the points, for each task."""
        inputs = extensions.kernel_inputs(self.points)
        return None if inputs is None else inputs.repeat_interleave(self.tasks.shape[-2], dim=-2)

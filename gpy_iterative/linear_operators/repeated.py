"""K (x) I: one kernel matrix that several latent functions share, applied to all of them in one product."""

from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import ExtendedLinearOperator, Rows, rows_matmul


class RepeatedKernelLinearOperator(ExtendedLinearOperator):
    """The covariance of `repeats` independent functions with the same kernel, their values at a point side by side.

    Args:
        kernel: K [n, m].
        repeats: C; the operator is [n C, m C].

    A product with b columns is one product of K with C b columns.
    """

    def __init__(self, kernel: LinearOperator, *, repeats: int) -> None:
        super().__init__(kernel, repeats=repeats)
        self.kernel, self.repeats = kernel, repeats

    def _size(self) -> torch.Size:
        rows, columns = self.kernel.matrix_shape
        return torch.Size((*self.kernel.batch_shape, rows * self.repeats, columns * self.repeats))

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        product = self.kernel._matmul(self._side_by_side(rhs))
        return product.reshape(*product.shape[:-2], -1, rhs.shape[-1])

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if left_vecs.dim() == 1:
            left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
        return self.kernel._bilinear_derivative(self._side_by_side(left_vecs), self._side_by_side(right_vecs))

    def _side_by_side(self, columns: Tensor) -> Tensor:
        """[*b, n C, s] as [*b, n, C s]."""
        return columns.reshape(*columns.shape[:-2], -1, self.repeats * columns.shape[-1])

    def _transpose_nonbatch(self) -> LinearOperator:
        return type(self)(self.kernel._transpose_nonbatch(), repeats=self.repeats)

    def _diagonal(self) -> Tensor:
        return self.kernel._diagonal().repeat_interleave(self.repeats, dim=-1)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        rows, columns = (torch.div(index, self.repeats, rounding_mode="floor") for index in (row_index, col_index))
        same = row_index % self.repeats == col_index % self.repeats
        return self.kernel._get_indices(rows, columns, *batch_indices) * same

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        kept = [_whole_points(index, self.repeats) for index in (row_index, col_index)]
        if batch_indices or None in kept:
            return super()._getitem(row_index, col_index, *batch_indices)
        return type(self)(self.kernel[kept[0], kept[1]], repeats=self.repeats)

    def to_dense(self) -> Tensor:
        """The matrix [n C, m C]."""
        kernel = self.kernel.to_dense()
        return torch.kron(kernel, torch.eye(self.repeats, dtype=kernel.dtype, device=kernel.device))

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        index = torch.arange(self.shape[-2], device=rhs.device)[rows]
        points, position = (index // self.repeats).unique(return_inverse=True)
        found = rows_matmul(self.kernel, points, self._side_by_side(rhs))
        return found.view(len(points), self.repeats, -1)[position, index % self.repeats]


def _whole_points(index: Any, repeats: int) -> slice | None:
    """The points that a slice of rows is made of; None where it cuts through one."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        return None
    ends = [index.start or 0, index.stop]
    if any(end is not None and (end < 0 or end % repeats) for end in ends):
        return None
    return slice(ends[0] // repeats, None if ends[1] is None else ends[1] // repeats)

"""Covariances of observed data only."""

import torch
from linear_operator.operators import MaskedLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import extensions


class ObservedLinearOperator(MaskedLinearOperator):
    """Rows [n] and columns [m] of an operator by their numbers, which linear_operator's class has as masks.

    Parts of linear_operator's class are products with the whole matrix.
    """

    @property
    def observed(self) -> Tensor:
        """Numbers of the rows."""
        return self.row_mask

    @property
    def observed_columns(self) -> Tensor:
        return self.col_mask

    def _size(self) -> torch.Size:
        return torch.Size((*self.base.batch_shape, len(self.observed), len(self.observed_columns)))

    # By numbers: a GPU waits at each use of a mask.

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(self._among_columns(rhs)).index_select(-2, self.observed)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.mT._matmul(rhs)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        left = spread_rows(left_vecs, self.observed, self.base.shape[-2])
        return (*self.base._bilinear_derivative(left, self._among_columns(right_vecs)), None, None)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.base._get_indices(self.observed[row_index], self.observed_columns[col_index], *batch_indices)

    def _among_columns(self, rhs: Tensor) -> Tensor:
        return spread_rows(rhs, self.observed_columns, self.base.shape[-1])

    # Documented in `extensions.py`

    def rows_matmul(self, rows: extensions.Rows, rhs: Tensor) -> Tensor:
        return extensions.rows_matmul(self.base, self.observed[rows], self._among_columns(rhs))

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        numbers = self.observed_columns[columns]
        if not len(numbers):
            return rhs.new_zeros(len(self.observed), rhs.shape[-1])
        first, last = torch.stack(numbers.aminmax()).tolist()
        whole = spread_rows(rhs, numbers - first, last + 1 - first)
        return extensions.columns_matmul(self.base, slice(first, last + 1), whole)[self.observed]

    def principal_blocks(self, rows: Tensor) -> Tensor:
        return extensions.principal_blocks(self.base, self.observed[rows])

    def dense_rows(self, rows: Tensor) -> Tensor:
        return extensions.dense_rows(self.base, self.observed[rows])[..., self.observed_columns]

    def kernel_inputs(self) -> Tensor | None:
        inputs = extensions.kernel_inputs(self.base)
        return None if inputs is None else inputs[..., self.observed, :]


def spread_rows(rows: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Rows [*b, n, s] as sums [*b, size, s] of those with each number."""
    return rows.new_zeros(*rows.shape[:-2], size, rows.shape[-1]).index_add_(-2, numbers, rows)

"""Covariances of observed data only."""

from functools import cached_property

from linear_operator.operators import MaskedLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import (
    Rows,
    columns_matmul,
    dense_rows,
    kernel_inputs,
    principal_blocks,
    rows_matmul,
)


class ObservedLinearOperator(MaskedLinearOperator):
    """Rows and columns of a square operator, whose parts come from the operator's parts.

    Parts of linear_operator's class are products with the whole matrix.
    """

    @cached_property
    def observed(self) -> Tensor:
        """Numbers of the rows."""
        return self.row_mask.nonzero().squeeze(-1)

    @cached_property
    def observed_columns(self) -> Tensor:
        return self.observed if self.row_eq_col_mask else self.col_mask.nonzero().squeeze(-1)

    # By numbers, found once: a GPU waits at each use of a mask.

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(self._among_columns(rhs)).index_select(-2, self.observed)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        left = _spread(left_vecs, self.observed, self.base.shape[-2])
        return (*self.base._bilinear_derivative(left, self._among_columns(right_vecs)), None, None)

    def _among_columns(self, rhs: Tensor) -> Tensor:
        return _spread(rhs, self.observed_columns, self.base.shape[-1])

    # Documented in `extensions.py`

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        return rows_matmul(self.base, self.observed[rows], self._among_columns(rhs))

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        index = self.observed_columns[columns]
        if not len(index):
            return rhs.new_zeros(len(self.observed), rhs.shape[-1])
        span = slice(int(index[0]), int(index[-1]) + 1)
        whole = _spread(rhs, index - span.start, span.stop - span.start)
        return columns_matmul(self.base, span, whole)[self.observed]

    def principal_blocks(self, rows: Tensor) -> Tensor:
        return principal_blocks(self.base, self.observed[rows])

    def dense_rows(self, rows: Tensor) -> Tensor:
        return dense_rows(self.base, self.observed[rows])[..., self.observed_columns]

    def kernel_inputs(self) -> Tensor | None:
        inputs = kernel_inputs(self.base)
        return None if inputs is None else inputs[..., self.observed, :]


def _spread(rows: Tensor, numbers: Tensor, size: int) -> Tensor:
    return rows.new_zeros(*rows.shape[:-2], size, rows.shape[-1]).index_copy_(-2, numbers, rows)

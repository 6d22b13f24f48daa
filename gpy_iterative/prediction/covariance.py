"""The posterior covariance, which is not evaluated before somebody asks for a part of it."""

from typing import Any, Protocol

import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    KroneckerProductLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.prediction.inverse_factor import InverseFactor

#: Numbers that the projections of one chunk of test points may hold: half a gigabyte in float64.
CHUNK_NUMBERS = 2**26


class InverseFactorSource(Protocol):
    """Whoever makes the inverse factor, at the first call."""

    def inverse_factor(self) -> InverseFactor:
        """The factor for n training data."""
        ...


class PosteriorCovarianceLinearOperator(LinearOperator):
    """K(x, x) - K(x, X) H^-1 K(X, x), as good as the inverse factor is.

    Args:
        test_test: K(x, x) [*batch, t, t].
        test_train: K(x, X) [*batch, t, n], or [batch * t, n] with the points of all batch members in one list.
        source: makes the inverse factor when it is first needed.
        chunk_size: test points whose projections are held at a time; None takes what fits half a gigabyte.

    The diagonal costs one product of K(x, X) with the factor's columns, in chunks, and keeps t numbers; so a million
    test points are fine. Everything else is dense: t^2 numbers. Differentiable in whatever the two blocks are.
    """

    def __init__(
        self,
        test_test: LinearOperator,
        test_train: LinearOperator,
        *,
        source: InverseFactorSource,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(test_test, test_train, source=source, chunk_size=chunk_size)
        self.test_test, self.test_train = test_test, test_train
        self.source, self.chunk_size = source, chunk_size

    def _size(self) -> torch.Size:
        return self.test_test.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return type(self)(self.test_test.mT, self.test_train, source=self.source, chunk_size=self.chunk_size)

    def _diagonal(self) -> Tensor:
        factor = self.source.inverse_factor()
        prior_variance = self.test_test.diagonal(dim1=-2, dim2=-1)
        size, length = self.test_train.shape[-2], self._chunk_length(factor)
        if size <= length:
            return factor.variance(prior_variance, self._projections(factor))
        # A list of points that stands for a batch is cut as a list, and shaped in the end.
        flat = prior_variance.reshape(*self.test_train.batch_shape, size)
        parts = []
        for start in range(0, size, length):
            rows = slice(start, min(start + length, size))
            projections = product(row_block(self.test_train, rows), factor.columns.to(self.dtype))
            parts.append(factor.variance(flat[..., rows], projections))
        return torch.cat(parts, dim=-1).reshape(prior_variance.shape)

    def to_dense(self) -> Tensor:
        """The matrix [*batch, t, t]; t (r + 2 s) + t^2 numbers of memory, differentiable."""
        kept: Tensor | None = self.__dict__.get("_dense")
        if kept is not None:
            return kept
        factor = self.source.inverse_factor()
        dense = factor.covariance(self.test_test.to_dense(), self._projections(factor))
        if not any(tensor.requires_grad for tensor in self.representation()):
            self.__dict__["_dense"] = dense
        return dense

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        whole = all(isinstance(index, slice) and index == slice(None) for index in batch_indices)
        if whole and isinstance(row_index, slice) and row_index == col_index and not self._is_list:
            return type(self)(
                self.test_test[..., row_index, row_index],
                self.test_train[..., row_index, :],
                source=self.source,
                chunk_size=self.chunk_size,
            )
        return to_linear_operator(self.to_dense())._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.to_dense()[(*batch_indices, row_index, col_index)]

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return to_linear_operator(self.to_dense().expand(*batch_shape, *self.matrix_shape))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return to_linear_operator(self.to_dense().unsqueeze(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return to_linear_operator(self.to_dense().permute(*dims, -2, -1))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_dense"}

    @property
    def _is_list(self) -> bool:
        return self.test_train.dim() < self.test_test.dim()

    def _projections(self, factor: InverseFactor) -> Tensor:
        # An operator may have been converted since: product in its own dtype.
        projections = product(self.test_train, factor.columns.to(self.dtype))
        return projections.reshape(*self.shape[:-1], projections.shape[-1])

    def _chunk_length(self, factor: InverseFactor) -> int:
        batch = self.test_train.batch_shape.numel()
        length = self.chunk_size or CHUNK_NUMBERS // (factor.columns.shape[-1] * batch)
        # Whole points: the rows of one point's outputs belong together.
        outputs = _outputs(self.test_train)
        return max(length // outputs, 1) * outputs


def product(operator: LinearOperator, columns: Tensor) -> Tensor:
    """The product of operator and columns, past autograd where nothing asks for a gradient: no operator is rebuilt then."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operator.representation()):
        return operator @ columns
    with torch.no_grad():
        return operator._matmul(columns)


def row_block(operator: LinearOperator, rows: slice) -> LinearOperator:
    """operator[..., rows, :], with structure kept where linear_operator would interpolate the whole matrix."""
    if isinstance(operator, KroneckerProductLinearOperator):
        data, task = operator.linear_ops[0], operator.linear_ops[1:]
        outputs = _outputs(operator)
        return KroneckerProductLinearOperator(row_block(data, _shrunk(rows, outputs)), *task)
    if isinstance(operator, BlockInterleavedLinearOperator):
        return BlockInterleavedLinearOperator(row_block(operator.base_linear_op, _shrunk(rows, _outputs(operator))))
    if isinstance(operator, SumLinearOperator):
        return SumLinearOperator(*(row_block(part, rows) for part in operator.linear_ops))
    if isinstance(operator, ConstantMulLinearOperator):
        return ConstantMulLinearOperator(row_block(operator.base_linear_op, rows), operator._constant)
    return operator[..., rows, :]


def _outputs(operator: LinearOperator) -> int:
    """How many neighbouring rows cannot be cut apart cheaply."""
    if isinstance(operator, KroneckerProductLinearOperator):
        return operator.shape[-2] // operator.linear_ops[0].shape[-2]
    if isinstance(operator, BlockInterleavedLinearOperator):
        return operator.base_linear_op.shape[-3]
    if isinstance(operator, SumLinearOperator):
        return max(_outputs(part) for part in operator.linear_ops)
    if isinstance(operator, ConstantMulLinearOperator):
        return _outputs(operator.base_linear_op)
    return 1


def _shrunk(rows: slice, outputs: int) -> slice:
    return slice(rows.start // outputs, rows.stop // outputs)

from typing import Any

import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.exact.prediction.blocks import converted, row_block, row_group
from gpy_iterative.exact.prediction.projection import Projection
from gpy_iterative.training.progress import Progress, reporting

#: Half a gigabyte in float64.
CHUNK_NUMBERS = 2**26


class DenseOnRequestLinearOperator(LinearOperator):
    """A covariance with its own diagonal; all else comes from a matrix `_evaluated()` [*b, t, t]."""

    def _evaluated(self) -> Tensor:
        raise NotImplementedError

    def to_dense(self) -> Tensor:
        kept: Tensor | None = self.__dict__.get("_dense")
        if kept is None:
            kept = self._evaluated()
            if not any(tensor.requires_grad for tensor in self.representation()):
                self.__dict__["_dense"] = kept
        return kept

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
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


class PosteriorCovarianceLinearOperator(DenseOnRequestLinearOperator):
    """K(x, x) - K(x, X) H^-1 K(X, x) from a projection, differentiable in both blocks.

    The diagonal is computed in chunks; everything else is dense, memory t^2.

    Args:
        test_test: K(x, x) [*batch, t, t].
        test_train: K(x, X) [*batch, t, n], or one list [batch * t, n].
        source: its `projection()` gives the `Projection`.
        chunk_size: test points; None takes half a gigabyte.
    """

    def __init__(
        self,
        test_test: LinearOperator,
        test_train: LinearOperator,
        *,
        source: Any,
        chunk_size: int | None = None,
        progress: Progress = False,
    ) -> None:
        super().__init__(test_test, test_train, source=source, chunk_size=chunk_size, progress=progress)
        self.test_test, self.test_train = test_test, test_train
        self.source, self.chunk_size, self.progress = source, chunk_size, progress

    def _size(self) -> torch.Size:
        return self.test_test.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return type(self)(self.test_test.mT, self.test_train, **self._kwargs)

    def _diagonal(self) -> Tensor:
        projection = self.source.projection()
        prior_variance = self._prior(projection).diagonal(dim1=-2, dim2=-1)
        flat = prior_variance.reshape(self.test_train.shape[:-1])
        variance = self._variance(projection, flat)
        self.source.check(variance, flat, self.test_train)
        return variance.reshape(prior_variance.shape).to(self.dtype)

    def _variance(self, projection: Projection, prior_variance: Tensor) -> Tensor:
        """[*batch, t] for K(x, X) [*batch, t, n], some points at a time."""
        size, length = self.test_train.shape[-2], self._chunk_length(projection)
        if size <= length:
            return projection.variance(prior_variance, self.test_train)
        parts = []
        with reporting(self.progress, "variances", "points", size) as tell:
            for start in range(0, size, length):
                rows = slice(start, min(start + length, size))
                parts.append(projection.variance(prior_variance[..., rows], row_block(self.test_train, rows)))
                tell(rows.stop, {})
        return torch.cat(parts, dim=-1)

    def _evaluated(self) -> Tensor:
        projection = self.source.projection()
        prior = self._prior(projection).to_dense()
        covariance = projection.covariance(prior, self.test_train)
        flat = self.test_train.shape[:-1]
        self.source.check(*(c.diagonal(dim1=-2, dim2=-1).reshape(flat) for c in (covariance, prior)), self.test_train)
        return covariance.to(self.dtype)

    def _prior(self, projection: Projection) -> LinearOperator:
        """K(x, x), no more exact than K(x, X): GPyTorch's blocks stay as rounded as they are."""
        is_evaluated = isinstance(self.test_train, DenseLinearOperator)
        return self.test_test if is_evaluated else converted(self.test_test, projection.dtype)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        whole = all(isinstance(index, slice) and index == slice(None) for index in batch_indices)
        is_list = self.test_train.dim() < self.test_test.dim()
        if whole and isinstance(row_index, slice) and row_index == col_index and not is_list:
            part = self.test_test[..., row_index, row_index], self.test_train[..., row_index, :]
            return type(self)(*part, **self._kwargs)
        return super()._getitem(row_index, col_index, *batch_indices)

    def _chunk_length(self, projection: Projection) -> int:
        numbers = projection.numbers_per_point(self.test_train) * self.test_train.batch_shape.numel()
        length = self.chunk_size or CHUNK_NUMBERS // numbers
        # All outputs of a point stay together.
        group = row_group(self.test_train)
        return max(length // group, 1) * group

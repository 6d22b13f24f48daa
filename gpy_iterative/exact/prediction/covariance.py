from typing import Any

import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.exact.prediction.blocks import converted, row_block, row_group
from gpy_iterative.exact.prediction.projection import Projection
from gpy_iterative.linear_operators.predicted import DenseOnRequestLinearOperator
from gpy_iterative.training.progress import Progress, reporting

#: Of a chunk: half a gigabyte in float64.
CHUNK_NUMBERS = 2**26


class PosteriorCovarianceLinearOperator(DenseOnRequestLinearOperator):
    """K(x, x) - K(x, X) H^-1 K(X, x) from a projection, differentiable in both blocks.

    The diagonal is computed in chunks of half a gigabyte; everything else is dense, memory t^2.

    Args:
        test_test: K(x, x) [*batch, t, t].
        test_train: K(x, X) [*batch, t, n], or one list [batch * t, n].
        source: its `projection()` gives the `Projection`.
    """

    def __init__(
        self,
        test_test: LinearOperator,
        test_train: LinearOperator,
        *,
        source: Any,
        progress: Progress = False,
    ) -> None:
        super().__init__(test_test, test_train, source=source, progress=progress)
        self.test_test, self.test_train = test_test, test_train
        self.source, self.progress = source, progress

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
        # All outputs of a point stay together.
        group = row_group(self.test_train)
        return max(CHUNK_NUMBERS // numbers // group, 1) * group

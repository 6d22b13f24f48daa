"""A posterior covariance that is computed when, and as far as, somebody looks."""

from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.prediction.variance import PosteriorVariance, TestPoints

#: Test points whose variances are computed at a time.
CHUNK = 4096


class PosteriorCovarianceLinearOperator(LinearOperator):
    """[*b, t, t], evaluated by a PosteriorVariance at first use.

    Args:
        mean: the predictive mean [*b, t]; it lends its shape, dtype and device.
        at: the test points.
        variance: answers for them.

    Variances come in chunks of 4,096 points and need no t x t matrix; anything else evaluates the dense matrix once.
    """

    def __init__(self, mean: Tensor, *, at: TestPoints, variance: PosteriorVariance, seen: dict | None = None) -> None:
        seen = {} if seen is None else seen
        super().__init__(mean, at=at, variance=variance, seen=seen)
        self.mean, self.at, self.variance, self._seen = mean, at, variance, seen

    def _size(self) -> torch.Size:
        return torch.Size((*self.mean.shape, self.mean.shape[-1]))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def to_dense(self) -> Tensor:
        """The matrix; kept, since it is asked for again and again."""
        if "matrix" not in self._seen:
            self._seen["matrix"] = self.variance.matrix(self.at).expand(self.shape)
        return self._seen["matrix"]

    def _diagonal(self) -> Tensor:
        if "matrix" in self._seen:
            return self._seen["matrix"].diagonal(dim1=-1, dim2=-2)
        if "diagonal" not in self._seen:
            size = self.shape[-1]
            parts = [
                self.variance.diagonal(self.at.rows(slice(start, min(start + CHUNK, size))))
                for start in range(0, size, CHUNK)
            ]
            diagonal = torch.cat(parts, dim=-1) if parts else self.mean.new_zeros(self.mean.shape)
            self._seen["diagonal"] = diagonal.expand(self.mean.shape)
        return self._seen["diagonal"]

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        principal = isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        if principal and all(index == slice(None) for index in batch_indices) and row_index.step in (None, 1):
            return type(self)(self.mean[..., row_index], at=self.at.rows(row_index), variance=self.variance)
        return super()._getitem(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return type(self)(self.mean.expand(*batch_shape, self.mean.shape[-1]), at=self.at, variance=self.variance)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return (None,)  # the mean is no parameter of the covariance

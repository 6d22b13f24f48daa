"""Covariances of predictions, whose matrix is dense as soon as more than its diagonal is asked for.

Samples, solves and densities are by its Cholesky factor, at any size. GPyTorch takes Lanczos and conjugate gradients beyond
800 points (`max_cholesky_size`): samples lose most of their variance, and densities are random.
"""

from typing import Any

import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    CholLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    TriangularLinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor


class _ByCholesky(LinearOperator):
    def evaluate_kernel(self) -> LinearOperator:
        return self  # a copy would not share its matrix and factor

    def _choose_root_method(self) -> str:
        return "cholesky"

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
        return self.cholesky()._cholesky_solve(rhs)

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor | None, Tensor | None]:
        factor = CholLinearOperator(TriangularLinearOperator(self.cholesky()))
        return factor.inv_quad_logdet(inv_quad_rhs, logdet, reduce_inv_quad)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, LinearOperator | Tensor) and not isinstance(other, ZeroLinearOperator):
            return CovarianceSumLinearOperator(self, other)
        return super().__add__(other)


class CovarianceSumLinearOperator(_ByCholesky, SumLinearOperator):
    """As a latent covariance plus noise."""

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return type(self)(*(term._getitem(row_index, col_index, *batch_indices) for term in self.linear_ops))


class RootCovarianceLinearOperator(_ByCholesky, RootLinearOperator):
    """R R^T, sampled by R."""


class DenseOnRequestLinearOperator(_ByCholesky):
    """A covariance with its own diagonal; all else comes from a matrix `_evaluated()` [*b, t, t]."""

    def _evaluated(self) -> Tensor:
        raise NotImplementedError

    def to_dense(self) -> Tensor:
        needs_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.representation())
        kept: Tensor | None = None if needs_graph else self.__dict__.get("_dense")
        if kept is None:
            kept = self._evaluated()
            if not needs_graph:
                self.__dict__["_dense"] = kept
        return kept

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self._whole()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.to_dense()[(*batch_indices, row_index, col_index)]

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._whole()._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._whole()._unsqueeze_batch(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._whole()._permute_batch(*dims)

    def _whole(self) -> CovarianceSumLinearOperator:
        return CovarianceSumLinearOperator(self.to_dense())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_dense"}

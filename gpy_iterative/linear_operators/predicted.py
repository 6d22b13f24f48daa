"""Covariances of predictions, whose matrix is dense as soon as more than its diagonal is asked for.

Samples, solves and densities are by its Cholesky factor, at any size. GPyTorch takes Lanczos and conjugate gradients beyond
800 points (`max_cholesky_size`): samples lose most of their variance, and densities are random.
"""

from typing import Any

import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    CholLinearOperator,
    DiagLinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
    PsdSumLinearOperator,
    SumLinearOperator,
    TriangularLinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

#: Jitters of a factor, each ten times the one before; the first is a rounding error.
MAX_TRIES = 6


class _ByCholesky(LinearOperator):
    def _choose_root_method(self) -> str:
        return "cholesky"

    def _cholesky(self, upper: bool | None = False) -> TriangularLinearOperator:
        """In float64, of the correlations: jitter is relative to each variance."""
        matrix, limits = self.to_dense(), torch.finfo(self.dtype)
        deviation = matrix.detach().diagonal(dim1=-2, dim2=-1).double().clamp_min(limits.tiny).sqrt()
        correlation = matrix / deviation.unsqueeze(-1) / deviation.unsqueeze(-2)
        lower = psd_safe_cholesky(correlation, jitter=limits.eps, max_tries=MAX_TRIES)
        lower = (deviation.unsqueeze(-1) * lower).to(self.dtype)
        return TriangularLinearOperator(lower.mT.contiguous() if upper else lower, upper=upper)

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

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self + super().add_diagonal(diag)._diag_tensor

    def repeat(self, *sizes: Any) -> LinearOperator:
        return CovarianceSumLinearOperator(super().repeat(*sizes))


class CovarianceSumLinearOperator(_ByCholesky, SumLinearOperator):
    """As a latent covariance plus noise."""

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return type(self)(*(term._getitem(row_index, col_index, *batch_indices) for term in self.linear_ops))


class RootCovarianceLinearOperator(LowRankRootLinearOperator):
    """R R^T, sampled by R."""

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return RootPlusDiagonalLinearOperator(self, other)
        return CovarianceSumLinearOperator(self, other) if isinstance(other, LinearOperator) else super().__add__(other)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self + super().add_diagonal(diag)._diag_tensor


class RootPlusDiagonalLinearOperator(LowRankRootAddedDiagLinearOperator):
    """R R^T + D: solves and densities by Woodbury's formula, samples as sums of samples."""

    zero_mean_mvn_samples = PsdSumLinearOperator.zero_mean_mvn_samples

    def _choose_root_method(self) -> str:
        return "cholesky"

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        root, diagonal = (term._getitem(row_index, col_index, *batch_indices) for term in self.linear_ops)
        return root + diagonal


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

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        return CovarianceSumLinearOperator(super()._mul_constant(other))

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._whole()._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._whole()._unsqueeze_batch(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._whole()._permute_batch(*dims)

    def _sum_batch(self, dim: int) -> LinearOperator:
        return self._whole()._sum_batch(dim)

    def _whole(self) -> CovarianceSumLinearOperator:
        return CovarianceSumLinearOperator(self.to_dense())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_dense", "_memoize_cache")}

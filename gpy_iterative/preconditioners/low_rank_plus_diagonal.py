"""Low rank plus diagonal preconditioners."""

from abc import abstractmethod
from typing import Self

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.preconditioners.preconditioner import PreconditionerRecipe, SampledPreconditioner

#: Rows multiplied, and columns of I + W^T W computed, at a time.
CHUNK = 4096
COLUMNS = 256
#: Rounding errors of I + W^T W, whose eigenvalues are at least 1, beyond which products are in float64. Those of sums over
#: all n rows may be five times as large, and conjugate gradients bear .4 badly.
ROUNDING = 0.02


class LowRankPlusDiagonal(SampledPreconditioner):
    """S = L L^T + diag(d) = d^1/2 (I + W W^T) d^1/2 with W = d^-1/2 L.

    Cost in multiply-adds: n k^2 / 2 for construction, 2 n k s for a solve.

    Args:
        factor: L [*b, n, k].
        diagonal: d [*b, n], positive.
        build_epochs: None: k / n.

    Raises:
        NonFiniteError: an entry is not finite, or the diagonal not positive.
    """

    def __init__(self, factor: Tensor, diagonal: Tensor, build_epochs: float | None = None) -> None:
        #: Columns k of L.
        self.rank = factor.shape[-1]
        self.factor, self.diagonal, self.num_signs = factor, diagonal, sum(factor.shape[-2:])
        self.build_epochs = self.rank / factor.shape[-2] if build_epochs is None else build_epochs
        inner = _inner_matrix(factor, diagonal, factor.dtype)
        # Rounding errors eps sqrt(g_ii g_jj) of G = W^T W have a norm of about eps sqrt(k) mean(g_ii).
        norm = torch.linalg.vector_norm(inner.diagonal(dim1=-2, dim2=-1) - 1, dim=-1).amax()
        #: Largest eps with which products may be computed.
        self._allowed_eps = float(ROUNDING / norm)
        if torch.finfo(factor.dtype).eps > self._allowed_eps:
            inner = _inner_matrix(factor, diagonal, torch.float64)
        self._cholesky, info = torch.linalg.cholesky_ex(inner)
        if info.any():  # I + W^T W is positive definite if finite
            raise NonFiniteError(
                "A low rank plus diagonal matrix has entries that are not finite, or a diagonal that is not positive: "
                "check data, hyperparameters and noise."
            )

    def to(self, dtype: torch.dtype) -> Self:
        """See `Preconditioner.to`; the inner factor stays in float64."""
        converted = super().to(dtype)
        converted._cholesky = self._cholesky
        return converted

    def solve(self, rhs: Tensor) -> Tensor:
        """S^-1 rhs for [*b, n, s]."""
        # Errors along large eigenvectors of H would spoil conjugate gradients.
        if rhs.dtype != self.factor.dtype or torch.finfo(rhs.dtype).eps > self._allowed_eps:
            return self._solve_in_float64(rhs)
        diagonal = self.diagonal.unsqueeze(-1)
        return (rhs - self.factor @ self._inner_solve(self._projected(rhs / diagonal))) / diagonal

    def _solve_in_float64(self, rhs: Tensor) -> Tensor:
        diagonal = self.diagonal.unsqueeze(-1)
        whitened = rhs.double() / diagonal
        # Vectors as rows, for speed on a CPU.
        inner = whitened.new_zeros(*rhs.shape[:-2], rhs.shape[-1], self.rank)
        for rows, vectors in zip(self.factor.split(CHUNK, dim=-2), whitened.split(CHUNK, dim=-2), strict=True):
            inner += vectors.mT.contiguous() @ rows.double()
        inner = torch.cholesky_solve(inner.mT, self._cholesky).mT.contiguous()
        found = torch.empty_like(rhs)
        parts = zip(*(tensor.split(CHUNK, dim=-2) for tensor in (self.factor, found, rhs, diagonal)), strict=True)
        for rows, part, vectors, divisor in parts:
            part.copy_((vectors - (inner @ rows.double().mT).mT) / divisor)
        return found

    def logdet(self) -> Tensor:
        inner = 2 * self._cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (inner + self.diagonal.double().log().sum(-1)).to(self.diagonal.dtype)

    def sample(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """Xi = L w + d^1/2 e of covariance S, for white w [*b, k, s] above e [*b, n, s], and its dual S^-1 xi.

        The dual is d^-1/2 (e + W (I + W^T W)^-1 (w - W^T e)). E[xi (S^-1 xi)^T] is the identity whatever the rounding of
        I + W^T W, so traces are unbiased.
        """
        factor_base, diagonal_base = base.split([self.rank, self.diagonal.shape[-1]], dim=-2)
        root = self.diagonal.sqrt().unsqueeze(-1)
        whitened = diagonal_base / root
        inner = self._inner_solve(factor_base - self._projected(whitened))
        dual = whitened + self.factor @ inner / self.diagonal.unsqueeze(-1)
        return self.factor @ factor_base + root * diagonal_base, dual

    def _projected(self, vectors: Tensor) -> Tensor:
        """L^T vectors: as rows, which read L row by row."""
        return (vectors.mT @ self.factor).mT

    def _inner_solve(self, rhs: Tensor) -> Tensor:
        return torch.cholesky_solve(rhs.double(), self._cholesky).to(rhs.dtype)


class NystromFactor(LowRankPlusDiagonal):
    """With L L^T <= K for a system K + diag(d): preconditioned eigenvalues are at least 1."""


def _inner_matrix(factor: Tensor, diagonal: Tensor, dtype: torch.dtype) -> Tensor:
    """Lower triangle of I + W^T W in float64, multiplied in `dtype`."""
    rank = factor.shape[-1]
    inner = factor.new_zeros(*factor.shape[:-2], rank, rank, dtype=torch.float64)
    roots = diagonal.sqrt().unsqueeze(-1)
    for rows, root in zip(factor.split(CHUNK, dim=-2), roots.split(CHUNK, dim=-2), strict=True):
        rows = (rows / root).to(dtype)
        for start in range(0, rank, COLUMNS):
            columns = slice(start, start + COLUMNS)
            inner[..., start:, columns] += rows[..., start:].mT @ rows[..., columns]
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    return inner


class LowRankRecipe(PreconditionerRecipe):
    """Recipe of a `LowRankPlusDiagonal`."""

    @abstractmethod
    def build(self, operator: LinearOperator, *, generator: torch.Generator | None = None) -> LowRankPlusDiagonal: ...

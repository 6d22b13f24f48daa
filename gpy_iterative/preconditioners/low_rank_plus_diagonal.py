"""S = L L^T + diag(d): solved, sampled and measured through one k x k Cholesky factor."""

import copy
from typing import Self

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError

#: Rows that are converted to float64 at a time.
CHUNK = 4096


class LowRankPlusDiagonal:
    """A covariance of low rank plus a positive diagonal: a preconditioner, or the covariance of probes.

    Args:
        factor: L [*b, n, k].
        diagonal: d [*b, n], positive.

    Raises:
        NonFiniteError: an entry is not finite, or the diagonal not positive.

    Construction costs n k^2 multiply-adds in float64, a solve with s columns 2 n k s in the factor's own dtype.
    With W = d^-1/2 L, S = d^1/2 (I + W W^T) d^1/2; the inner matrix I + W^T W is as ill conditioned as S over its
    noise, and is the one thing that float32 cannot hold.
    """

    def __init__(self, factor: Tensor, diagonal: Tensor) -> None:
        self.factor, self.diagonal = factor, diagonal
        self._root = diagonal.sqrt().unsqueeze(-1)
        self._weighted = factor / self._root
        inner = torch.diag_embed(torch.ones_like(factor[..., 0, :], dtype=torch.float64))
        for rows in self._weighted.split(CHUNK, dim=-2):
            inner += rows.mT.double() @ rows.double()
        self._cholesky, info = torch.linalg.cholesky_ex(inner)
        if info.any():  # I + W^T W is positive definite whenever it is finite
            raise NonFiniteError(
                "A low rank plus diagonal matrix has entries that are not finite, or a diagonal that is not positive: "
                "check data, hyperparameters and noise."
            )

    @property
    def rank(self) -> int:
        """k, the number of columns of L."""
        return self.factor.shape[-1]

    @property
    def build_epochs(self) -> float:
        """Passes over the matrix that the factor took to build: k of its n rows."""
        return self.rank / self.factor.shape[-2]

    def __getitem__(self, index: int | tuple[int, ...]) -> Self:
        """One member of a batch; nothing is computed again."""
        member = copy.copy(self)
        for name, tensor in vars(self).items():
            setattr(member, name, tensor[index])
        return member

    def to(self, dtype: torch.dtype) -> Self:
        """The same with vectors of another dtype; the inner factor stays what it is."""
        converted = copy.copy(self)
        for name in ("factor", "diagonal", "_root", "_weighted"):
            setattr(converted, name, getattr(self, name).to(dtype))
        return converted

    def matmul(self, rhs: Tensor) -> Tensor:
        """S rhs for [*b, n, s]."""
        return self.factor @ (self.factor.mT @ rhs) + self.diagonal.unsqueeze(-1) * rhs

    def solve(self, rhs: Tensor) -> Tensor:
        """S^-1 rhs for [*b, n, s], by Woodbury's identity."""
        scaled = rhs / self._root
        inner = torch.cholesky_solve((self._weighted.mT @ scaled).double(), self._cholesky)
        return (scaled - self._weighted @ inner.to(rhs.dtype)) / self._root

    def logdet(self) -> Tensor:
        """The log-determinant of S, [*b]."""
        inner = 2 * self._cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (inner + self.diagonal.double().log().sum(-1)).to(self.diagonal.dtype)

    def sample(self, factor_base: Tensor, diagonal_base: Tensor) -> Tensor:
        """L w + sqrt(d) e for base vectors w [*b, k, s] and e [*b, n, s] of identity covariance."""
        return self.factor @ factor_base + self._root * diagonal_base


class NystromFactor(LowRankPlusDiagonal):
    """L L^T + diag(d) for a system K + diag(d), with L L^T nowhere larger than K.

    The preconditioned spectrum is then bounded by 1 from below, which quadratures of log-determinants make use of.
    """

"""S = L L^T + diag(d): solved, sampled and measured through one k x k Cholesky factor."""

import torch
from torch import Tensor


class LowRankPlusDiagonal:
    """A covariance of low rank plus a positive diagonal: a preconditioner, or the covariance of probes.

    Args:
        factor: L [*b, n, k].
        diagonal: d [*b, n], positive.

    Construction costs n k^2 multiply-adds, a solve with s columns 2 n k s. The k x k system is formed in float64: its
    condition number is that of S over the noise.
    """

    def __init__(self, factor: Tensor, diagonal: Tensor) -> None:
        self.factor, self.diagonal = factor, diagonal
        # Scaled by d^-1/2, the k x k matrix is I + W^T W and never singular.
        self._weighted = factor / diagonal.unsqueeze(-1)
        inner = (factor.mT @ self._weighted).double()
        inner.diagonal(dim1=-2, dim2=-1).add_(1)
        self._cholesky = torch.linalg.cholesky(inner)

    @property
    def rank(self) -> int:
        """k, the number of columns of L."""
        return self.factor.shape[-1]

    def matmul(self, rhs: Tensor) -> Tensor:
        """S rhs for [*b, n, s]."""
        return self.factor @ (self.factor.mT @ rhs) + self.diagonal.unsqueeze(-1) * rhs

    def solve(self, rhs: Tensor) -> Tensor:
        """S^-1 rhs for [*b, n, s], by Woodbury's identity."""
        inner = torch.cholesky_solve((self._weighted.mT @ rhs).double(), self._cholesky)
        return rhs / self.diagonal.unsqueeze(-1) - self._weighted @ inner.to(rhs.dtype)

    def logdet(self) -> Tensor:
        """Log det S, [*b]."""
        inner = 2 * self._cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return (inner + self.diagonal.double().log().sum(-1)).to(self.diagonal.dtype)

    def sample(self, factor_base: Tensor, diagonal_base: Tensor) -> Tensor:
        """L w + sqrt(d) e for base vectors w [*b, k, s] and e [*b, n, s] of identity covariance."""
        return self.factor @ factor_base + self.diagonal.sqrt().unsqueeze(-1) * diagonal_base

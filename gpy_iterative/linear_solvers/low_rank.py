"""Exact factors of systems whose kernel has few features: n r^2 multiply-adds, not n^3 / 6."""

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import DiagLinearOperator, RootLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import sum_terms
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal

#: Rows for each column at least, and most entries of a root.
LEAST_ROWS, MOST_ENTRIES = 2, 2**27
#: Each divides errors by some 10^16 over the largest eigenvalue of H / d.
REFINEMENTS = 2


def low_rank_parts(operator: LinearOperator | Tensor) -> tuple[Tensor, Tensor] | None:
    """R [*b, n, r] and d [*b, n] of H = R R^T + diag(d), with graph; None if R is unknown or too large."""
    if not isinstance(operator, NoisyLinearOperator):
        return None
    roots, diagonal = [], operator.noise
    for term, factor in sum_terms(operator.kernel):
        if isinstance(term, RootLinearOperator):
            root = to_dense(term.root)
            roots.append(root * factor.sqrt() if isinstance(factor, Tensor) else root)
        elif isinstance(term, DiagLinearOperator):
            scale = factor.squeeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor
            diagonal = diagonal + scale * term._diagonal()
        else:
            return None
    if not roots:
        return None
    root = torch.cat([root.expand(*operator.batch_shape, *root.shape[-2:]) for root in roots], dim=-1)
    if root.shape[-2] < LEAST_ROWS * root.shape[-1] or root.numel() > MOST_ENTRIES:
        return None
    return root, diagonal.expand(operator.shape[:-1])


class LowRankFactor(LowRankPlusDiagonal):
    """H = R R^T + diag(d) in float64, as `CholeskyFactor`; results have the dtype of R."""

    def __init__(self, root: Tensor, noise: Tensor) -> None:
        super().__init__(root.detach().double(), noise.detach().double())
        self.dtype = root.dtype

    def solve(self, rhs: Tensor) -> Tensor:
        """H^-1 rhs for [*b, n, s], refined: H enlarges rounding errors along R."""
        rhs = rhs.double()
        found = super().solve(rhs)
        for _ in range(REFINEMENTS):
            product = self.factor @ self._projected(found) + self.diagonal.unsqueeze(-1) * found
            found = found + super().solve(rhs - product)
        return found.to(self.dtype)

    def basis(self) -> Tensor:
        """A [*b, n, r] with |A^T k|^2 = k^T H^-1 k for every k in the span of R, as all columns of K(X, x) are.

        A = d^-1/2 U (I + S^2)^-1/2 for d^-1/2 R = U S V^T, so that nothing cancels.
        """
        root = self.diagonal.sqrt().unsqueeze(-1)
        left, values, _ = torch.linalg.svd(self.factor / root, full_matrices=False)
        return left / root / (1 + values.square()).sqrt().unsqueeze(-2)

    def logdet(self) -> Tensor:
        """The log-determinant of H [*b]."""
        return super().logdet().to(self.dtype)

    def score(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of log N(y; 0, H) by R [*b, n, r] and d [*b, n], for weights H^-1 y [*b, n, 1]."""
        weights = weights.double()
        # H^-1 R = D^-1 R M^-1 and H^-1 = D^-1 - D^-1 R M^-1 R^T D^-1 with M = I + R^T D^-1 R
        scaled = self.factor / self.diagonal.unsqueeze(-1)
        solved = torch.cholesky_solve(scaled.mT, self._cholesky).mT
        inverse_diagonal = self.diagonal.reciprocal() - (solved * scaled).sum(-1)
        by_root = weights @ (weights.mT @ self.factor) - solved
        return by_root.to(self.dtype), 0.5 * (weights.squeeze(-1).square() - inverse_diagonal).to(self.dtype)

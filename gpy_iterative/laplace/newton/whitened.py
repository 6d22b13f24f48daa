"""Solves with H = I + R^T K R, W = R R^T; R H^-1 R^T is (K + W^-1)^-1, but defined for a singular W."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.newton.base import LaplaceSolution
from gpy_iterative.laplace.newton.basis import inverse_root
from gpy_iterative.linear_operators.extensions import Rows
from gpy_iterative.linear_operators.latent import point_blocks
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.solution import Solution, SolveProgress
from gpy_iterative.preconditioners.low_rank_plus_diagonal import NystromFactor


class WhitenedKernelLinearOperator(LinearOperator):
    """R^T K R [n r, n r], without gradient."""

    def __init__(self, kernel: LinearOperator, *, curvature: Curvature) -> None:
        super().__init__(kernel, curvature=curvature)
        self.kernel, self.curvature = kernel, curvature

    def _size(self) -> torch.Size:
        size = self.curvature.num_columns
        return torch.Size((size, size))

    @torch.no_grad()
    def _matmul(self, rhs: Tensor) -> Tensor:
        product = self.kernel._matmul(self.curvature.root(rhs.double()).to(self.kernel.dtype))
        return self.curvature.root_t(product.double()).to(rhs.dtype)

    @torch.no_grad()
    def _diagonal(self) -> Tensor:
        by_point = self.curvature.blocks().shape[:2]  # n, C
        blocks = point_blocks(self.kernel, by_point[1]).double()
        identity = torch.eye(self.shape[-1] // by_point[0], dtype=blocks.dtype, device=self.device)
        roots = self.curvature.root(identity.repeat(by_point[0], 1)).unflatten(0, by_point)  # [n, C, r]
        return (roots * (blocks @ roots)).sum(1).flatten().to(self.dtype)

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        """See `extensions.rows_matmul`; a slice would multiply this product by sparse matrices."""
        return self._matmul(rhs)[rows]

    def _transpose_nonbatch(self) -> LinearOperator:
        return self


@dataclass(frozen=True)
class WhitenedSystem:
    """H in the dtype of K, preconditioned with the actions."""

    operator: NoisyLinearOperator
    curvature: Curvature
    preconditioner: NystromFactor

    @classmethod
    def at(cls, kernel: LinearOperator, solution: LaplaceSolution) -> "WhitenedSystem":
        whitened, dtype = WhitenedKernelLinearOperator(kernel, curvature=solution.curvature), kernel.dtype
        operator = NoisyLinearOperator(whitened, torch.ones(whitened.shape[-1], dtype=dtype, device=kernel.device))
        # Nystrom: K S (S^T K S)^+ S^T K <= K, so preconditioned eigenvalues are at least 1.
        known = solution.inverse.images @ inverse_root(
            solution.inverse.actions.mT @ solution.inverse.images, torch.finfo(dtype).eps
        )
        factor = solution.curvature.root_t(known).to(dtype)
        return cls(operator, solution.curvature, NystromFactor(factor, operator.noise))

    def solve(
        self, columns: Tensor, tolerance: float, callback: Callable[[SolveProgress], None] | None = None
    ) -> Solution:
        """H^-1 x for x [n r, b], by conjugate gradients."""
        known, rhs = self.preconditioner, columns.to(self.operator.dtype)
        solver = ConjugateGradients(tolerance=tolerance)
        return solver.solve(self.operator, rhs, preconditioner=known, norm=known, callback=callback)

"""Preconditioned conjugate gradients on a block of columns, each with its own step sizes.

Gardner et al. 2018 (batched, with a pivoted Cholesky preconditioner); Lin et al. 2024, algorithm 1, with the first
direction preconditioned.
"""

from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky
from gpy_iterative.solvers.base import Iterate, IterativeSolver


@dataclass(frozen=True)
class _State:
    direction: Tensor
    product: Tensor  # r^T P^-1 r, [s]
    preconditioner: LowRankPlusDiagonal | None

    def precondition(self, residual: Tensor) -> Tensor:
        return residual if self.preconditioner is None else self.preconditioner.solve(residual)


@dataclass(frozen=True, kw_only=True)
class ConjugateGradients(IterativeSolver[_State]):
    """One product with the matrix an iteration, one iteration an epoch.

    Args:
        preconditioner: the recipe that `solve` builds when it is given none; None for no preconditioner.

    Further options are those of `IterativeSolver`. Memory: five blocks [n, s], and [n, rank].
    """

    preconditioner: PivotedCholesky | None = PivotedCholesky(rank=100)

    def init(
        self,
        operator: LinearOperator,
        iterate: Iterate,
        preconditioner: LowRankPlusDiagonal | None,
        generator: torch.Generator | None,
    ) -> _State:
        if preconditioner is None and self.preconditioner is not None:
            preconditioner = self.preconditioner.build(operator)
        state = _State(iterate.residual, iterate.residual.new_zeros(()), preconditioner)
        direction = state.precondition(iterate.residual)
        return replace(state, direction=direction.clone(), product=(iterate.residual * direction).sum(0))

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        image = operator._matmul(state.direction)
        length = _ratio(state.product, (state.direction * image).sum(0))
        iterate.value.addcmul_(state.direction, length)
        iterate.residual.addcmul_(image, -length)
        preconditioned = state.precondition(iterate.residual)
        product = (iterate.residual * preconditioned).sum(0)
        direction = preconditioned + _ratio(product, state.product) * state.direction
        return replace(state, direction=direction, product=product)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(state, direction=state.direction[:, columns], product=state.product[columns])

    def work_per_step(self, operator: LinearOperator) -> float:
        return 1.0

    def work_of_init(self, operator: LinearOperator) -> float:
        rank = 0 if self.preconditioner is None else min(self.preconditioner.rank, operator.shape[-1])
        return rank / operator.shape[-1]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Zero where a column is done exactly (0 / 0)."""
    safe = torch.where(denominator == 0, torch.ones_like(denominator), denominator)
    return torch.where(denominator == 0, torch.zeros_like(numerator), numerator / safe)

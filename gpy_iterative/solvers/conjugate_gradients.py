"""Preconditioned conjugate gradients on a block of columns, each with its own step sizes.

Gardner et al. 2018 (batched, with a pivoted Cholesky preconditioner); Lin et al. 2024, algorithm 1, with the first
direction preconditioned.
"""

from dataclasses import dataclass, field, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_instance
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky
from gpy_iterative.solvers.base import Iterate, IterativeSolver


@dataclass(frozen=True)
class _State:
    """Directions [n, s], r^T P^-1 r [s], P, and how much of the matrix it took to build P here."""

    direction: Tensor
    product: Tensor
    preconditioner: LowRankPlusDiagonal | None
    setup: float

    def precondition(self, residual: Tensor) -> Tensor:
        return residual if self.preconditioner is None else self.preconditioner.solve(residual)


@dataclass(frozen=True, kw_only=True)
class ConjugateGradients(IterativeSolver[_State]):
    """One product with the matrix an iteration, one iteration an epoch.

    Args:
        preconditioner: the recipe that `solve` builds when it is given none; None for no preconditioner.

    Further options are those of `IterativeSolver`. Memory: eight blocks [n, s], and [n, rank].
    """

    preconditioner: PivotedCholesky | None = field(default=PivotedCholesky(rank=100))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance("preconditioner", self.preconditioner, PivotedCholesky, "PivotedCholesky(rank=100)")

    def init(
        self,
        operator: LinearOperator,
        iterate: Iterate,
        preconditioner: LowRankPlusDiagonal | None,
        generator: torch.Generator | None,
    ) -> _State:
        setup = 0.0
        if preconditioner is None and self.preconditioner is not None:
            preconditioner = self.preconditioner.build(operator)
            setup = preconditioner.rank / operator.shape[-1]
        return self._begin(iterate, preconditioner, setup)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return self._begin(iterate, state.preconditioner, state.setup)

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        image = operator._matmul(state.direction)
        length = _ratio(state.product, (state.direction * image).sum(0))
        iterate.value.addcmul_(state.direction, length)
        iterate.residual.addcmul_(image, -length)
        preconditioned = state.precondition(iterate.residual)
        product = (iterate.residual * preconditioned).sum(0)
        direction = torch.addcmul(preconditioned, _ratio(product, state.product), state.direction)
        return replace(state, direction=direction, product=product)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(state, direction=state.direction[:, columns], product=state.product[columns])

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return 1.0

    def work_of_setup(self, state: _State) -> float:
        return state.setup

    def _begin(self, iterate: Iterate, preconditioner: LowRankPlusDiagonal | None, setup: float) -> _State:
        state = _State(iterate.residual, iterate.residual.new_zeros(()), preconditioner, setup)
        # Preconditioned, unlike in the printed algorithm, which diverges. Cloned: the step overwrites the residual.
        direction = state.precondition(iterate.residual).clone()
        return replace(state, direction=direction, product=(iterate.residual * direction).sum(0))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Zero where a column is done exactly (0 / 0); NaN stays NaN."""
    is_zero = denominator == 0
    return torch.where(is_zero, torch.zeros_like(numerator), numerator / denominator.masked_fill(is_zero, 1))

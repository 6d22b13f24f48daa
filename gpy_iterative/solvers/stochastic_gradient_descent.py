"""Stochastic gradient descent with momentum on the quadratic whose minimum is the solution.

Lin et al. 2024, algorithm 3 (heavy ball, no averaging), with the true residual at the start, a permutation of the rows
an epoch, and a step size that is chosen to be stable.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import rows_matmul
from gpy_iterative.preconditioners import LowRankPlusDiagonal
from gpy_iterative.solvers.base import Iterate, IterativeSolver
from gpy_iterative.solvers.descent import (
    MAX_HALVINGS,
    WayBack,
    check_descent,
    largest_eigenvalue,
    row_permutation,
)


@dataclass(frozen=True)
class _State:
    momentum: Tensor
    way_back: WayBack
    learning_rate: float
    halvings: int
    order: Tensor
    position: int
    generator: torch.Generator
    setup: float


@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(IterativeSolver[_State]):
    """A batch of rows an iteration, n / batch_size iterations an epoch.

    Args:
        batch_size: rows of a batch; clamped at n.
        momentum: of the heavy ball.
        learning_rate: of the mean gradient over a batch; None takes half the stability limit
            min(2 (1 + momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).

    Further options are those of `IterativeSolver`. The running residual of a row is as old as its last visit, so that
    nothing is taken for solved before its true residual was computed (an epoch, in the overhead). A solve that diverges
    starts again with half the step size, five times at the most. Memory: ten blocks [n, s]. Without a generator the
    rows are permuted from seed 0.
    """

    recursive: ClassVar[bool] = False

    batch_size: int = 500
    momentum: float = 0.9
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_descent(self.batch_size, self.momentum, self.learning_rate)

    def init(
        self,
        operator: LinearOperator,
        iterate: Iterate,
        preconditioner: LowRankPlusDiagonal | None,
        generator: torch.Generator | None,
    ) -> _State:
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        rate, setup = self.learning_rate, 0
        if rate is None:
            largest, setup = largest_eigenvalue(operator, generator)
            rate = 0.5 * self._stability_limit(operator, largest)
        return self._begin(iterate, rate, 0, row_permutation(operator, generator), 0, generator, setup)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return self._begin(iterate, state.learning_rate, 0, state.order, state.position, state.generator, state.setup)

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        if state.position >= len(state.order):
            state = replace(state, order=row_permutation(operator, state.generator), position=0)
        rows = state.order[state.position : state.position + self.batch_size]
        gradient = rows_matmul(operator, rows, iterate.value) - iterate.rhs[rows]
        state.momentum.mul_(self.momentum)
        state.momentum[rows] -= (state.learning_rate / len(rows)) * gradient
        iterate.value += state.momentum
        iterate.residual[rows] = -gradient
        state = replace(state, position=state.position + self.batch_size)
        growth = state.way_back.growth(iterate.residual)
        if growth <= 1 or (not math.isfinite(growth) and state.halvings == MAX_HALVINGS):
            return state  # what no step size keeps finite is for the loop to report
        return self._halve(iterate, state)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(
            state,
            momentum=state.momentum[:, columns],
            way_back=state.way_back.narrow(columns),
        )

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return min(self.batch_size / operator.shape[-1], 1.0)

    def work_of_setup(self, state: _State) -> float:
        return state.setup

    def has_diverged(self, state: _State) -> bool:
        return state.halvings > MAX_HALVINGS

    def _begin(
        self,
        iterate: Iterate,
        learning_rate: float,
        halvings: int,
        order: Tensor,
        position: int,
        generator: torch.Generator,
        setup: float,
    ) -> _State:
        return _State(
            momentum=torch.zeros_like(iterate.value),
            way_back=WayBack.to(iterate),
            learning_rate=learning_rate,
            halvings=halvings,
            order=order,
            position=position,
            generator=generator,
            setup=setup,
        )

    def _halve(self, iterate: Iterate, state: _State) -> _State:
        """Back to where the round began, with half the step size."""
        state.way_back.take(iterate)
        return replace(
            state,
            momentum=torch.zeros_like(state.momentum),
            learning_rate=state.learning_rate / 2,
            halvings=state.halvings + 1,
        )

    def _stability_limit(self, operator: LinearOperator, largest: float) -> float:
        size = operator.shape[-1]
        diagonal = float(operator.diagonal(dim1=-1, dim2=-2).max())
        return min(
            2 * (1 + self.momentum) * size / largest,
            2 * (1 - self.momentum) * min(self.batch_size, size) / diagonal,
        )

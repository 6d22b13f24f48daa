"""Stochastic gradient descent with momentum on the quadratic whose minimum is the solution.

Lin et al. 2024, algorithm 3 (heavy ball, no averaging), with the true residual at the start, a permutation of the rows
an epoch, and a step size that is chosen to be stable.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import rows_matmul
from gpy_iterative.linear_solvers.columns import Iterate
from gpy_iterative.linear_solvers.descent import Descent, DescentState, StochasticDescent, row_permutation


@dataclass(frozen=True)
class _State(DescentState):
    momentum: Tensor
    order: Tensor
    position: int


@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(StochasticDescent[_State]):
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

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        # A last batch of few rows would go as far along them as a whole one along all of its.
        if state.position + min(self.batch_size, len(state.order)) > len(state.order):
            state = replace(state, order=row_permutation(operator, state.descent.generator), position=0)
        rows = state.order[state.position : state.position + self.batch_size]
        gradient = rows_matmul(operator, rows, iterate.value) - iterate.rhs[rows]
        state.momentum.mul_(self.momentum)
        state.momentum[rows] -= (state.descent.learning_rate / len(rows)) * gradient
        iterate.value += state.momentum
        iterate.residual[rows] = -gradient
        state = replace(state, position=state.position + self.batch_size)
        return self._within_bounds(operator, iterate, state, iterate.residual)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(state, descent=state.descent.narrow(columns), momentum=state.momentum[:, columns])

    def _begin(self, operator: LinearOperator, iterate: Iterate, descent: Descent) -> _State:
        order = row_permutation(operator, descent.generator)
        return _State(descent, momentum=torch.zeros_like(iterate.value), order=order, position=0)

    def _anew(self, iterate: Iterate, state: _State, descent: Descent) -> _State:
        return replace(state, descent=descent, momentum=torch.zeros_like(iterate.value))

    def _largest_stable_product(self) -> float:
        return 2 * (1 + self.momentum)

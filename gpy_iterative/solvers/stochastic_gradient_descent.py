"""Stochastic gradient descent with momentum on the quadratic whose minimum is the solution.

Lin et al. 2024, algorithm 3 (heavy ball, no averaging), with the true residual at the start, a permutation of the rows
an epoch, and a step size that is chosen to be stable.
"""

from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import rows_matmul
from gpy_iterative.preconditioners import LowRankPlusDiagonal
from gpy_iterative.solvers.base import Iterate, IterativeSolver

POWER_ITERATIONS = 10
MAX_HALVINGS = 5


@dataclass(frozen=True)
class _State:
    momentum: Tensor
    rhs: Tensor
    start: Iterate
    start_norm: Tensor
    learning_rate: float
    halvings: int
    order: Tensor
    position: int
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(IterativeSolver[_State]):
    """A batch of rows an iteration, n / batch_size iterations an epoch.

    Args:
        batch_size: rows of a batch; clamped at n.
        momentum: of the heavy ball.
        learning_rate: of the mean gradient over a batch; None takes half the stability limit
            min(2 (1 + momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).

    Further options are those of `IterativeSolver`. The running residual of a row is as old as its last visit; what is
    reported is a true one. Memory: five blocks [n, s].
    """

    batch_size: int = 500
    momentum: float = 0.9
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}.")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}.")

    def init(
        self,
        operator: LinearOperator,
        iterate: Iterate,
        preconditioner: LowRankPlusDiagonal | None,
        generator: torch.Generator | None,
    ) -> _State:
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        rate = self._stable_rate(operator, generator) if self.learning_rate is None else self.learning_rate
        norm = torch.linalg.vector_norm(iterate.residual, dim=0)
        return _State(
            momentum=torch.zeros_like(iterate.value),
            rhs=iterate.residual + operator._matmul(iterate.value),
            start=Iterate(iterate.value.clone(), iterate.residual.clone()),
            start_norm=norm,
            learning_rate=rate,
            halvings=0,
            order=self._permutation(operator, generator),
            position=0,
            generator=generator,
        )

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        if state.position >= len(state.order):
            state = replace(state, order=self._permutation(operator, state.generator), position=0)
        rows = state.order[state.position : state.position + self.batch_size]
        gradient = rows_matmul(operator, rows, iterate.value) - state.rhs[rows]
        state.momentum.mul_(self.momentum)
        state.momentum[rows] -= (state.learning_rate / len(rows)) * gradient
        iterate.value += state.momentum
        iterate.residual[rows] = -gradient
        state = replace(state, position=state.position + self.batch_size)
        norm = torch.linalg.vector_norm(iterate.residual, dim=0)
        if not bool((norm <= 10 * state.start_norm).all()):  # also when it is NaN
            return self._restart(iterate, state)
        return state

    def narrow(self, state: _State, columns: Tensor) -> _State:
        start = Iterate(state.start.value, state.start.residual)
        start.keep(columns)
        return replace(
            state,
            momentum=state.momentum[:, columns],
            rhs=state.rhs[:, columns],
            start=start,
            start_norm=state.start_norm[columns],
        )

    def work_per_step(self, operator: LinearOperator) -> float:
        return min(self.batch_size / operator.shape[-1], 1.0)

    def work_of_init(self, operator: LinearOperator) -> float:
        return 1.0 + (POWER_ITERATIONS if self.learning_rate is None else 0)

    def has_failed(self, state: _State) -> bool:
        return state.halvings > MAX_HALVINGS

    def _restart(self, iterate: Iterate, state: _State) -> _State:
        """Back to where the solve began, with half the step size."""
        iterate.value.copy_(state.start.value)
        iterate.residual.copy_(state.start.residual)
        return replace(
            state,
            momentum=torch.zeros_like(state.momentum),
            learning_rate=state.learning_rate / 2,
            halvings=state.halvings + 1,
        )

    def _permutation(self, operator: LinearOperator, generator: torch.Generator) -> Tensor:
        order = torch.randperm(operator.shape[-1], generator=generator, device=generator.device)
        return order.to(operator.device)

    def _stable_rate(self, operator: LinearOperator, generator: torch.Generator) -> float:
        size = operator.shape[-1]
        vector = torch.randn(size, 1, generator=generator, device=generator.device, dtype=operator.dtype)
        vector, largest = vector.to(operator.device), 1.0
        for _ in range(POWER_ITERATIONS):
            vector = operator._matmul(vector / torch.linalg.vector_norm(vector))
            largest = float(torch.linalg.vector_norm(vector))
        batch = min(self.batch_size, size)
        diagonal = float(operator.diagonal(dim1=-1, dim2=-2).max())
        return 0.5 * min(2 * (1 + self.momentum) * size / largest, 2 * (1 - self.momentum) * batch / diagonal)

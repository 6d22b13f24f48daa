"""Stochastic dual descent: random coordinates, Nesterov's momentum and an average of the iterates.

Lin, Padhy, Antoran, Tripp, Terenin, Szepesvari, Hernandez-Lobato and Janz 2024, "Stochastic gradient descent for
Gaussian processes done right", algorithm 1. Where the paper evaluates rows of the matrix at the point that the momentum
looks ahead to, the same rows, as columns, here update the residual: at the same price it is always the true one.
"""

import math
from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import dense_rows
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
    """Position and velocity, H times either (the first subtracted from the right-hand side), and the way back."""

    position: Tensor
    residual: Tensor
    velocity: Tensor
    image: Tensor
    way_back: WayBack
    learning_rate: float
    halvings: int
    generator: torch.Generator
    setup: float


@dataclass(frozen=True, kw_only=True)
class StochasticDualDescent(IterativeSolver[_State]):
    """A batch of random coordinates an iteration, n / batch_size iterations an epoch.

    The gradient's noise vanishes at the solution, so that the step size stays as large as it is. Unlike that of
    `StochasticGradientDescent` the residual is the true one after every iteration, so that columns leave as soon as they
    are done, and no further epoch has to make sure of it.

    Args:
        batch_size: coordinates of a batch, drawn anew without repetition; clamped at n.
        momentum: Nesterov's.
        learning_rate: of the mean gradient over a batch (n times the paper's step size); None takes half of
            min((2 + 2 momentum) / (1 + 2 momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).
        averaging: weight of the newest iterate in the geometric average that is returned; 1 returns the last one. (The
            papers' 100 / T, for T iterations in all, needs their number in advance.)

    Further options are those of `IterativeSolver`. A solve that diverges starts again with half the step size, five
    times at the most. Memory: fourteen blocks [n, s], and batch_size rows of the matrix. Without a generator the
    coordinates are drawn from seed 0.
    """

    batch_size: int = 500
    momentum: float = 0.9
    learning_rate: float | None = None
    averaging: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_descent(self.batch_size, self.momentum, self.learning_rate)
        if not 0 < self.averaging <= 1:
            raise ValueError(f"averaging must lie in (0, 1], got {self.averaging}.")

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
        return self._begin(iterate, rate, generator, setup)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return self._begin(iterate, state.learning_rate, state.generator, state.setup)

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        rows = row_permutation(operator, state.generator)[: self.batch_size]
        ahead = state.residual[rows] - self.momentum * state.image[rows]
        change = (state.learning_rate / len(rows)) * ahead
        state.velocity.mul_(self.momentum)
        state.velocity[rows] += change
        state.image.mul_(self.momentum).addmm_(dense_rows(operator, rows).mT, change)
        state.position.add_(state.velocity)
        state.residual.sub_(state.image)
        iterate.value.lerp_(state.position, self.averaging)
        iterate.residual.lerp_(state.residual, self.averaging)
        growth = state.way_back.growth(state.residual)
        if growth <= 1 or (not math.isfinite(growth) and state.halvings == MAX_HALVINGS):
            return state  # what no step size keeps finite is for the loop to report
        state.way_back.take(iterate)
        smaller = self._begin(iterate, state.learning_rate / 2, state.generator, state.setup)
        return replace(smaller, halvings=state.halvings + 1)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(
            state,
            position=state.position[:, columns],
            residual=state.residual[:, columns],
            velocity=state.velocity[:, columns],
            image=state.image[:, columns],
            way_back=state.way_back.narrow(columns),
        )

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return min(self.batch_size / operator.shape[-1], 1.0)

    def work_of_setup(self, state: _State) -> float:
        return state.setup

    def has_diverged(self, state: _State) -> bool:
        return state.halvings > MAX_HALVINGS

    def _begin(self, iterate: Iterate, learning_rate: float, generator: torch.Generator, setup: float) -> _State:
        return _State(
            position=iterate.value.clone(),
            residual=iterate.residual.clone(),
            velocity=torch.zeros_like(iterate.value),
            image=torch.zeros_like(iterate.value),
            way_back=WayBack.to(iterate),
            learning_rate=learning_rate,
            halvings=0,
            generator=generator,
            setup=setup,
        )

    def _stability_limit(self, operator: LinearOperator, largest: float) -> float:
        size = operator.shape[-1]
        diagonal = float(operator.diagonal(dim1=-1, dim2=-2).max())
        return min(
            (2 + 2 * self.momentum) / (1 + 2 * self.momentum) * size / largest,
            2 * (1 - self.momentum) * min(self.batch_size, size) / diagonal,
        )

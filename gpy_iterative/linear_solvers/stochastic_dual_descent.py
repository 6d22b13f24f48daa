"""Stochastic dual descent: random coordinates, Nesterov's momentum and an average of the iterates.

Lin, Padhy, Antoran, Tripp, Terenin, Szepesvari, Hernandez-Lobato and Janz 2024, "Stochastic gradient descent for
Gaussian processes done right", algorithm 1. Where the paper evaluates rows of the matrix at the point that the momentum
looks ahead to, the same rows, as columns, here update the residual: at the same price it is always the true one.
"""

from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.linear_solvers.columns import Iterate
from gpy_iterative.linear_solvers.descent import Descent, DescentState, StochasticDescent, row_permutation


@dataclass(frozen=True)
class _State(DescentState):
    """Position and velocity, and H times either (the first subtracted from the right-hand side)."""

    position: Tensor
    residual: Tensor
    velocity: Tensor
    image: Tensor

    @classmethod
    def at_rest(cls, iterate: Iterate, descent: Descent) -> "_State":
        """Where the iterate is, without velocity."""
        zeros = torch.zeros_like(iterate.value)
        return cls(descent, iterate.value.clone(), iterate.residual.clone(), velocity=zeros, image=zeros.clone())


@dataclass(frozen=True, kw_only=True)
class StochasticDualDescent(StochasticDescent[_State]):
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

    averaging: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.averaging <= 1:
            raise ValueError(f"averaging must lie in (0, 1], got {self.averaging}.")

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        rows = row_permutation(operator, state.descent.generator)[: self.batch_size]
        ahead = state.residual[rows] - self.momentum * state.image[rows]
        change = (state.descent.learning_rate / len(rows)) * ahead
        state.velocity.mul_(self.momentum)
        state.velocity[rows] += change
        state.image.mul_(self.momentum).addmm_(dense_rows(operator, rows).mT, change)
        state.position.add_(state.velocity)
        state.residual.sub_(state.image)
        iterate.value.lerp_(state.position, self.averaging)
        iterate.residual.lerp_(state.residual, self.averaging)
        return self._within_bounds(operator, iterate, state, state.residual)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(
            state,
            descent=state.descent.narrow(columns),
            position=state.position[:, columns],
            residual=state.residual[:, columns],
            velocity=state.velocity[:, columns],
            image=state.image[:, columns],
        )

    def _begin(self, operator: LinearOperator, iterate: Iterate, descent: Descent) -> _State:
        return _State.at_rest(iterate, descent)

    def _anew(self, iterate: Iterate, state: _State, descent: Descent) -> _State:
        return _State.at_rest(iterate, descent)

    def _largest_stable_product(self) -> float:
        return (2 + 2 * self.momentum) / (1 + 2 * self.momentum)

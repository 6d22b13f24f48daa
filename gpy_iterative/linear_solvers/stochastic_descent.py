"""Stochastic gradient descent and stochastic dual descent.

Gradient descent: Lin et al. 2024, algorithm 3. Dual descent: Lin, Padhy et al. 2024, "Stochastic gradient descent for
Gaussian processes done right", algorithm 1; here rows also update the residual.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, check_number, check_positive
from gpy_iterative.linear_operators.extensions import dense_rows, rows_matmul
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, SolverState, lowest_curvature
from gpy_iterative.linear_solvers.columns import READS_EVERY, Iterate
from gpy_iterative.random_numbers import given_or_seeded, normal, permutation
from gpy_iterative.worker_threads import CPU

#: Power iterations stop when the eigenvalue grows by less than this part.
EIGENVALUE_TOLERANCE = 0.05
MAX_POWER_ITERATIONS = 10
#: Growth of a residual at which a round restarts.
DIVERGENCE = 10.0
MAX_HALVINGS = 5
#: Weight of the newest iterate in dual descent's geometric average.
AVERAGING = 0.1


@dataclass(frozen=True)
class WayBack:
    """Start of a round, and residual norms [s] at which it restarts."""

    value: Tensor
    residual: Tensor
    limit: Tensor
    steps: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def to(cls, iterate: Iterate) -> "WayBack":
        limit = DIVERGENCE * torch.linalg.vector_norm(iterate.residual, dim=0)
        limit.clamp_min_(torch.finfo(limit.dtype).tiny)  # an exact column does not grow
        return cls(iterate.value.clone(), iterate.residual.clone(), limit)

    def growth(self, residual: Tensor) -> float:
        """Largest ratio of norm and limit; 0 between readings."""
        if next(self.steps) % READS_EVERY.on(residual.device):
            return 0.0
        return float((torch.linalg.vector_norm(residual, dim=0) / self.limit).max())

    def take(self, iterate: Iterate) -> None:
        iterate.value.copy_(self.value)
        iterate.residual.copy_(self.residual)

    def narrow(self, columns: Tensor) -> "WayBack":
        return WayBack(self.value[:, columns], self.residual[:, columns], self.limit[columns], self.steps)


@dataclass(frozen=True, kw_only=True)
class DescentState(SolverState):
    way_back: WayBack
    learning_rate: float
    generator: torch.Generator
    halvings: int = 0  # in this round


State = TypeVar("State", bound=DescentState)


@dataclass(frozen=True, kw_only=True)
class StochasticDescent(IterativeSolver[State]):
    state_class: ClassVar[Any]

    batch_size: int = 500
    momentum: float = 0.9
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("batch_size", self.batch_size)
        check_number("momentum", self.momentum, "be at least 0 and below 1", lambda number: 0 <= number < 1)
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)

    @abstractmethod
    def _largest_stable_product(self) -> float:
        """Largest stable product of step size and curvature."""

    @abstractmethod
    def _at_rest(self, iterate: Iterate) -> dict[str, Tensor]:
        """The state's tensors, without velocity."""

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> State:
        generator = given_or_seeded(inputs.generator)
        rate, setup = self.learning_rate, 0
        if rate is None:
            largest, setup = largest_eigenvalue(operator, generator)
            size, diagonal = operator.shape[-1], float(operator.diagonal(dim1=-1, dim2=-2).max())
            for_rows = 2 * (1 - self.momentum) * min(self.batch_size, size) / diagonal
            rate = 0.5 * min(self._largest_stable_product() * size / largest, for_rows)
        common = {"way_back": WayBack.to(iterate), "learning_rate": rate, "generator": generator, "setup": setup}
        share = min(self.batch_size / operator.shape[-1], 1.0)
        return self.state_class(share=share, **common, **self._at_rest(iterate))

    def restart(self, iterate: Iterate, state: State) -> State:
        return replace(state, way_back=WayBack.to(iterate), halvings=0, **self._at_rest(iterate))

    def _within_bounds(self, operator: LinearOperator, iterate: Iterate, state: State, residual: Tensor) -> State:
        """The state, or a restart with half the step size if residuals grew."""
        growth = state.way_back.growth(residual)
        # The loop raises NonFiniteError if no step size keeps residuals finite.
        if growth <= 1 or (not math.isfinite(growth) and state.halvings == MAX_HALVINGS):
            return state
        grown = iterate.value - state.way_back.value
        # If it is negative, no step size helps.
        curvature = float(lowest_curvature(grown, (grown * operator._matmul(grown)).sum(0)))
        state.way_back.take(iterate)
        return replace(
            state,
            way_back=WayBack.to(iterate),
            learning_rate=state.learning_rate / 2,
            halvings=state.halvings + 1,
            has_diverged=state.halvings >= MAX_HALVINGS,
            setup=state.setup + 1,
            curvature=min(state.curvature, curvature),
            **self._at_rest(iterate),
        )


def largest_eigenvalue(operator: LinearOperator, generator: torch.Generator) -> tuple[float, int]:
    """A lower bound, and the number of products."""
    vector = normal((operator.shape[-1], 1), generator, operator.device, operator.dtype)
    largest = 0.0
    for iteration in range(1, MAX_POWER_ITERATIONS + 1):
        vector = operator._matmul(vector / torch.linalg.vector_norm(vector))
        previous, largest = largest, float(torch.linalg.vector_norm(vector))
        if largest <= (1 + EIGENVALUE_TOLERANCE) * previous:
            return largest, iteration
    return largest, MAX_POWER_ITERATIONS


@dataclass(frozen=True, kw_only=True)
class _GradientState(DescentState):
    by_column: ClassVar[tuple[str, ...]] = ("momentum", "way_back")

    momentum: Tensor  # of the heavy ball, [n, s]
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long, device=CPU))
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(StochasticDescent[_GradientState]):
    """Stochastic gradient descent; an epoch is n / batch_size iterations.

    A check of true residuals costs an epoch of overhead. A diverging solve restarts with half the step size. Other options:
    `IterativeSolver`. Memory: ten blocks [n, s].

    Args:
        batch_size: rows of a batch, at most n.
        momentum: of the heavy ball.
        learning_rate: for the mean gradient of a batch; None: half of
            min(2 (1 + momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).
    """

    recursive: ClassVar[bool] = False
    state_class: ClassVar[type] = _GradientState

    def step(self, operator: LinearOperator, iterate: Iterate, state: _GradientState) -> _GradientState:
        # A short last batch would step too far.
        if state.position + min(self.batch_size, operator.shape[-1]) > len(state.order):
            state = replace(state, order=permutation(operator.shape[-1], state.generator, operator.device), position=0)
        rows = state.order[state.position : state.position + self.batch_size]
        gradient = rows_matmul(operator, rows, iterate.value) - iterate.rhs[rows]
        state.momentum.mul_(self.momentum)
        state.momentum[rows] -= (state.learning_rate / len(rows)) * gradient
        iterate.value += state.momentum
        iterate.residual[rows] = -gradient
        state = replace(state, position=state.position + self.batch_size)
        return self._within_bounds(operator, iterate, state, iterate.residual)

    def _at_rest(self, iterate: Iterate) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(iterate.value)}

    def _largest_stable_product(self) -> float:
        return 2 * (1 + self.momentum)


@dataclass(frozen=True, kw_only=True)
class _DualState(DescentState):
    by_column: ClassVar[tuple[str, ...]] = ("position", "residual", "velocity", "velocity_product", "way_back")

    position: Tensor  # [n, s]
    residual: Tensor  # B - H position
    velocity: Tensor
    velocity_product: Tensor  # H velocity


@dataclass(frozen=True, kw_only=True)
class StochasticDualDescent(StochasticDescent[_DualState]):
    """Stochastic dual descent; an epoch is n / batch_size iterations.

    A diverging solve restarts with half the step size. Other options: `IterativeSolver`. Memory: fourteen blocks [n, s] and
    batch_size rows.

    Args:
        batch_size: coordinates of a batch, at most n.
        momentum: Nesterov's.
        learning_rate: for the mean gradient of a batch (n times the paper's step size); None: half of
            min((2 + 2 momentum) / (1 + 2 momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).
    """

    state_class: ClassVar[type] = _DualState

    def step(self, operator: LinearOperator, iterate: Iterate, state: _DualState) -> _DualState:
        rows = permutation(operator.shape[-1], state.generator, operator.device)[: self.batch_size]
        ahead = state.residual[rows] - self.momentum * state.velocity_product[rows]
        change = (state.learning_rate / len(rows)) * ahead
        state.velocity.mul_(self.momentum)
        state.velocity[rows] += change
        state.velocity_product.mul_(self.momentum).addmm_(dense_rows(operator, rows).mT, change)
        state.position.add_(state.velocity)
        state.residual.sub_(state.velocity_product)
        iterate.value.lerp_(state.position, AVERAGING)
        iterate.residual.lerp_(state.residual, AVERAGING)
        return self._within_bounds(operator, iterate, state, state.residual)

    def _at_rest(self, iterate: Iterate) -> dict[str, Tensor]:
        at_start = {"position": iterate.value.clone(), "residual": iterate.residual.clone()}
        return at_start | {name: torch.zeros_like(iterate.value) for name in ("velocity", "velocity_product")}

    def _largest_stable_product(self) -> float:
        return (2 + 2 * self.momentum) / (1 + 2 * self.momentum)

"""Stochastic descent with momentum along batches of rows: stochastic gradient descent and stochastic dual descent.

Gradient descent is Lin et al. 2024, algorithm 3 (heavy ball, no averaging), with the true residual at the start, a
permutation of the rows an epoch, and a step size that is chosen to be stable.

Dual descent is Lin, Padhy, Antoran, Tripp, Terenin, Szepesvari, Hernandez-Lobato and Janz 2024, "Stochastic gradient
descent for Gaussian processes done right", algorithm 1: random coordinates, Nesterov's momentum and an average of the
iterates. Here the rows of the matrix, as columns, also update the residual, so that it is always the true one.
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

from gpy_iterative.checks import check_count, check_number, check_positive, check_rate
from gpy_iterative.linear_operators.extensions import dense_rows, rows_matmul
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, SolverState, lowest_curvature
from gpy_iterative.linear_solvers.columns import Iterate, reads_every

#: The largest eigenvalue is known well enough when a power iteration raises it by less than this part.
EIGENVALUE_TOLERANCE = 0.05
MAX_POWER_ITERATIONS = 10
#: A residual that grows beyond this multiple of its start sends the round back there, with a smaller step.
DIVERGENCE = 10.0
MAX_HALVINGS = 5


@dataclass(frozen=True)
class WayBack:
    """Where a round of iterations began, and how far residuals may grow before it goes back there."""

    value: Tensor  # [n, s], a copy
    residual: Tensor  # [n, s], a copy
    limit: Tensor  # residual norms [s]
    steps: Iterator[int] = field(default_factory=itertools.count)  # an accelerator is read every few of them only

    @classmethod
    def to(cls, iterate: Iterate) -> "WayBack":
        """The way back to this iterate."""
        limit = DIVERGENCE * torch.linalg.vector_norm(iterate.residual, dim=0)
        limit.clamp_min_(torch.finfo(limit.dtype).tiny)  # a column that is solved exactly does not grow
        return cls(iterate.value.clone(), iterate.residual.clone(), limit)

    def growth(self, residual: Tensor) -> float:
        """The largest norm of the columns of [n, s] over its limit, at most 1 where all is well; 0 between readings."""
        if next(self.steps) % reads_every(residual.device):
            return 0.0
        return float((torch.linalg.vector_norm(residual, dim=0) / self.limit).max())

    def take(self, iterate: Iterate) -> None:
        """Overwrites the iterate."""
        iterate.value.copy_(self.value)
        iterate.residual.copy_(self.residual)

    def narrow(self, columns: Tensor) -> "WayBack":
        """For some of the columns."""
        return WayBack(self.value[:, columns], self.residual[:, columns], self.limit[columns], self.steps)


@dataclass(frozen=True, kw_only=True)
class DescentState(SolverState):
    """The step size of a descent, and the way back to the start of the round when it is too large; solvers add theirs."""

    way_back: WayBack
    learning_rate: float
    generator: torch.Generator
    halvings: int = 0  # of the learning rate in this round


State = TypeVar("State", bound=DescentState)


@dataclass(frozen=True, kw_only=True)
class StochasticDescent(IterativeSolver[State]):
    """Descent with momentum along a batch of random rows an iteration, n / batch_size iterations an epoch."""

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
        """The largest stable product of step size and curvature, with this momentum and whole gradients."""

    @abstractmethod
    def _at_rest(self, iterate: Iterate) -> dict[str, Tensor]:
        """The moving parts of the state, `state_class.moving`, at the iterate and without velocity."""

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> State:
        generator = torch.Generator().manual_seed(0) if inputs.generator is None else inputs.generator
        rate, setup = self.learning_rate, 0
        if rate is None:
            largest, setup = largest_eigenvalue(operator, generator)
            size, diagonal = operator.shape[-1], float(operator.diagonal(dim1=-1, dim2=-2).max())
            for_rows = 2 * (1 - self.momentum) * min(self.batch_size, size) / diagonal
            rate = 0.5 * min(self._largest_stable_product() * size / largest, for_rows)
        common = {"way_back": WayBack.to(iterate), "learning_rate": rate, "generator": generator, "setup": setup}
        return self.state_class(**common, **self._at_rest(iterate))

    def restart(self, iterate: Iterate, state: State) -> State:
        return replace(state, way_back=WayBack.to(iterate), halvings=0, **self._at_rest(iterate))

    def narrow(self, state: State, columns: Tensor) -> State:
        moving = {name: getattr(state, name)[:, columns] for name in self.state_class.moving}
        return replace(state, way_back=state.way_back.narrow(columns), **moving)

    def work_per_step(self, operator: LinearOperator, state: State) -> float:
        return min(self.batch_size / operator.shape[-1], 1.0)

    def _within_bounds(self, operator: LinearOperator, iterate: Iterate, state: State, residual: Tensor) -> State:
        """The state after a step: back where the round began, with half the step size, where residuals [n, s] grew."""
        growth = state.way_back.growth(residual)
        # The loop reports a residual that no step size keeps finite.
        if growth <= 1 or (not math.isfinite(growth) and state.halvings == MAX_HALVINGS):
            return state
        grown = iterate.value - state.way_back.value
        # Residuals grow where the step was too large, or where no step size helps: a product tells which.
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


def row_permutation(operator: LinearOperator, generator: torch.Generator) -> Tensor:
    """All rows in random order, on the operator's device."""
    order = torch.randperm(operator.shape[-1], generator=generator, device=generator.device)
    return order.to(operator.device)


def largest_eigenvalue(operator: LinearOperator, generator: torch.Generator) -> tuple[float, int]:
    """A lower estimate by power iterations, and the number of products that it took."""
    shape, device = (operator.shape[-1], 1), generator.device
    vector = torch.randn(shape, generator=generator, device=device, dtype=operator.dtype).to(operator.device)
    largest = 0.0
    for iteration in range(1, MAX_POWER_ITERATIONS + 1):
        vector = operator._matmul(vector / torch.linalg.vector_norm(vector))
        previous, largest = largest, float(torch.linalg.vector_norm(vector))
        if largest <= (1 + EIGENVALUE_TOLERANCE) * previous:
            return largest, iteration
    return largest, MAX_POWER_ITERATIONS


@dataclass(frozen=True, kw_only=True)
class _GradientState(DescentState):
    moving: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: Tensor  # of the heavy ball, [n, s]
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # of the rows
    position: int = 0  # in this order


@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(StochasticDescent[_GradientState]):
    """A batch of rows an iteration, n / batch_size iterations an epoch.

    Args:
        batch_size: rows of a batch; clamped at n.
        momentum: of the heavy ball.
        learning_rate: of the mean gradient over a batch; None takes half the stability limit
            min(2 (1 + momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).

    Further options are those of `IterativeSolver`. The true residual is computed before anything is taken for solved (an
    epoch, in the overhead). A solve that diverges starts again with half the step size, five times at the most. Memory:
    ten blocks [n, s]. Without a generator the rows are permuted from seed 0.
    """

    recursive: ClassVar[bool] = False
    state_class: ClassVar[type] = _GradientState

    def step(self, operator: LinearOperator, iterate: Iterate, state: _GradientState) -> _GradientState:
        # A last batch of few rows would go as far along them as a whole one along all of its.
        if state.position + min(self.batch_size, operator.shape[-1]) > len(state.order):
            state = replace(state, order=row_permutation(operator, state.generator), position=0)
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
    moving: ClassVar[tuple[str, ...]] = ("position", "residual", "velocity", "velocity_product")

    position: Tensor  # [n, s]
    residual: Tensor  # B - H position
    velocity: Tensor
    velocity_product: Tensor  # H velocity


@dataclass(frozen=True, kw_only=True)
class StochasticDualDescent(StochasticDescent[_DualState]):
    """A batch of random coordinates an iteration, n / batch_size iterations an epoch.

    Unlike that of `StochasticGradientDescent` the residual is the true one after every iteration.

    Args:
        batch_size: coordinates of a batch, drawn for every iteration without repetition; clamped at n.
        momentum: Nesterov's.
        learning_rate: of the mean gradient over a batch (n times the paper's step size); None takes half of
            min((2 + 2 momentum) / (1 + 2 momentum) n / lambda_max(H), 2 (1 - momentum) batch_size / max H_ii).
        averaging: weight of the newest iterate in the geometric average that is returned; 1 returns the last one. (The
            papers' 100 / T, for T iterations in all, needs their number in advance.)

    Further options are those of `IterativeSolver`. A solve that diverges starts again with half the step size, five
    times at the most. Memory: fourteen blocks [n, s], and batch_size rows of the matrix. Without a generator the
    coordinates are drawn from seed 0.
    """

    state_class: ClassVar[type] = _DualState

    averaging: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate("averaging", self.averaging)

    def step(self, operator: LinearOperator, iterate: Iterate, state: _DualState) -> _DualState:
        rows = row_permutation(operator, state.generator)[: self.batch_size]
        ahead = state.residual[rows] - self.momentum * state.velocity_product[rows]
        change = (state.learning_rate / len(rows)) * ahead
        state.velocity.mul_(self.momentum)
        state.velocity[rows] += change
        state.velocity_product.mul_(self.momentum).addmm_(dense_rows(operator, rows).mT, change)
        state.position.add_(state.velocity)
        state.residual.sub_(state.velocity_product)
        iterate.value.lerp_(state.position, self.averaging)
        iterate.residual.lerp_(state.residual, self.averaging)
        return self._within_bounds(operator, iterate, state, state.residual)

    def _at_rest(self, iterate: Iterate) -> dict[str, Tensor]:
        at_start = {"position": iterate.value.clone(), "residual": iterate.residual.clone()}
        return at_start | {name: torch.zeros_like(iterate.value) for name in ("velocity", "velocity_product")}

    def _largest_stable_product(self) -> float:
        return (2 + 2 * self.momentum) / (1 + 2 * self.momentum)

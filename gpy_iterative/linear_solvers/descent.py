"""What the solvers that descend by rows share: their options, how far a step may go, and when it went too far."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, check_positive
from gpy_iterative.linear_solvers.base import IterativeSolver
from gpy_iterative.linear_solvers.columns import Iterate, reads_every
from gpy_iterative.linear_solvers.curvature import lowest_curvature
from gpy_iterative.linear_solvers.linear_system import Given

#: The largest eigenvalue is known well enough when a power iteration raises it by less than this part.
EIGENVALUE_TOLERANCE = 0.05
MAX_POWER_ITERATIONS = 10
#: A residual that grows beyond this multiple of where it started sends the solve back there with a smaller step.
DIVERGENCE = 10.0
MAX_HALVINGS = 5


@dataclass(frozen=True)
class WayBack:
    """Where a round of iterations began, and how far residuals may grow before it goes back there.

    Attributes:
        value, residual: [n, s], copies.
        limit: [s], residual norms.
        steps: counted, since an accelerator is asked only every few of them.
    """

    value: Tensor
    residual: Tensor
    limit: Tensor
    steps: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def to(cls, iterate: Iterate) -> "WayBack":
        """To where the iterate stands now."""
        limit = DIVERGENCE * torch.linalg.vector_norm(iterate.residual, dim=0)
        limit.clamp_min_(torch.finfo(limit.dtype).tiny)  # a column that is solved exactly does not grow
        return cls(iterate.value.clone(), iterate.residual.clone(), limit)

    def growth(self, residual: Tensor) -> float:
        """The largest norm of the columns of [n, s] over its limit: 1 or less is well; 0 where nobody looked."""
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


@dataclass(frozen=True)
class Descent:
    """How a descent goes on: its step size, and the way back to where the round began when that is too large.

    Attributes:
        way_back: of this round.
        learning_rate: of the next step.
        halvings: how often it was halved in this round.
        generator: of the batches.
        setup: epochs that the learning rates took to choose.
        curvature: the lowest along which a round grew.
    """

    way_back: WayBack
    learning_rate: float
    halvings: int
    generator: torch.Generator
    setup: float
    curvature: float = math.inf

    def anew(self, iterate: Iterate) -> "Descent":
        """For a round that begins at the iterate."""
        return replace(self, way_back=WayBack.to(iterate), halvings=0)

    def went_too_far(self, residual: Tensor) -> bool:
        """Whether the step size has to be halved, by the residuals [n, s]."""
        growth = self.way_back.growth(residual)
        # What no step size keeps finite is for the loop to report.
        return not (growth <= 1 or (not math.isfinite(growth) and self.halvings == MAX_HALVINGS))

    def halved(self, operator: LinearOperator, iterate: Iterate) -> "Descent":
        """With half the step size. Takes the iterate back to where the round began.

        What has grown is what the step was too large for, or what no step size shrinks: a product tells which.
        """
        grown = iterate.value - self.way_back.value
        curvature = float(lowest_curvature(grown, (grown * operator._matmul(grown)).sum(0)))
        self.way_back.take(iterate)
        return replace(
            self.anew(iterate),
            learning_rate=self.learning_rate / 2,
            halvings=self.halvings + 1,
            setup=self.setup + 1,
            curvature=min(self.curvature, curvature),
        )

    def narrow(self, columns: Tensor) -> "Descent":
        """For some of the columns."""
        return replace(self, way_back=self.way_back.narrow(columns))


@dataclass(frozen=True)
class DescentState:
    """What the states of all descents have."""

    descent: Descent


State = TypeVar("State", bound=DescentState)


@dataclass(frozen=True, kw_only=True)
class StochasticDescent(IterativeSolver[State]):
    """Descent with momentum along a batch of random rows an iteration, n / batch_size iterations an epoch.

    Args:
        batch_size: rows of a batch; clamped at n.
        momentum: share of the last step in the next one.
        learning_rate: of the mean gradient over a batch; None takes half the largest stable one.

    Further options are those of `IterativeSolver`.
    """

    batch_size: int = 500
    momentum: float = 0.9
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("batch_size", self.batch_size)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}.")
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)

    @abstractmethod
    def _largest_stable_product(self) -> float:
        """Of the step size and a curvature, with this momentum and whole gradients."""

    @abstractmethod
    def _begin(self, operator: LinearOperator, iterate: Iterate, descent: Descent) -> State:
        """The state of the first round."""

    @abstractmethod
    def _anew(self, iterate: Iterate, state: State, descent: Descent) -> State:
        """The state at rest, of a round that goes on from the iterate."""

    def init(self, operator: LinearOperator, iterate: Iterate, given: Given) -> State:
        generator = torch.Generator().manual_seed(0) if given.generator is None else given.generator
        rate, setup = self.learning_rate, 0
        if rate is None:
            largest, setup = largest_eigenvalue(operator, generator)
            rate = 0.5 * self._stability_limit(operator, largest)
        return self._begin(operator, iterate, Descent(WayBack.to(iterate), rate, 0, generator, setup))

    def restart(self, iterate: Iterate, state: State) -> State:
        return self._anew(iterate, state, state.descent.anew(iterate))

    def work_per_step(self, operator: LinearOperator, state: State) -> float:
        return min(self.batch_size / operator.shape[-1], 1.0)

    def work_of_setup(self, state: State) -> float:
        return state.descent.setup

    def has_diverged(self, state: State) -> bool:
        return state.descent.halvings > MAX_HALVINGS

    def curvature(self, state: State) -> float:
        return state.descent.curvature

    def _within_bounds(self, operator: LinearOperator, iterate: Iterate, state: State, residual: Tensor) -> State:
        """The state after a step: back where the round began, with half the step size, where residuals [n, s] grew."""
        if not state.descent.went_too_far(residual):
            return state
        return self._anew(iterate, state, state.descent.halved(operator, iterate))

    def _stability_limit(self, operator: LinearOperator, largest: float) -> float:
        size = operator.shape[-1]
        diagonal = float(operator.diagonal(dim1=-1, dim2=-2).max())
        return min(
            self._largest_stable_product() * size / largest,
            2 * (1 - self.momentum) * min(self.batch_size, size) / diagonal,
        )


def row_permutation(operator: LinearOperator, generator: torch.Generator) -> Tensor:
    """All rows in random order, on the operator's device."""
    order = torch.randperm(operator.shape[-1], generator=generator, device=generator.device)
    return order.to(operator.device)


def largest_eigenvalue(operator: LinearOperator, generator: torch.Generator) -> tuple[float, int]:
    """A lower estimate by power iterations, and how many products it took."""
    vector = torch.randn(operator.shape[-1], 1, generator=generator, device=generator.device, dtype=operator.dtype).to(
        operator.device
    )
    largest = 0.0
    for iteration in range(1, MAX_POWER_ITERATIONS + 1):
        vector = operator._matmul(vector / torch.linalg.vector_norm(vector))
        previous, largest = largest, float(torch.linalg.vector_norm(vector))
        if largest <= (1 + EIGENVALUE_TOLERANCE) * previous:
            return largest, iteration
    return largest, MAX_POWER_ITERATIONS

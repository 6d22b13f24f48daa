"""What all solvers answer, and the loop that the iterative ones share.

A solver says how an iteration starts (`init`, `restart`), what one step does (`step`) and what it costs
(`work_per_step`). Budget, rounds and batches are here; what belongs to the columns is in `columns`.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_fraction
from gpy_iterative.linear_operators.extensions import low_precision_copy
from gpy_iterative.linear_solvers.columns import Columns, Iterate
from gpy_iterative.linear_solvers.curvature import is_negative
from gpy_iterative.linear_solvers.linear_system import Given, LinearSystem, check_system
from gpy_iterative.linear_solvers.refined_columns import RefinedColumns
from gpy_iterative.linear_solvers.solution import ColumnGroup, Solution, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal
from gpy_iterative.worker_threads import divided

State = TypeVar("State")
logger = logging.getLogger(__name__)

#: A round that lowers the worst column by less than this does not lower it at all.
LEAST_PROGRESS = 0.01
#: Where the matrix is not positive definite, residuals that grow by more than this do not come back.
DIVERGENCE = 1e3


class Solver(ABC):
    """What answers H V = B for a symmetric positive definite operator H; how is said in `_solve_columns`."""

    #: Relative residual norm of columns that come without groups; zero for solvers that have no tolerance.
    tolerance: float = 0.0
    #: The same for probes; None leaves the choice to the marginal log likelihood.
    probe_tolerance: float | None = None

    def solve(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        *,
        groups: Sequence[ColumnGroup] | None = None,
        preconditioner: LowRankPlusDiagonal | None = None,
        initial_guess: Tensor | None = None,
        guess_image: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[SolveProgress], None] | None = None,
    ) -> Solution:
        """Solves H V = B.

        Args:
            operator: H [*b, n, n], symmetric positive definite. Members of a batch are solved one by one.
            rhs: B [*b, n] or [*b, n, s].
            groups: neighbouring columns with a tolerance of their own, in order; None is one group "targets".
            preconditioner: built for this operator, for solvers that take one; None lets the solver build what its
                options say.
            initial_guess: V to start from, shaped as rhs. Each column is scaled first, at no cost, to be nearest to
                the solution in the norm of H. A bad guess makes the solve slow, never wrong.
            guess_image: H times it, where that is at hand: saves the product that its residual takes.
            generator: for solvers that draw.
            callback: told of the progress; on an accelerator every few iterations.

        Returns:
            A Solution. What was not reached within the budget is a status there, not an exception.

        Raises:
            NonFiniteError: a NaN or an infinity appeared; nothing of the caller's was changed.
            ValueError: shapes, dtypes or devices that do not fit.
        """
        vector = rhs.dim() == operator.dim() - 1
        if vector:
            rhs = rhs.unsqueeze(-1)
            initial_guess = None if initial_guess is None else initial_guess.unsqueeze(-1)
            guess_image = None if guess_image is None else guess_image.unsqueeze(-1)
        if groups is None:
            groups = (ColumnGroup("targets", rhs.shape[-1], self.tolerance),)
        check_system(operator, rhs, groups)
        # Tiles of inference tensors cannot be kept.
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.no_grad():
            kept = operator.clone() if is_inference else operator
            system = LinearSystem(kept, rhs, groups, preconditioner, initial_guess, generator, callback, guess_image)
            solution = self._solve_columns(system)
        if vector:
            solution = replace(solution, value=solution.value.squeeze(-1), residual=solution.residual.squeeze(-1))
        return solution

    @abstractmethod
    def _solve_columns(self, system: LinearSystem) -> Solution:
        """Solves for columns [*b, n, s], without autograd; the guess, which not every solver takes, is not checked yet."""


@dataclass(frozen=True, kw_only=True)
class IterativeSolver(Solver, Generic[State]):
    """Options of an iterative solver for symmetric positive definite systems.

    Args:
        tolerance: relative residual norm for the targets (and for all columns that come without groups).
        probe_tolerance: the same for probes; None leaves the choice to the marginal log likelihood.
        max_epochs: budget, in passes over the matrix.
        stopping: "columns" stops each column when it has reached its group's tolerance; "mean" runs all columns
            until every group's mean norm has, the rule of the papers' tables.

    Raises:
        ValueError: an option outside its range.
    """

    #: Whether the iteration's residual is `rhs - H value` up to rounding, and not an estimate.
    recursive: ClassVar[bool] = True

    tolerance: float = 0.01
    probe_tolerance: float | None = None
    max_epochs: float = 1000
    stopping: Literal["columns", "mean"] = "columns"

    def __post_init__(self) -> None:
        for name in ("tolerance", "probe_tolerance"):
            value = getattr(self, name)
            if value is not None:
                check_fraction(name, value)
        if not self.max_epochs > 0:
            raise ValueError(f"max_epochs must be positive, got {self.max_epochs}.")
        if self.stopping not in ("columns", "mean"):
            raise ValueError(f"stopping must be 'columns' or 'mean', got {self.stopping!r}.")

    @abstractmethod
    def init(self, operator: LinearOperator, iterate: Iterate, given: Given) -> State:
        """What the steps need besides the iterate. Called once, and not at all when there is nothing to do."""

    @abstractmethod
    def restart(self, iterate: Iterate, state: State) -> State:
        """The state for a new round, from an iterate whose values, residuals or columns have changed."""

    @abstractmethod
    def step(self, operator: LinearOperator, iterate: Iterate, state: State) -> State:
        """One iteration: replaces or overwrites `iterate.value` and `iterate.residual`."""

    @abstractmethod
    def narrow(self, state: State, columns: Tensor) -> State:
        """The state of the columns that go on."""

    @abstractmethod
    def work_per_step(self, operator: LinearOperator, state: State) -> float:
        """Epochs of the next step."""

    def after_step(self, operator: LinearOperator, iterate: Iterate, state: State) -> State:
        """Called when a step was observed and its finished columns have left, for solvers that watch their pace."""
        return state

    def work_of_setup(self, state: State) -> float:
        """Epochs that went into the state itself: told apart from the iterations', as `overhead`."""
        return 0.0

    def has_diverged(self, state: State) -> bool:
        """Whether no step can help any more."""
        return False

    def curvature(self, state: State) -> float:
        """A bound above the smallest eigenvalue of H, from the directions or blocks that the steps have met.

        Infinite where they look at none.
        """
        return math.inf

    @divided()
    def _solve_columns(self, system: LinearSystem) -> Solution:
        system.check_guess()
        if not system.operator.batch_shape:
            return self._solve_one(system)
        solutions = [self._solve_one(member) for member in system.members()]
        return Solution(
            torch.stack([solution.value for solution in solutions]).reshape(system.rhs.shape),
            torch.stack([solution.residual for solution in solutions]).reshape(system.rhs.shape),
            max((solution.status for solution in solutions), key=list(SolveStatus).index),
            SolveStats.of_batch([solution.stats for solution in solutions]),
        )

    def _solve_one(self, system: LinearSystem) -> Solution:
        start = time.perf_counter()
        operator, preconditioner, callback = system.operator, system.preconditioner, system.callback
        copy = low_precision_copy(operator)
        if copy is None:
            columns = Columns(
                operator,
                system.rhs,
                system.groups,
                stopping=self.stopping,
                recursive=self.recursive,
                initial_guess=system.initial_guess,
                guess_image=system.guess_image,
            )
        else:
            columns = RefinedColumns(system, copy, stopping=self.stopping, recursive=self.recursive)
            operator = copy  # from here on, what the iterations compute with
            preconditioner = None if preconditioner is None else preconditioner.to(operator.dtype)
        eps = torch.finfo(operator.dtype).eps
        # A budget of whole steps is not missed by the rounding of their fractions of an epoch.
        budget = self.max_epochs * (1 + 1e-9)
        state, iterations, epochs, exhausted, diverged, shortfall = None, 0, 0.0, False, False, math.inf
        for _ in range(columns.max_rounds):
            iterate = columns.begin()
            if iterate is None or exhausted or diverged:
                break
            if self.recursive and columns.shortfall() > (1 - LEAST_PROGRESS) * shortfall:
                break
            shortfall = columns.shortfall()
            if state is None:
                state = self.init(operator, iterate, Given(preconditioner, system.generator))
            else:
                state = self.restart(iterate, state)
            while True:
                work = self.work_per_step(operator, state)
                exhausted = epochs + work > budget
                if exhausted:
                    break
                state = self.step(operator, iterate, state)
                iterations, epochs = iterations + 1, epochs + work
                if iterations % columns.reads_every:
                    continue
                kept = columns.observe(iterate, iterations, epochs)
                if callback is not None:
                    callback(SolveProgress(iterations, epochs, columns.group_norms(running=True)))
                if kept is not None:
                    iterate.keep(kept)
                    if len(kept) == 0:
                        break
                    state = self.narrow(state, kept)
                state = self.after_step(operator, iterate, state)
                grown = iterate.shortfall > DIVERGENCE * shortfall and is_negative(self.curvature(state), operator, eps)
                diverged = grown or self.has_diverged(state)
                if diverged:
                    break
            columns.end(iterate, iterations)
        if state is not None and is_negative(self.curvature(state), operator, eps):
            status = SolveStatus.INDEFINITE
        elif columns.is_done():
            status = SolveStatus.CONVERGED
        elif diverged:
            status = SolveStatus.DIVERGED
        else:
            status = SolveStatus.BUDGET_EXHAUSTED if exhausted else SolveStatus.STAGNATED
        value, residual = columns.unscaled()
        overhead = columns.overhead + (0.0 if state is None else self.work_of_setup(state))
        seconds = time.perf_counter() - start
        stats = SolveStats(iterations, epochs, overhead, columns.group_norms(), seconds)
        logger.debug("%s: %s, %s", type(self).__name__, status.name.lower(), stats)
        return Solution(value, residual, status, stats)

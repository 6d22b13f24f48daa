"""Solvers, and the loop of iterative ones."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_choice, check_fraction, check_number
from gpy_iterative.linear_operators.noisy import kernel_and_noise
from gpy_iterative.linear_solvers.columns import DIVERGENCE, Columns, Iterate, LinearSystem
from gpy_iterative.linear_solvers.solution import ColumnGroup, Solution, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.preconditioners.preconditioner import Preconditioner
from gpy_iterative.worker_threads import divided

logger = logging.getLogger(__name__)

#: Least relative fall of the worst residual in a round.
LEAST_PROGRESS = 0.01
#: Largest residual in the norm of P^-1, in tolerances.
MAX_IN_NORM = 3.0
#: Further solves to reach it, and least budget of each in epochs.
MAX_CONTINUATIONS, CONTINUED_EPOCHS = 4, 100
#: Rounding errors of a product with v: so many machine epsilons times n^1/2 max K_ii |v|; float32 leaves up to 4.
ROUNDING = 8


class Solver(ABC):
    """Solver of linear systems with a symmetric positive definite matrix."""

    tolerance: float = 0.0
    probe_tolerance: float | None = None

    def solve(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        *,
        groups: Sequence[ColumnGroup] | None = None,
        preconditioner: Preconditioner | None = None,
        norm: Preconditioner | None = None,
        initial_guess: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[SolveProgress], None] | None = None,
    ) -> Solution:
        """Solves H V = B; a missed tolerance is a status.

        Args:
            operator: H [*b, n, n]; members of a batch are solved one by one.
            rhs: B [*b, n] or [*b, n, s].
            groups: of all columns, in order; None: one group "targets".
            preconditioner: of this operator; None: that of the solver's options.
            norm: P near H: residuals are then also below three tolerances in the norm of P^-1.
            initial_guess: shaped as rhs; its columns are scaled to least error.
            generator: for random solvers; None: seed 0.
            callback: receives progress, on an accelerator every few iterations.

        Raises:
            NonFiniteError: non-finite values.
            ValueError: shapes, dtypes or devices do not fit.
        """
        is_vector = rhs.dim() == operator.dim() - 1
        if is_vector:
            rhs = rhs.unsqueeze(-1)
            initial_guess = None if initial_guess is None else initial_guess.unsqueeze(-1)
        if groups is None:
            groups = (ColumnGroup("targets", rhs.shape[-1], self.tolerance),)
        # Tiles of inference tensors cannot be kept.
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.no_grad():
            kept = operator.clone() if is_inference else operator
            system = LinearSystem(kept, rhs, groups, preconditioner, initial_guess, generator, callback)
            solution = self._solve_columns(system)
            if norm is not None:
                solution = _small_in_norm(self, system, solution, norm)
        if is_vector:
            solution = replace(solution, value=solution.value.squeeze(-1), residual=solution.residual.squeeze(-1))
        return solution

    @abstractmethod
    def _solve_columns(self, system: LinearSystem) -> Solution:
        """Called without autograd."""

    def _after(self, spent: SolveStats) -> "Solver | None":
        """The solver with its remaining budget; None if that is spent."""
        return self


def _small_in_norm(solver: Solver, system: LinearSystem, solution: Solution, norm: Preconditioner) -> Solution:
    """Continues a converged solve."""
    rhs, wanted = system.rhs, system.groups
    sizes = [group.size for group in wanted]
    squares = lambda vectors: [part.sum(-1) for part in (vectors * norm.solve(vectors)).sum(-2).split(sizes, dim=-1)]
    of_rhs = squares(rhs)
    for _ in range(MAX_CONTINUATIONS):
        if solution.status is not SolveStatus.CONVERGED:
            break
        parts = zip(squares(solution.residual), of_rhs, wanted, strict=True)
        excesses = [
            float((found / known).nan_to_num(0.0).max().clamp_min(0)) ** 0.5 / (group.tolerance or math.inf)
            for found, known, group in parts
        ]
        if max(excesses) <= MAX_IN_NORM:
            break
        spent = solution.stats
        limited = solver._after(spent)
        if limited is None:
            return replace(solution, status=SolveStatus.BUDGET_EXHAUSTED)
        groups = [
            replace(group, tolerance=group.tolerance / max(excess, 2.0)) if excess > MAX_IN_NORM else group
            for group, excess in zip(system.groups, excesses, strict=True)
        ]
        system = replace(
            system,
            groups=groups,
            preconditioner=system.preconditioner if solution.preconditioner is None else solution.preconditioner,
            initial_guess=solution.value,
            guess_product=rhs - solution.residual,
        )
        solution = limited._solve_columns(system)
        solution = replace(solution, stats=spent.followed_by(solution.stats))
    return solution


@dataclass(frozen=True)
class SolveInputs:
    """Arguments of `solve`."""

    preconditioner: Preconditioner | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True, kw_only=True)
class SolverState:
    """State of an iteration besides its iterate.

    Attributes:
        share: epochs of a step.
        curvature: upper bound on the smallest eigenvalue of H, which steps lower; a fallback begins with the last one.
        has_diverged: no further step can help.
        by_column: names of fields with one part per open column: tensors [n, s], or objects with `narrow`.
    """

    by_column: ClassVar[tuple[str, ...]] = ()

    setup: float = 0.0  # epochs
    share: float = 1.0
    curvature: float | Tensor = math.inf
    has_diverged: bool = False
    preconditioner: Preconditioner | None = None


State = TypeVar("State", bound=SolverState)


@dataclass
class _Work:
    solver: "IterativeSolver[Any]"
    state: Any = None
    iterations: int = 0
    epochs: float = 0.0


@dataclass(frozen=True, kw_only=True)
class IterativeSolver(Solver, Generic[State]):
    """Base of the iterative solvers.

    Args:
        tolerance: relative residual norm of targets, and of columns without groups.
        probe_tolerance: of probes; None: the marginal log likelihood takes a value below the probes' noise (.03 for 16
            probes, at most .05; .004 beside a control variate), but not below `tolerance`.
        max_epochs: budget, in passes over the matrix.
        stopping: "columns" stops each column at its tolerance; "mean" stops all when the mean of every group reaches it.

    Raises:
        ValueError: an option outside its range.
    """

    #: Whether the iteration's residual is `rhs - H value` up to rounding.
    recursive: ClassVar[bool] = True

    tolerance: float = 0.01
    probe_tolerance: float | None = None
    max_epochs: float = 1000
    stopping: Literal["columns", "mean"] = "columns"

    def __post_init__(self) -> None:
        check_fraction("tolerance", self.tolerance)
        if self.probe_tolerance is not None:
            check_fraction("probe_tolerance", self.probe_tolerance)
        check_number("max_epochs", self.max_epochs, "be positive", lambda number: number > 0)
        check_choice("stopping", self.stopping, ("columns", "mean"))

    def _after(self, spent: SolveStats) -> "IterativeSolver[State] | None":
        left = self.max_epochs - spent.epochs
        return replace(self, max_epochs=min(left, max(CONTINUED_EPOCHS, 2 * spent.epochs))) if left > 0 else None

    @abstractmethod
    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> State:
        """First state."""

    @abstractmethod
    def restart(self, iterate: Iterate, state: State) -> State:
        """State of a new round."""

    @abstractmethod
    def step(self, operator: LinearOperator, iterate: Iterate, state: State) -> State:
        """One iteration; replaces or overwrites the iterate's value and residual."""

    def narrow(self, state: State, columns: Tensor) -> State:
        """State of the remaining columns."""
        parts = {name: getattr(state, name) for name in state.by_column}
        pick = lambda part: part[:, columns] if torch.is_tensor(part) else part.narrow(columns)
        return replace(state, **{name: pick(part) for name, part in parts.items()})

    def after_step(self, iterate: Iterate, state: State) -> tuple[State, "IterativeSolver[Any] | None"]:
        """The state after an observed step, and a solver that takes over."""
        return state, None

    @divided()
    def _solve_columns(self, system: LinearSystem) -> Solution:
        if system.rhs.dim() > 2:
            solutions = [self._solve_columns(member) for member in system.members()]
            return Solution(
                torch.stack([solution.value for solution in solutions]).reshape(system.rhs.shape),
                torch.stack([solution.residual for solution in solutions]).reshape(system.rhs.shape),
                max((solution.status for solution in solutions), key=list(SolveStatus).index),
                SolveStats.of_batch([solution.stats for solution in solutions]),
            )
        start = time.perf_counter()
        columns = Columns(system, stopping=self.stopping, recursive=self.recursive)
        preconditioner = None if system.preconditioner is None else system.preconditioner.to(columns.operator.dtype)
        inputs = SolveInputs(preconditioner, system.generator)
        work, status, shortfall = _Work(self), None, math.inf
        for _ in range(columns.max_rounds):
            iterate = columns.begin()
            if iterate is None:
                break
            before, shortfall = shortfall, float(columns.shortfalls.max())
            if self.recursive and shortfall > (1 - LEAST_PROGRESS) * before:
                break
            if work.state is None:
                work.state = self.init(columns.operator, iterate, inputs)
            else:
                work.state = work.solver.restart(iterate, work.state)
            status = self._iterate(columns, iterate, work, inputs, system.callback)
            columns.end(iterate, work.iterations)
            if status is not None:
                break
        if work.state is not None and is_negative(work.state.curvature, columns.operator, columns.eps):
            status = SolveStatus.INDEFINITE
        elif (columns.shortfalls <= 1).all():
            status = SolveStatus.CONVERGED
        elif status is None:
            status = SolveStatus.STAGNATED
        overhead = columns.overhead + (0.0 if work.state is None else work.state.setup)
        seconds = time.perf_counter() - start
        limit = None if status is SolveStatus.CONVERGED else columns.far_field_limit()
        stats = SolveStats(work.iterations, work.epochs, overhead, columns.group_norms(), seconds, limit)
        logger.debug("%s: %s, %s", type(self).__name__, status.name.lower(), stats)
        used = preconditioner if work.state is None else work.state.preconditioner
        return Solution(
            columns.value * columns.scale, columns.residual * columns.scale, status, stats, preconditioner=used
        )

    def _iterate(
        self,
        columns: Columns,
        iterate: Iterate,
        work: _Work,
        inputs: SolveInputs,
        callback: Callable[[SolveProgress], None] | None,
    ) -> SolveStatus | None:
        """One round; a status if another cannot help."""
        operator, begun_at = columns.operator, float(columns.shortfalls.max())
        while True:
            epochs = work.epochs + work.state.share
            if epochs > self.max_epochs * (1 + 1e-9):  # a sum of fractions rounds
                return SolveStatus.BUDGET_EXHAUSTED
            work.state = work.solver.step(operator, iterate, work.state)
            work.iterations, work.epochs = work.iterations + 1, epochs
            if work.iterations % columns.reads_every:
                continue
            remaining = columns.observe(iterate, work.iterations)
            if callback is not None:
                callback(SolveProgress(work.iterations, work.epochs, columns.group_norms(running=True)))
            if remaining is not None:
                if len(remaining) == 0:
                    return None
                work.state = work.solver.narrow(work.state, remaining)
            if columns.is_refined and columns.has_lost_the_matrix(iterate, work.iterations, work.epochs):
                return None
            if iterate.shortfall * columns.eps > begun_at:  # rounding errors exceed the start's residual
                return None
            work.state, successor = work.solver.after_step(iterate, work.state)
            has_grown = iterate.shortfall > DIVERGENCE * begun_at
            if work.state.has_diverged or (has_grown and is_negative(work.state.curvature, operator, columns.eps)):
                return SolveStatus.DIVERGED
            if successor is not None:
                begun, ended = successor.init(operator, iterate, inputs), work.state
                setup = ended.setup + begun.setup
                work.solver, work.state = successor, replace(begun, setup=setup, curvature=ended.curvature)


def is_negative(curvature: float | Tensor, operator: LinearOperator, eps: float) -> bool:
    """Whether a curvature is negative beyond rounding errors eps of K's entries."""
    return bool(curvature < 0) and float(curvature) < -float(product_rounding(operator, eps).max())


def product_rounding(operator: LinearOperator, eps: float) -> Tensor:
    """Rounding error [*b] of a product of H with a vector of norm 1, for errors eps of K's entries."""
    _, diagonal, _ = kernel_and_noise(operator)
    return ROUNDING * eps * operator.shape[-1] ** 0.5 * diagonal.abs().amax(-1)


def lowest_curvature(directions: Tensor, energies: Tensor) -> Tensor:
    """Smallest energy / v^T v of columns v [n, s]; infinite if all are zero."""
    squares = directions.square().sum(-2)
    quotients = energies / squares.clamp_min(torch.finfo(squares.dtype).tiny)
    return torch.where((squares > 0) & (quotients == quotients), quotients, torch.inf).amin()

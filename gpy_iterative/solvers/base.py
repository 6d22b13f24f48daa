"""The loop that all iterative solvers share.

A solver says how an iteration starts (`init`), what one step does (`step`) and what it costs (`work_per_step`).
Scaling, tolerances, budget, columns that are done, best iterates, warm starts and true residuals are here, once.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.preconditioners import LowRankPlusDiagonal
from gpy_iterative.solvers.solution import ColumnGroup, Solution, SolveProgress, SolveStats, SolveStatus

State = TypeVar("State")

#: How often a solve goes on after its true residual missed a tolerance that the running one had reached.
MAX_CONTINUATIONS = 3


@dataclass
class Iterate:
    """Where an iteration stands: solutions and running residuals of the columns that are not done, [n, s].

    Both belong to the iteration, which may overwrite them.
    """

    value: Tensor
    residual: Tensor

    def keep(self, columns: Tensor) -> None:
        """Narrows the block to some of its columns."""
        self.value, self.residual = self.value[:, columns], self.residual[:, columns]


class Solver(ABC):
    """What answers H V = B for a symmetric positive definite operator H."""

    @abstractmethod
    def solve(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        *,
        groups: Sequence[ColumnGroup] | None = None,
        preconditioner: LowRankPlusDiagonal | None = None,
        initial_guess: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[SolveProgress], None] | None = None,
    ) -> Solution:
        """Solves H V = B.

        Args:
            operator: H [*b, n, n], symmetric positive definite. Members of a batch are solved one by one.
            rhs: B [*b, n] or [*b, n, s].
            groups: neighbouring columns with a tolerance of their own, in order; None is one group "targets".
            preconditioner: built for this operator; None lets the solver build what its options say.
            initial_guess: V to start from, shaped as rhs. A bad one makes the solve slow, never wrong.
            generator: for solvers that draw.
            callback: told of the progress.

        Returns:
            A Solution. What was not reached within the budget is a status there, not an exception.

        Raises:
            NonFiniteError: a NaN or an infinity appeared; nothing of the caller's was changed.
            ValueError: shapes that do not fit.
        """


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

    tolerance: float = 0.01
    probe_tolerance: float | None = None
    max_epochs: float = 1000
    stopping: Literal["columns", "mean"] = "columns"

    def __post_init__(self) -> None:
        for name in ("tolerance", "probe_tolerance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value}.")
        if not self.max_epochs > 0:
            raise ValueError(f"max_epochs must be positive, got {self.max_epochs}.")
        if self.stopping not in ("columns", "mean"):
            raise ValueError(f"stopping must be 'columns' or 'mean', got {self.stopping!r}.")

    @abstractmethod
    def init(
        self,
        operator: LinearOperator,
        iterate: Iterate,
        preconditioner: LowRankPlusDiagonal | None,
        generator: torch.Generator | None,
    ) -> State:
        """What the steps need besides the iterate; called once, and again after a continuation."""

    @abstractmethod
    def step(self, operator: LinearOperator, iterate: Iterate, state: State) -> State:
        """One iteration: replaces `iterate.value` and `iterate.residual`."""

    @abstractmethod
    def narrow(self, state: State, columns: Tensor) -> State:
        """The state of the columns that go on."""

    @abstractmethod
    def work_per_step(self, operator: LinearOperator) -> float:
        """Epochs of one step."""

    def work_of_init(self, operator: LinearOperator) -> float:
        """Epochs of `init`; they are told apart from the iterations', as `overhead`."""
        return 0.0

    def has_failed(self, state: State) -> bool:
        """Whether no step can help any more."""
        return False

    def solve(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        *,
        groups: Sequence[ColumnGroup] | None = None,
        preconditioner: LowRankPlusDiagonal | None = None,
        initial_guess: Tensor | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[SolveProgress], None] | None = None,
    ) -> Solution:
        vector = rhs.dim() == operator.dim() - 1
        if vector:
            rhs = rhs.unsqueeze(-1)
            initial_guess = None if initial_guess is None else initial_guess.unsqueeze(-1)
        if rhs.shape[-2] != operator.shape[-1]:
            raise ValueError(
                f"The right-hand side {tuple(rhs.shape)} does not fit the operator {tuple(operator.shape)}."
            )
        if groups is None:
            groups = (ColumnGroup("targets", rhs.shape[-1], self.tolerance),)
        if sum(group.size for group in groups) != rhs.shape[-1]:
            raise ValueError(f"The groups' sizes do not add up to {rhs.shape[-1]} columns: {groups}.")
        with torch.no_grad():
            if operator.batch_shape:
                if preconditioner is not None:
                    raise ValueError("A batch of systems builds its preconditioners itself.")
                solution = self._solve_members(operator, rhs, groups, initial_guess, generator, callback)
            else:
                solution = self._solve_one(operator, rhs, groups, preconditioner, initial_guess, generator, callback)
        if vector:
            solution = Solution(
                solution.value.squeeze(-1), solution.residual.squeeze(-1), solution.status, solution.stats
            )
        return solution

    def _solve_members(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        groups: Sequence[ColumnGroup],
        initial_guess: Tensor | None,
        generator: torch.Generator | None,
        callback: Callable[[SolveProgress], None] | None,
    ) -> Solution:
        batch = operator.batch_shape
        rhs = rhs.expand(*batch, *rhs.shape[-2:])
        solutions = [
            self._solve_one(
                operator[index],
                rhs[index],
                groups,
                None,
                None if initial_guess is None else initial_guess[index],
                generator,
                callback,
            )
            for index in itertools.product(*map(range, batch))
        ]
        names = [group.name for group in groups]
        stats = [solution.stats for solution in solutions]
        return Solution(
            torch.stack([solution.value for solution in solutions]).reshape(rhs.shape),
            torch.stack([solution.residual for solution in solutions]).reshape(rhs.shape),
            max((solution.status for solution in solutions), key=list(SolveStatus).index),
            SolveStats(
                iterations=sum(s.iterations for s in stats),
                # An epoch of the batch is one pass over all its matrices.
                epochs=sum(s.epochs for s in stats) / len(stats),
                overhead=sum(s.overhead for s in stats) / len(stats),
                residual_norms={name: max(s.residual_norms[name] for s in stats) for name in names},
                seconds=sum(s.seconds for s in stats),
            ),
        )

    def _solve_one(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        groups: Sequence[ColumnGroup],
        preconditioner: LowRankPlusDiagonal | None,
        initial_guess: Tensor | None,
        generator: torch.Generator | None,
        callback: Callable[[SolveProgress], None] | None,
    ) -> Solution:
        start = time.perf_counter()
        run = _Run(operator, rhs, groups, self.stopping, initial_guess)
        work, iterations, epochs, failed = self.work_per_step(operator), 0, 0.0, False
        for _ in range(1 + MAX_CONTINUATIONS):
            active = run.activate()
            if active is None or epochs + work > self.max_epochs:
                break
            state = self.init(operator, active, preconditioner, generator)
            run.overhead += self.work_of_init(operator)
            while epochs + work <= self.max_epochs and not failed:
                state = self.step(operator, active, state)
                iterations, epochs = iterations + 1, epochs + work
                kept = run.observe(active, iterations)
                if callback is not None:
                    callback(SolveProgress(iterations, epochs, run.group_norms()))
                if kept is not None:
                    if kept.numel() == 0:
                        break
                    active.keep(kept)
                    state = self.narrow(state, kept)
                failed = self.has_failed(state)
            run.refresh_residual()
            if failed:
                break
        status = SolveStatus.CONVERGED
        if failed:
            status = SolveStatus.DIVERGED
        elif not run.is_done():
            status = SolveStatus.BUDGET_EXHAUSTED if epochs + work > self.max_epochs else SolveStatus.STAGNATED
        value, residual = run.unscaled()
        return Solution(
            value,
            residual,
            status,
            SolveStats(iterations, epochs, run.overhead, run.group_norms(), time.perf_counter() - start),
        )


class _Run:
    """All columns of one solve, scaled to right-hand sides of norm one; which are done, and the best iterate of each."""

    def __init__(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        groups: Sequence[ColumnGroup],
        stopping: str,
        initial_guess: Tensor | None,
    ) -> None:
        self.operator, self.groups, self.stopping = operator, groups, stopping
        norms = torch.linalg.vector_norm(rhs, dim=-2)
        # A zero column has the solution zero; its scale only has to be harmless.
        self.scale = torch.where(norms > 0, norms, torch.ones_like(norms))
        self.rhs = rhs / self.scale
        self.tolerances = torch.cat([norms.new_full((group.size,), group.tolerance) for group in groups])
        self.overhead = 0.0
        if initial_guess is None:
            self.value, self.residual = torch.zeros_like(self.rhs), self.rhs.clone()
        else:
            self.value = initial_guess / self.scale
            self.value[:, norms == 0] = 0
            self._scale_guess()
        self.norms = self._norms_of(self.residual, 0)
        self.columns = torch.arange(rhs.shape[-1], device=rhs.device)

    def _scale_guess(self) -> None:
        """Residual of the guess, after the scaling of each column that brings it nearest in the norm of H.

        The product is needed anyway; a guess so scaled is never farther from the solution than zero.
        """
        product = self.operator._matmul(self.value)
        self.overhead += 1
        energy = (self.value * product).sum(-2)
        factor = (self.value * self.rhs).sum(-2) / torch.where(energy > 0, energy, torch.ones_like(energy))
        factor = torch.where(energy > 0, factor, torch.zeros_like(factor))
        self.value, self.residual = self.value * factor, self.rhs - product * factor

    def _norms_of(self, residual: Tensor, iteration: int) -> Tensor:
        norms = torch.linalg.vector_norm(residual, dim=-2)
        finite = torch.isfinite(norms)
        if not finite.all():
            column = int((~finite).nonzero()[0])
            raise NonFiniteError(
                f"The residual of column {column} of a linear solve is {norms[column].item()} after {iteration} "
                "iterations. Check the data and hyperparameters for extreme values; a noise constraint and float64 "
                "keep the arithmetic within range."
            )
        return norms

    def _open(self) -> Tensor:
        """Which columns have to go on, [s] bool."""
        if self.stopping == "columns":
            return self.norms > self.tolerances
        is_open = any(part.mean() > group.tolerance for part, group in zip(self._by_group(), self.groups, strict=True))
        return torch.full_like(self.norms, is_open, dtype=torch.bool)

    def _by_group(self) -> tuple[Tensor, ...]:
        return self.norms.split([group.size for group in self.groups])

    def is_done(self) -> bool:
        return not bool(self._open().any())

    def activate(self) -> Iterate | None:
        """The block of all columns that are not done."""
        self.columns = self._open().nonzero().squeeze(-1)
        if self.columns.numel() == 0:
            return None
        return Iterate(self.value[:, self.columns], self.residual[:, self.columns])

    def observe(self, active: Iterate, iteration: int) -> Tensor | None:
        """Stores what has improved; the columns of the block that go on, or None when all do."""
        norms = self._norms_of(active.residual, iteration)
        if self.stopping == "mean":
            # Joint iterations keep all columns in step: the block as it stands, not its best columns.
            self.value, self.residual, self.norms = active.value, active.residual, norms
            return torch.empty(0, dtype=torch.long, device=norms.device) if self.is_done() else None
        better = norms < self.norms[self.columns]
        done = norms <= self.tolerances[self.columns]
        if bool(done.any()):
            self._store(active, norms, better | done)
            keep = (~done).nonzero().squeeze(-1)
            self.columns = self.columns[keep]
            return keep
        self._store(active, norms, better)
        return None

    def _store(self, active: Iterate, norms: Tensor, which: Tensor) -> None:
        index = which.nonzero().squeeze(-1)
        target = self.columns[index]
        self.value[:, target] = active.value[:, index]
        self.residual[:, target] = active.residual[:, index]
        self.norms[target] = norms[index]

    def refresh_residual(self) -> None:
        """Replaces running residuals by true ones."""
        self.residual = self.rhs - self.operator._matmul(self.value)
        self.norms = self._norms_of(self.residual, -1)
        self.overhead += 1

    def group_norms(self) -> dict[str, float]:
        reduce = torch.Tensor.mean if self.stopping == "mean" else torch.Tensor.amax
        return {
            group.name: float(reduce(part)) if group.size else 0.0
            for group, part in zip(self.groups, self._by_group(), strict=True)
        }

    def unscaled(self) -> tuple[Tensor, Tensor]:
        return self.value * self.scale, self.residual * self.scale

"""A linear system, and its columns during a solve.

A round ends with true residuals; if these miss a tolerance, another follows. Rounds with a low-precision copy H' solve
H' d = r for corrections d: iterative refinement (Carson & Higham 2018).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_autocast, check_same_kind
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import far_field_error, low_precision_copy, rows_matmul
from gpy_iterative.linear_solvers.solution import ColumnGroup, FarFieldLimit, SolveProgress
from gpy_iterative.preconditioners.preconditioner import Preconditioner
from gpy_iterative.worker_threads import CPU, ByDevice

#: Watched rows, on which running residuals are compared with true ones.
VERIFIED_ROWS = 256
#: Allowed difference, in tolerances.
ALLOWED_DRIFT = 0.1
#: Ratio of residual norms below which an iterate replaces the kept one.
WORTH_A_COPY = 0.9
#: Iterations between readings, for which the host waits.
READS_EVERY = ByDevice(cpu=1, accelerator=4)
#: Factor of the tolerance after a true residual missed it.
LOWER_AIM = 0.8
#: Part of the tolerance that exact rows add when a far field limits a solve.
LIMITING_PART = 0.5
#: Far-field errors below this many rounding errors are no limit.
ROUNDING = 4
MAX_ROUNDS, MAX_REFINEMENTS = 10, 50
#: Least iterations, and work in comparisons, between comparisons of a low-precision copy with H.
WATCHED_EVERY = 20
#: Growth of residuals that ends a round, if the system or its low-precision copy may be indefinite.
DIVERGENCE = 1e3


@dataclass(frozen=True)
class LinearSystem:
    """Arguments of `Solver.solve`; `guess_product` is H times the guess, if known. Raises ValueError."""

    operator: LinearOperator
    rhs: Tensor
    groups: Sequence[ColumnGroup]
    preconditioner: Preconditioner | None = None
    initial_guess: Tensor | None = None
    generator: torch.Generator | None = None
    callback: Callable[[SolveProgress], None] | None = None
    guess_product: Tensor | None = None

    def __post_init__(self) -> None:
        check_autocast()
        operator, rhs, shape = self.operator, self.rhs, self.operator.shape
        if shape[-1] != shape[-2]:
            raise ValueError(f"Only square systems can be solved, got an operator of shape {tuple(shape)}.")
        if rhs.shape[:-1] != shape[:-1]:
            raise ValueError(
                f"The right-hand side has shape {tuple(rhs.shape)}, which does not fit the operator's {tuple(shape)}."
            )
        check_same_kind("The right-hand side", rhs, "the operator", operator)
        if sum(group.size for group in self.groups) != rhs.shape[-1]:
            raise ValueError(f"The groups' sizes do not add up to {rhs.shape[-1]} columns: {self.groups}.")
        guess = self.initial_guess
        if guess is not None and (guess.shape, guess.dtype) != (rhs.shape, rhs.dtype):
            raise ValueError(
                "initial_guess must have the shape and dtype of the right-hand side, "
                f"{tuple(rhs.shape)}, {rhs.dtype}; got {tuple(guess.shape)}, {guess.dtype}."
            )

    def members(self) -> Iterator["LinearSystem"]:
        for index in itertools.product(*map(range, self.operator.batch_shape)):
            parts = {name: getattr(self, name) for name in ("preconditioner", "initial_guess", "guess_product")}
            yield replace(
                self,
                operator=cast(LinearOperator, self.operator[index]),
                rhs=self.rhs[index],
                **{name: None if part is None else part[index] for name, part in parts.items()},
            )


@dataclass
class Iterate:
    """The open columns [n, s], and the largest ratio of residual norm and tolerance."""

    value: Tensor
    residual: Tensor
    rhs: Tensor
    shortfall: float = math.inf


class Columns:
    """Columns of one system, scaled to right-hand sides of norm one.

    `operator` is H or its low-precision copy; `value`, `residual`, `norms` and `shortfalls` (norms over tolerances; both on
    the host) are the best so far; `overhead` counts passes over H. Raises NonFiniteError.
    """

    def __init__(self, system: LinearSystem, *, stopping: Literal["columns", "mean"], recursive: bool) -> None:
        self._matrix, rhs, self._groups = system.operator, system.rhs, system.groups
        self._stopping, self._recursive = stopping, recursive
        copy = low_precision_copy(system.operator)
        self.is_refined = copy is not None
        self.operator = system.operator if copy is None else copy
        self.eps = torch.finfo(rhs.dtype if copy is None else self.operator.dtype).eps
        self.max_rounds = MAX_REFINEMENTS if self.is_refined else MAX_ROUNDS
        self.reads_every = READS_EVERY.on(rhs.device)
        self.overhead = self._watched_at = 0.0
        self._sizes = [group.size for group in self._groups]
        tolerances = [group.tolerance for group in self._groups for _ in range(group.size)]
        self._tolerances = torch.tensor(tolerances, dtype=torch.float64, device=CPU).clamp_min(
            torch.finfo(torch.float64).tiny
        )
        self._aims = self._tolerances * (LOWER_AIM if self.is_refined else 1.0)
        self._open = self._round = every = torch.arange(rhs.shape[-1], device=CPU)
        self._watched = torch.linspace(0, len(rhs) - 1, min(VERIFIED_ROWS, len(rhs)), device=rhs.device).long()

        self._norms_of(rhs, every, iteration=0)  # an overflow would scale the column to zero
        # In float64, because tiny squares would underflow.
        norms = torch.linalg.vector_norm(rhs, dim=-2, dtype=torch.float64).to(rhs.dtype)
        self.scale = torch.where(norms > 0, norms, 1.0)
        self._rhs = rhs / self.scale
        self._far_field_error = far_field_error(system.operator) if len(rhs) > VERIFIED_ROWS else None
        self.value, self.residual = self._start(system.initial_guess, system.guess_product)
        self.norms = self._norms_of(self.residual, every, iteration=0)
        # Norms that exact rows add to residuals with a far field.
        self._beside_exact_rows = torch.zeros_like(self.norms)
        if system.initial_guess is not None and self._far_field_error is not None:
            true = self._true_rows(every.to(rhs.device), self.value)
            self._beside_exact_rows = self._norms_of(true - self.residual[self._watched], every, iteration=0)
            self.norms = torch.hypot(self.norms, self._beside_exact_rows)
        self.shortfalls = self._ratios(self.norms, self._tolerances)

    def _start(self, guess: Tensor | None, product: Tensor | None) -> tuple[Tensor, Tensor]:
        """Value and residual of the guess, scaled to least error or as given; zero where that is better."""
        if guess is None:
            return torch.zeros_like(self._rhs), self._rhs.clone()
        self.overhead += 1  # also for a known product
        product = (self._matrix._matmul(guess) if product is None else product) / self.scale
        guess = guess / self.scale
        energy = (guess * product).sum(-2)
        factor = (guess * self._rhs).sum(-2) / torch.where(energy > 0, energy, torch.ones_like(energy))
        norm_for = lambda factor: torch.linalg.vector_norm(self._rhs - product * factor, dim=-2)
        # NaN must stay NaN, which raises later.
        is_useless = (norm_for(factor) >= 1) | (energy <= 0)
        if is_useless.any():
            as_given = (norm_for(torch.ones_like(factor)) < 1).to(factor)  # rounding may have spoilt the energy
            factor = torch.where(is_useless, as_given, factor)
        return guess * factor, self._rhs - product * factor

    def _ratios(self, norms: Tensor, tolerances: Tensor) -> Tensor:
        """Norms over tolerances by column; for all that of the worst group's means, if "mean" stops."""
        if self._stopping == "columns":
            return norms / tolerances
        pairs = zip(norms.split(self._sizes), tolerances.split(self._sizes), strict=True)
        ratios = [float(norm.mean() / goal.mean()) for norm, goal in pairs if len(norm)]
        return torch.full_like(norms, max(ratios, default=0.0))

    def begin(self) -> Iterate | None:
        """Columns above their tolerance, with best iterates or zero corrections."""
        self._open = self._round = (self.shortfalls > 1).nonzero().squeeze(-1)
        if not len(self._open):
            return None
        columns = self._open.to(self._rhs.device)
        value, residual, rhs = (tensor[:, columns] for tensor in (self.value, self.residual, self._rhs))
        aims = self._aims
        self._kept_residual, self._kept_norms = None, self.norms.clone()
        if self.is_refined:
            residual = residual.to(self.operator.dtype)
            value, rhs = torch.zeros_like(residual), residual.clone()
            # Ends the round before the copy's error dominates.
            aims = aims.maximum(self.eps**0.5 * self.norms)
            self._kept = self.value.new_zeros(self.value.shape, dtype=self.operator.dtype)
        else:
            self._kept = self.value.clone()
            if self._recursive:
                self._kept_residual = self.residual.clone()
        self._running = self.norms.clone()
        self._round_aims = torch.full_like(aims, torch.inf)
        self._round_aims[self._round] = aims[self._round]
        return Iterate(value, residual, rhs, float(self._ratios(self._running, self._round_aims).max()))

    def observe(self, iterate: Iterate, iteration: int) -> Tensor | None:
        """Removes done columns; returns those that stay, None if all stay."""
        norms = self._running[self._open] = self._norms_of(iterate.residual, self._open, iteration)
        shortfalls = self._ratios(self._running, self._round_aims)
        iterate.shortfall, leaving = float(shortfalls.max()), shortfalls[self._open] <= 1
        self._keep(iterate, norms, leaving)
        if not leaving.any():
            return None
        staying = (~leaving).nonzero().squeeze(-1)
        self._open = self._open[staying]
        staying = staying.to(self._rhs.device)
        iterate.value, iterate.residual = iterate.value[:, staying], iterate.residual[:, staying]
        iterate.rhs = iterate.rhs[:, staying]
        return staying

    def has_lost_the_matrix(self, iterate: Iterate, iteration: int, epochs: float) -> bool:
        """Whether a low-precision copy's residuals have grown, or are nearer to zero than to the true ones."""
        if (self._running > DIVERGENCE * self.norms)[self._round].any():
            return True
        cost = len(self._watched) / len(self._rhs)
        is_time = iteration % WATCHED_EVERY == 0 and epochs - self._watched_at >= WATCHED_EVERY * cost
        if not (self._recursive and is_time):
            return False
        self._watched_at = epochs
        columns = self._open.to(self._rhs.device)
        residual = iterate.residual[self._watched]
        drift = self._true_rows(columns, self.value[:, columns] + iterate.value) - residual
        return bool(torch.linalg.matrix_norm(drift) > torch.linalg.matrix_norm(residual))

    def end(self, iterate: Iterate, iteration: int) -> None:
        if len(self._open):  # the last iterations may not have been observed
            norms = self._running[self._open] = self._norms_of(iterate.residual, self._open, iteration)
            self._keep(iterate, norms, torch.ones_like(norms, dtype=torch.bool))
        self._accept(iteration)
        self.shortfalls = self._ratios(self.norms, self._tolerances)
        seemed_done = self._ratios(self._running, self._round_aims) <= 1
        self._aims[seemed_done & (self.shortfalls > 1)] *= LOWER_AIM

    def _keep(self, iterate: Iterate, norms: Tensor, leaving: Tensor) -> None:
        """Keeps leaving iterates; with running residuals, every best one."""
        if self._recursive:
            best = self._kept_norms[self._open]
            leaving = (norms < WORTH_A_COPY * best) | (leaving & (norms < best))
        index = leaving.nonzero().squeeze(-1)
        if not len(index):
            return
        target = self._open[index]
        self._kept_norms[target] = norms[index]
        _copy_columns(self._kept, target, iterate.value, index)
        if self._kept_residual is not None:
            _copy_columns(self._kept_residual, target, iterate.residual, index)

    def _accept(self, iteration: int) -> None:
        """Takes kept iterates whose true residual is lower, or all if running residuals agree on the watched rows."""
        columns, running = self._round.to(self._rhs.device), self._kept_residual
        value = self._kept[:, columns].to(self.value.dtype)
        if self.is_refined:
            value = self.value[:, columns] + value
        is_watched = self._far_field_error is not None or (running is not None and len(self._rhs) > VERIFIED_ROWS)
        true = self._true_rows(columns, value) if is_watched else None
        if running is not None and true is not None:
            drift = self._norms_of(true - running[self._watched][:, columns], self._round, iteration)
            if (drift <= ALLOWED_DRIFT * self._tolerances[self._round]).all():
                self.value, self.residual, self.norms = self._kept, running, self._kept_norms
                return
        residual = self._rhs[:, columns] - self._matrix._matmul(value)
        self.overhead += 1
        norms = self._norms_of(residual, self._round, iteration)
        beside = torch.zeros_like(norms)
        if true is not None:
            beside = self._norms_of(true - residual[self._watched], self._round, iteration)
        norms = torch.hypot(norms, beside)
        index = (norms < self.norms[self._round]).nonzero().squeeze(-1)
        target = self._round[index]
        self.norms[target], self._beside_exact_rows[target] = norms[index], beside[index]
        _copy_columns(self.value, target, value, index)
        _copy_columns(self.residual, target, residual, index)

    def far_field_limit(self) -> FarFieldLimit | None:
        rounding = ROUNDING * torch.finfo(self._rhs.dtype).eps
        if self._far_field_error is None or self._far_field_error < rounding or not len(self.norms):
            return None
        ratio, worst = (self._beside_exact_rows / self._tolerances).max(0)
        if ratio < LIMITING_PART:
            return None
        residual, tolerance = float(self._beside_exact_rows[worst]), float(self._tolerances[worst])
        return FarFieldLimit(self._far_field_error, residual, tolerance)

    def _true_rows(self, columns: Tensor, value: Tensor) -> Tensor:
        self.overhead += len(self._watched) / len(self._rhs)
        return self._rhs[self._watched][:, columns] - rows_matmul(self._matrix, self._watched, value)

    def _norms_of(self, residual: Tensor, columns: Tensor, iteration: int) -> Tensor:
        """Norms of these columns of a residual, estimated if it has only the watched rows."""
        norms = torch.linalg.vector_norm(residual, dim=-2).double().cpu()
        size = self._matrix.shape[-1]
        if len(residual) < size:
            norms *= math.sqrt(size / len(residual))
        if torch.isfinite(norms).all():
            return norms
        advice = (
            "Check the data and hyperparameters for extreme values; a noise constraint and float64 keep the arithmetic "
            "within range."
        )
        if self.is_refined and iteration > 0:
            advice = (
                "The iterations computed with precision='float32', and the kernel's values may be beyond its range: use "
                "KernelProducts(precision='native')."
            )
        first = int((~torch.isfinite(norms)).nonzero()[0])
        raise NonFiniteError(
            f"The residual of column {int(columns[first])} of a linear solve is {norms[first].item()} after "
            f"{iteration} iterations. {advice}"
        )

    def group_norms(self, *, running: bool = False) -> dict[str, float]:
        reduce = torch.Tensor.mean if self._stopping == "mean" else torch.Tensor.amax
        parts = (self._running if running else self.norms).split(self._sizes)
        return {g.name: float(reduce(part)) if g.size else 0.0 for g, part in zip(self._groups, parts, strict=True)}


def _copy_columns(target: Tensor, place: Tensor, source: Tensor, columns: Tensor) -> None:
    if len(place) == target.shape[-1] == source.shape[-1]:  # a plain copy is faster
        target.copy_(source)
    else:
        target[:, place.to(target.device)] = source[:, columns.to(source.device)]

"""Result of a solve: solutions, residuals, status and statistics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, warn
from gpy_iterative.linear_operators.products import FAR_FIELD_TOLERANCES
from gpy_iterative.preconditioners.preconditioner import Preconditioner


class SolveStatus(Enum):
    """How a solve ended; `.advice` says what to do about it."""

    CONVERGED = "The true residual of every column is within its tolerance."
    TRUNCATED = (
        "A series was cut where its truncation said, as intended. More steps (min_steps, num_steps), a lower rate or a "
        "stronger preconditioner lower its error."
    )
    BUDGET_EXHAUSTED = (
        "The budget ran out before the tolerance was reached. Raise max_epochs, loosen the tolerance, keep the "
        "noise away from zero (a noise constraint), or take a stronger preconditioner or larger blocks."
    )
    STAGNATED = (
        "The residual stopped falling above the tolerance: the arithmetic allows no more. Loosen the tolerance, "
        "keep the noise away from zero (a noise constraint), or take a smaller tolerance of the far field where there is "
        "one."
    )
    DIVERGED = (
        "The residual grew even at the smallest step size that was tried. Lower learning_rate, or take "
        "AlternatingProjections or ConjugateGradients."
    )
    INDEFINITE = (
        "The matrix is not positive definite, so the solution means little. Keep the noise away from zero (a noise "
        "constraint), take a smaller tolerance of the far field where there is one, or use a kernel that is positive "
        "definite for so many columns (CosineKernel is for one only)."
    )

    @property
    def advice(self) -> str:
        """One or two sentences for a user."""
        return self.advice_for(None)

    def advice_for(self, dtype: torch.dtype | None) -> str:
        """As `advice`, for a solve in a dtype: float64 where it is not that, all of its digits where it is."""
        more = ""
        if dtype != torch.float64 and self in (SolveStatus.STAGNATED, SolveStatus.INDEFINITE):
            more += " Or use float64."
        if dtype != torch.float32 and self in (SolveStatus.STAGNATED, SolveStatus.BUDGET_EXHAUSTED):
            more += " With KernelProducts(precision='float32'), use 'native'."
        return self.value + more


@dataclass(frozen=True)
class ColumnGroup:
    """Right-hand sides that share a tolerance.

    Attributes:
        name: in the statistics.
        size: how many neighbouring columns.
        tolerance: relative residual norm at which a column is done.
    """

    name: str
    size: int
    tolerance: float


@dataclass(frozen=True)
class FarFieldLimit:
    """A far field whose error keeps a solve from its tolerance.

    Attributes:
        error: the measured relative error of its products.
        residual: relative norm of what exact rows add to the residual that products find.
        tolerance: of the solve; both of the column that misses its tolerance most.
    """

    error: float
    residual: float
    tolerance: float

    @property
    def suggested_tolerance(self) -> float:
        """A tolerance of the far field that leaves half of the solve's tolerance to it, to one digit."""
        wanted = max(0.5 * self.error * self.tolerance / self.residual, FAR_FIELD_TOLERANCES[0])
        step = 10.0 ** math.floor(math.log10(wanted))
        return max(math.floor(wanted / step + 1e-9), 1) * step

    @property
    def advice(self) -> str:
        """What it does, and what to do about it."""
        return (
            f"The cause is the far field, whose products have a measured relative error of {self.error:.1g}: with exact "
            f"rows of the kernel matrix the residual is larger by {self.residual:.1g}, and the solve's tolerance is "
            f"{self.tolerance:.1g}. Take a smaller tolerance, KernelProducts(far_field={self.suggested_tolerance:.0e}), or "
            "far_field=None."
        )


@dataclass(frozen=True)
class SolveStats:
    """Cost and accuracy of a solve.

    Attributes:
        iterations: of the solver.
        epochs: passes over the matrix that the iterations took.
        overhead: further passes, outside the budget: the initial residual of a warm start, the set-up of the solver
            (preconditioner, factors, step size), true residuals.
        residual_norms: true relative residual of every group; the largest of its columns, or their mean
            under stopping="mean".
        seconds: wall-clock time.
        far_field: where the error of a far field is why the tolerance was not reached, its figures; else None.
    """

    iterations: int
    epochs: float
    overhead: float
    residual_norms: dict[str, float]
    seconds: float
    far_field: FarFieldLimit | None = None

    @classmethod
    def of_batch(cls, members: Sequence["SolveStats"]) -> "SolveStats":
        """Sums of iterations and seconds, means of epochs (one is a pass over all matrices), largest residuals."""
        return cls(
            iterations=sum(member.iterations for member in members),
            epochs=sum(member.epochs for member in members) / len(members),
            overhead=sum(member.overhead for member in members) / len(members),
            residual_norms={
                name: max(member.residual_norms[name] for member in members) for name in members[0].residual_norms
            },
            seconds=sum(member.seconds for member in members),
            far_field=max(
                (member.far_field for member in members if member.far_field is not None),
                key=lambda limit: limit.residual / limit.tolerance,
                default=None,
            ),
        )


@dataclass(frozen=True)
class SolveProgress:
    """Progress of a solve, for a callback: `residual_norms` as in SolveStats, but estimated."""

    iteration: int
    epochs: float
    residual_norms: dict[str, float]


@dataclass(frozen=True)
class Solution:
    """Result of a solve.

    Attributes:
        value: [*b, n, s], the best iterate of every column.
        residual: [*b, n, s], the true `rhs - H value`. Gradients are made of it: one that is not true makes them wrong.
        status: how the solve ended; of several batch members, the worst.
        stats: cost and accuracy.
        preconditioner: that of the iterations, for another solve with the same operator; None where there was none, and of
            a batch.

    A warm start of the next solve needs `value` and nothing else.
    """

    value: Tensor
    residual: Tensor
    status: SolveStatus
    stats: SolveStats
    preconditioner: Preconditioner | None = field(default=None, kw_only=True)


def warn_of(what: str, status: SolveStatus, stats: SolveStats, dtype: torch.dtype) -> None:
    """A ConvergenceWarning about a solve that has not converged, with its residuals and advice."""
    norms = ", ".join(f"{name} {norm:.2g}" for name, norm in stats.residual_norms.items())
    warn(
        f"{what} ended with status {status.name.lower()} after {stats.epochs:.1f} epochs (relative residuals: {norms}). "
        f"{status.advice_for(dtype) if stats.far_field is None else stats.far_field.advice}",
        ConvergenceWarning,
    )

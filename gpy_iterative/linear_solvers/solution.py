"""Result of a solve."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, warn
from gpy_iterative.linear_operators.products import FAR_FIELD_TOLERANCES
from gpy_iterative.preconditioners.preconditioner import Preconditioner


class SolveStatus(Enum):
    """How a solve ended."""

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
        "AlternatingProjections or ConjugateGradients, which see whether the matrix is not positive definite."
    )
    INDEFINITE = (
        "The matrix is not positive definite, so the solution means little. Keep the noise away from zero (a noise "
        "constraint), take a smaller tolerance of the far field where there is one, or use a kernel that is positive "
        "definite for so many columns (CosineKernel is for one only)."
    )

    @property
    def advice(self) -> str:
        """What the user can change."""
        return self.advice_for(None)

    def advice_for(self, dtype: torch.dtype | None) -> str:
        """Advice for this dtype; None: any."""
        more = ""
        if dtype != torch.float64 and self in (SolveStatus.STAGNATED, SolveStatus.INDEFINITE):
            more += " Or use float64."
        if dtype != torch.float32 and self in (SolveStatus.STAGNATED, SolveStatus.BUDGET_EXHAUSTED):
            more += " With KernelProducts(precision='float32'), use 'native'."
        return self.value + more


#: Solves that ended as intended.
SOLVED = (SolveStatus.CONVERGED, SolveStatus.TRUNCATED)


@dataclass(frozen=True)
class ColumnGroup:
    """Neighbouring columns with the same tolerance of their relative residual norms; zero: none."""

    name: str
    size: int
    tolerance: float


@dataclass(frozen=True)
class FarFieldLimit:
    """A far field whose error keeps a solve from its tolerance.

    Attributes:
        error: of its entries, relative to their standard deviation.
        residual: relative norm that exact rows add to the worst column.
        tolerance: of that column.
    """

    error: float
    residual: float
    tolerance: float

    @property
    def suggested_tolerance(self) -> float | None:
        """Uses half of the solve's tolerance, in one digit; None if no far field is as exact."""
        wanted = 0.5 * self.error * self.tolerance / self.residual
        if wanted < FAR_FIELD_TOLERANCES[0]:
            return None
        step = 10.0 ** math.floor(math.log10(wanted))
        return max(math.floor(wanted / step + 1e-9), 1) * step

    @property
    def advice(self) -> str:
        smaller = self.suggested_tolerance
        levers = (
            f"Take KernelProducts(far_field=None), or a larger tolerance of the solver: no far_field, which is at least "
            f"{FAR_FIELD_TOLERANCES[0]:.0e}, is small enough."
            if smaller is None
            else f"Take a more exact far field, KernelProducts(far_field={smaller:.0e}), or far_field=None."
        )
        return (
            f"The cause is the far field, whose entries have a measured relative error of {self.error:.1g}: with exact "
            f"rows of the kernel matrix the residual is larger by {self.residual:.1g}, and the solve's tolerance is "
            f"{self.tolerance:.1g}. {levers}"
        )


@dataclass(frozen=True)
class SolveStats:
    """Cost and accuracy of a solve.

    Attributes:
        epochs: passes over the matrix in iterations.
        overhead: passes outside the budget: set-up and true residuals.
        residual_norms: true relative residual by group: the largest, or the mean with stopping="mean".
        far_field: set if its error causes a missed tolerance.
    """

    iterations: int
    epochs: float
    overhead: float
    residual_norms: dict[str, float]
    seconds: float
    far_field: FarFieldLimit | None = None

    def followed_by(self, later: "SolveStats") -> "SolveStats":
        """The later solve's accuracy, and the cost of both."""
        summed = ("iterations", "epochs", "overhead", "seconds")
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in summed})

    @classmethod
    def of_batch(cls, members: Sequence["SolveStats"]) -> "SolveStats":
        """Sums of iterations and seconds, means of epochs, largest residuals."""
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
    """Progress for a callback; residual norms are the running ones."""

    iteration: int
    epochs: float
    residual_norms: dict[str, float]


@dataclass(frozen=True)
class Solution:
    """Result of a solve.

    Attributes:
        value: V [*b, n, s].
        residual: the true `rhs - H value` [*b, n, s].
        status: the worst of a batch.
        preconditioner: for another solve with this operator; None for a batch.
    """

    value: Tensor
    residual: Tensor
    status: SolveStatus
    stats: SolveStats
    preconditioner: Preconditioner | None = field(default=None, kw_only=True)


def warn_of(
    what: str, status: SolveStatus, stats: SolveStats, dtype: torch.dtype, *, advice: str | None = None
) -> None:
    """ConvergenceWarning. Without `advice` it has that of the status."""
    norms = ", ".join(f"{name} {norm:.2g}" for name, norm in stats.residual_norms.items())
    warn(
        f"{what} ended with status {status.name.lower()} after {stats.epochs:.1f} epochs (relative residuals: {norms}). "
        f"{(advice or status.advice_for(dtype)) if stats.far_field is None else stats.far_field.advice}",
        ConvergenceWarning,
    )

"""Reports."""

import dataclasses
import html
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from gpy_iterative.linear_solvers.solution import SolveStatus

#: Larger tensors are shown by range and mean.
MAX_LISTED = 6


class Report:
    """Figures as a line (`str`), a text table, or a notebook table."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {figure}" for name, figure in _rows(self))

    def table(self) -> str:
        """One figure per line, for `print`."""
        rows = list(_rows(self))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {figure}" for name, figure in rows)

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(figure)}</td></tr>" for name, figure in _rows(self))
        return f"<table>{''.join(rows)}</table>"


def _rows(report: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        if isinstance(value, Report):
            yield from _rows(value)
        elif value is not None:
            yield field.name.replace("_", " "), _figure(value)


def _figure(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name.lower().replace("_", " ")
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, Tensor):
        return str(value)
    if value.numel() == 1:
        return f"{value.item():.6g}"
    if value.numel() <= MAX_LISTED:
        return ", ".join(f"{entry:.6g}" for entry in value.flatten().tolist())
    low, mean, high = value.min().item(), value.double().mean().item(), value.max().item()
    return f"{low:.6g} to {high:.6g}, mean {mean:.6g} ({value.numel()} figures)"


@dataclass(frozen=True)
class MarginalLogLikelihoodReport(Report):
    """Figures of one step.

    Attributes:
        epochs: passes of the solve over the kernel matrix; 0 for Cholesky.
        residual_targets: true relative residual norm of `H a = y - mean`; of a truncated series' unweighted sum.
        residual_probes: the same for probes (largest, or mean with `stopping="mean"`); None for Cholesky.
        value: [*b], log marginal likelihood with priors and added loss terms, per datum.
        value_sem: [*b], its standard error with estimated errors of quadrature and solve; with many rows up to ten times
            too large. 0 for Cholesky, NaN if unknown (random features, Russian roulette with a single probe).
        seconds: of the forward pass.
        truncation: of random truncation methods.
        far_field_error: measured error of far-field entries, relative to their standard deviation.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    residual_targets: float
    residual_probes: float | None
    value: Tensor
    value_sem: Tensor
    seconds: float
    truncation: Report | None = None
    far_field_error: float | None = None

    def __str__(self) -> str:
        value, sem = self.value.mean().item(), self.value_sem.mean().item()
        error = "error unknown" if math.isnan(sem) else f"± {sem:.1g}"
        probes = "" if self.residual_probes is None else f", probes {self.residual_probes:.2g}"
        far = "" if self.far_field_error is None else f"; far field to {self.far_field_error:.1g}"
        return (
            f"mll {value:.4f} {error}; {self.status.name.lower()} after {self.epochs:.1f} epochs; "
            f"residuals: targets {self.residual_targets:.2g}{probes}{far}; {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class SolveReport(Report):
    """The linear solve for a posterior mean.

    Attributes:
        epochs: passes of iterations over the kernel matrix; 0 for a factorisation.
        overhead: other passes.
        residual: true relative residual norm; 0 for a factorisation.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    overhead: float
    residual: float
    seconds: float

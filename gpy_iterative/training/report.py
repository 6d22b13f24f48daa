"""Reports: of the last evaluation of a marginal log likelihood, and of a posterior; the protocol of posteriors."""

import dataclasses
import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpy_iterative.linear_solvers.solution import SolveStats, SolveStatus

#: Figures that a table lists one by one; of more, their range and mean.
MAX_LISTED = 6


class Report:
    """Figures as one line (`str`), as a table for a terminal (`table`), or for a notebook, which shows it by itself."""

    def table(self) -> str:
        """Every figure on a line of its own, for `print`."""
        rows = list(_rows(self))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {figure}" for name, figure in rows)

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(figure)}</td></tr>" for name, figure in _rows(self))
        return f"<table>{''.join(rows)}</table>"


def _rows(report: Any) -> Iterator[tuple[str, str]]:
    """Names and figures, those of a report inside of a report among them."""
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
    """One step's figures; `print(mll.report)` shows them on one line, `print(mll.report.table())` as a table.

    Attributes:
        status: how the solve ended.
        iterations: solver iterations.
        epochs: passes over the kernel matrix that the solve took (0 for Cholesky).
        residual_targets: relative residual norm of `H a = y - mean`, from a true residual; of a truncated series, that of
            its unweighted sum, from the recurrence.
        residual_probes: the same of the probes' solves (their largest, or their mean under `stopping="mean"`);
            None where there are no probes (Cholesky).
        value: [*b], what `forward` returned: the log marginal likelihood with priors and added loss terms,
            divided by the number of data.
        value_sem: [*b], standard error of `value`, estimated from the log-determinant's probes (four where the gradient has
            others) and the weights of a truncated series. 0 for Cholesky, NaN where it is not known: random features, a
            single probe, `value=None`. It is itself uncertain, and errors of twice as much are no surprise.
        seconds: wall-clock time of the forward pass.
        truncation: of the methods that truncate at random, what was drawn.
        probe_jitter: where rounding left the frozen pivots of the probes' covariance without a Cholesky factor, the jitter
            that it took, relative to the kernel's largest variance; else None. Such pivots weigh less: the gradient stays
            unbiased, with more variance. The same holds for blocks of a `Vecchia` factor.
        far_field_error: where products passed through far fields, their measured relative error; else None.
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
    probe_jitter: float | None = None
    far_field_error: float | None = None

    def __str__(self) -> str:
        value, sem = self.value.mean().item(), self.value_sem.mean().item()
        probes = "" if self.residual_probes is None else f", probes {self.residual_probes:.2g}"
        jitter = "" if self.probe_jitter is None else f"; probes' covariance took a jitter of {self.probe_jitter:.1g}"
        far = "" if self.far_field_error is None else f"; far field to {self.far_field_error:.1g}"
        return (
            f"mll {value:.4f} ± {sem:.1g}; {self.status.name.lower()} after {self.epochs:.1f} epochs; "
            f"residuals: targets {self.residual_targets:.2g}{probes}{jitter}{far}; {self.seconds:.2f} s"
        )


@runtime_checkable
class Posterior(Protocol):
    """A posterior over functions, at the hyperparameters and data of now."""

    @property
    def report(self) -> Report:
        """How the posterior was computed, and at what cost."""
        ...

    def __call__(self, *inputs: Tensor) -> MultivariateNormal:
        """The latent posterior at test inputs [*b, t, d], one tensor for each of the model's inputs."""
        ...

    def sample_paths(self, num_paths: int) -> Callable[..., Tensor]:
        """Posterior samples as functions: `paths(x)` evaluates the same functions at any x, [num_paths, *b, t]."""
        ...


@dataclass(frozen=True)
class SolveReport(Report):
    """The linear solve for a posterior mean.

    Attributes:
        status: how it ended.
        iterations: of the solver.
        epochs: passes over the kernel matrix that the iterations took; 0 where it was factored.
        overhead: further passes: the residual of the start, the preconditioner.
        residual: relative residual norm, from a true residual; 0 where the matrix was factored.
        seconds: wall-clock time.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    overhead: float
    residual: float
    seconds: float

    @classmethod
    def of(cls, status: SolveStatus, stats: SolveStats) -> "SolveReport":
        """The report of a solve with these statistics."""
        residual = max(stats.residual_norms.values(), default=0.0)
        return cls(status, stats.iterations, stats.epochs, stats.overhead, residual, stats.seconds)

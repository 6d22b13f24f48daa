"""What the last evaluation of a marginal log likelihood did, and how far its numbers can be trusted."""

import dataclasses
import html
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from gpy_iterative.solvers import SolveStatus
from gpy_iterative.truncation import Truncation

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
class TruncationReport(Report):
    """A truncated conjugate gradient series: what was drawn, what was run, and the variance that this leaves.

    Attributes:
        truncation: the distribution of the draws.
        target_steps: J of each truncation of the targets' series, [*b, M].
        probe_steps: J of each probe, [*b, s].
        steps: that were run, of the targets and of each probe, [*b, 1 + s].
        converged: which of these series ended before they were cut, [*b, 1 + s].
        relative_variance: of one truncation of H^-1 (y - mean), E|x - E x|^2 over |E x|^2 in the norm of H, [*b]: from
            the terms that were run.
        decay_rate: log(rho) of the targets' series, whose terms fall as rho^-j, [*b]. The variance stays finite for a
            truncation of a rate below 2 log(rho); log(rho) itself is best.
    """

    truncation: Truncation
    target_steps: Tensor
    probe_steps: Tensor
    steps: Tensor
    converged: Tensor
    relative_variance: Tensor
    decay_rate: Tensor


@dataclass(frozen=True)
class FrequencyReport(Report):
    """A random feature step.

    Attributes:
        num_frequencies: of the largest feature matrix that was used.
        grid_index: which increment of the grid was drawn; None where there is no grid.
        probability: of that draw; None likewise.
        is_exact: whether the increment's upper end was the exact likelihood.
    """

    num_frequencies: int
    grid_index: int | None = None
    probability: float | None = None
    is_exact: bool = False


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
            unbiased, with more variance.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    residual_targets: float
    residual_probes: float | None
    value: Tensor
    value_sem: Tensor
    seconds: float
    truncation: TruncationReport | FrequencyReport | None = None
    probe_jitter: float | None = None

    def __str__(self) -> str:
        value, sem = self.value.mean().item(), self.value_sem.mean().item()
        probes = "" if self.residual_probes is None else f", probes {self.residual_probes:.2g}"
        jitter = "" if self.probe_jitter is None else f"; probes' covariance took a jitter of {self.probe_jitter:.1g}"
        return (
            f"mll {value:.4f} ± {sem:.1g}; {self.status.name.lower()} after {self.epochs:.1f} epochs; "
            f"residuals: targets {self.residual_targets:.2g}{probes}{jitter}; {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class MinibatchReport(Report):
    """One mini-batch step's figures; `print(mll.report)` shows them on one line, `print(mll.report.table())` as a table.

    Attributes:
        value: what `forward` returned, a scalar.
        batch_size: rows that were looked at.
        num_data: n.
        steps: training steps so far.
        seconds: wall-clock time of the forward pass.
    """

    value: Tensor
    batch_size: int
    num_data: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"mll {self.value.item():.4f} from {self.batch_size} of {self.num_data} data; step {self.steps}; "
            f"{self.seconds:.3f} s"
        )


@dataclass(frozen=True)
class QuadruplyStochasticReport(Report):
    """One step on a sample of data and features; `print(mll.report)` shows it on one line.

    Attributes:
        value: what `forward` returned, [].
        is_unbiased: whether it estimates the evidence lower bound for the rows, or bounds it from below.
        num_rows: sampled data.
        num_features: m.
        num_feature_samples: features of an index set, beyond those that every step evaluates.
        num_control_points: support points of the control variate.
        num_steps_per_batch: for which the data are kept; 1 where each step draws others.
        seconds: wall-clock time of the forward pass.
    """

    value: Tensor
    is_unbiased: bool
    num_rows: int
    num_features: int
    num_feature_samples: int
    num_control_points: int
    num_steps_per_batch: int
    seconds: float

    def __str__(self) -> str:
        kind = "elbo" if self.is_unbiased else "bound"
        return (
            f"{kind} {self.value.item():.4f} from {self.num_rows} rows and {self.num_feature_samples} of "
            f"{self.num_features} features; {self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class LaplaceReport(Report):
    """One step's figures of a LaplaceMarginalLogLikelihood, on one line or as a table.

    Attributes:
        status: of the mode, or of the worst solve; of objective="elbo" that of the bound's maximisation.
        iterations: Newton steps.
        epochs: kernel products to the mode.
        probe_epochs: products with all probes, and with the adjoint, for the gradient.
        stationarity: of the mode: the log joint density's gradient over the likelihood's.
        rank: actions that were kept.
        value: [], what `forward` returned.
        value_sem: [], its standard error from the log-determinant's probes (0 where there are none).
        seconds: wall-clock time of the forward pass.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    probe_epochs: float
    stationarity: float
    rank: int
    value: Tensor
    value_sem: Tensor
    seconds: float

    def __str__(self) -> str:
        return (
            f"mll {self.value.item():.4f} ± {self.value_sem.item():.1g}; {self.status.name.lower()} after "
            f"{self.iterations} Newton steps, {self.epochs:.0f} kernel products and {self.probe_epochs:.0f} with probes; "
            f"relative gradient {self.stationarity:.1g}; {self.seconds:.2f} s"
        )

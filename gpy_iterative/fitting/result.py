import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.fitting.stopping import FitStatus

#: Of a 95 % interval, in standard errors.
WIDTH = 1.96
#: Of an undetermined coordinate: least part of the variance from the ridge, and least standard error in log units.
RIDGE_PART, WIDEST = 0.1, 3.0
MAX_LISTED, MOST_ROWS = 40, 40


@dataclass(frozen=True)
class HistoryRow:
    """The fit after some steps.

    Attributes:
        step: 0 is the start.
        value: log marginal likelihood, or the method's bound, per datum (mean over a batch).
        value_sem: its standard error; NaN if unknown, as of random features.
        left_to_gain: nats in total, with those that the probes hide; None for Adam.
        noise: error of `left_to_gain` from probe noise, in nats; None for Adam.
        step_length: largest move of a coordinate, in log units for positive parameters.
        epochs: passes over the kernel matrix since the last row; None if not counted.
        seconds: since the last row; the first includes the start on subsets.
    """

    step: int
    value: float
    value_sem: float
    left_to_gain: float | None
    noise: float | None
    step_length: float
    epochs: float | None
    seconds: float

    def figures(self) -> dict[str, float]:
        """For a progress bar."""
        left = {} if self.left_to_gain is None else {"left to gain": self.left_to_gain}
        return {"value": self.value, **left}

    def __str__(self) -> str:
        left = "" if self.left_to_gain is None else f"  left {self.left_to_gain:9.3g} ± {self.noise:<7.2g}"
        epochs = "" if self.epochs is None else f"  {self.epochs:5.1f} epochs"
        error = " error unknown" if math.isnan(self.value_sem) else f" ± {self.value_sem:.1g}"
        sem = error if self.value_sem else ""
        return f"{self.step:4d}  {self.value:9.4f}{sem}{left}  moved {self.step_length:5.2f}{epochs}  {self.seconds:6.2f} s"


@dataclass(frozen=True)
class Estimated:
    """One hyperparameter with its standard error.

    Attributes:
        standard_error: of the logarithm for positive parameters, of the logit for intervals, else of the value; None if
            undetermined by the data, or if the fit gives none.
        low, high: 95 % interval, which ends at bounds, in the units of `value`; None without standard error.
        at_bound: whether it is held at a bound of its constraint.
        is_undetermined: whether the data leave it open, as other values fit equally well.
    """

    name: str
    value: float
    standard_error: float | None
    low: float | None
    high: float | None
    at_bound: bool = False
    is_undetermined: bool = False

    def __str__(self) -> str:
        if self.at_bound:
            return f"{self.name} {self.value:.4g} (at its bound)"
        if self.low is None or self.high is None:
            return f"{self.name} {self.value:.4g}" + (" (not determined)" if self.is_undetermined else "")
        return f"{self.name} {self.value:.4g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class FitResult:
    """What `gpi.fit` returns; `print(result)` shows it.

    Attributes:
        status: `status.advice` says what to do.
        history: one row for the start and for each step; another one after new probes or other lengthscales.
        hyperparameters: in the mll's order; Adam gives no standard errors.
        irrelevant: lengthscales of unneeded inputs, whose value changes nothing.
        method: "average_information" (or "average_information, then quasi_newton"), "quasi_newton", "adam" or
            "own_optimizer".
        reason: for the method.
        is_interrupted: by Ctrl-C; the status is then BUDGET.
    """

    status: FitStatus
    steps: int
    history: tuple[HistoryRow, ...]
    hyperparameters: tuple[Estimated, ...]
    irrelevant: tuple[str, ...]
    method: str
    reason: str
    seconds: float
    is_interrupted: bool = False

    @property
    def standard_errors(self) -> dict[str, float | None]:
        """By name, see `Estimated.standard_error`."""
        return {each.name: each.standard_error for each in self.hyperparameters}

    @property
    def has_standard_errors(self) -> bool:
        """False for Adam, for STAGNATED, or if Ctrl-C came before the curvature was known."""
        return any(each.standard_error is not None for each in self.hyperparameters)

    def plot(self) -> Any:
        """Value and nats left to gain by step: a `matplotlib.figure.Figure`. ImportError without matplotlib."""
        try:
            figures = importlib.import_module("matplotlib.figure")  # optional, and slow to import
        except ImportError as error:
            raise ImportError(
                "result.plot() needs matplotlib, which is not installed: pip install matplotlib."
            ) from error
        rows, steps = self.history, [row.step for row in self.history]
        has_left = any(row.left_to_gain is not None for row in rows)
        figure = figures.Figure(figsize=(6, 5 if has_left else 3), layout="constrained")
        first, *others = figure.subplots(2 if has_left else 1, sharex=True, squeeze=False)[:, 0]
        first.errorbar(steps, [row.value for row in rows], [row.value_sem for row in rows], marker="o", capsize=3)
        first.set_ylabel("value a datum")
        for axes in others:
            axes.semilogy(steps, [row.left_to_gain for row in rows], marker="o")
            axes.set_ylabel("left to gain (nats)")
        (others[-1] if others else first).set_xlabel("step")
        return figure

    def __str__(self) -> str:
        last, method = self.history[-1], self.method.replace("_", " ")
        lines = [
            f"{self.status.name} after {self.steps} steps of {method} "
            f"({self.seconds:.1f} s): value {last.value:.4f} a datum",
            self.status.advice,
            *([f"{method.capitalize()}: {self.reason}"] if last.left_to_gain is None else []),
            "",
            "step      value",
            *_shortened(list(map(str, self.history))),
            "",
            *map(str, self.hyperparameters[:MAX_LISTED]),
        ]
        if len(self.hyperparameters) > MAX_LISTED:
            lines.append(f"and {len(self.hyperparameters) - MAX_LISTED} more")
        lines += _told(self.irrelevant, list(self.standard_errors))
        return "\n".join(lines)


def _shortened(rows: list[str]) -> list[str]:
    if len(rows) <= MOST_ROWS:
        return rows
    shown = MOST_ROWS // 2
    return [*rows[:shown], f"({len(rows) - 2 * shown} more)", *rows[-shown:]]


def _told(irrelevant: Sequence[str], names: Sequence[str]) -> list[str]:
    kernel_of = lambda name: name.partition("[")[0]
    useful = {kernel_of(name) for name in names if name not in irrelevant}
    inputs = [name for name in irrelevant if kernel_of(name) in useful]
    kernels = dict.fromkeys(kernel_of(name) for name in irrelevant if kernel_of(name) not in useful)
    lines = (
        [f"The data may do without the inputs of {', '.join(inputs)}: these values change nothing."] if inputs else []
    )
    return lines + [
        f"The kernel of {name} changes nothing: leave it out, or start from another lengthscale and outputscale."
        for name in kernels
    ]


def estimated(coordinates: Coordinates, matrix: Tensor, ridge: Tensor, held: Tensor) -> tuple[Estimated, ...]:
    """With standard errors from A [p, p] with a ridge [p]; coordinates `held` at bounds are fixed for the others."""
    position, free = coordinates.read(), ~held
    variances = torch.full_like(position, torch.nan)
    if free.any():
        kept = matrix[free][:, free] + torch.diag(ridge[free])
        variances[free] = torch.linalg.inv(kept).diagonal()
    errors = variances.sqrt()
    is_log = ~coordinates.has_units
    unknown = (variances * ridge > RIDGE_PART) | (is_log & (errors > WIDEST)) | ~errors.isfinite()
    width = WIDTH * errors.nan_to_num()
    ends = (end.clamp(coordinates.lower, coordinates.upper) for end in (position - width, position + width))
    values, lows, highs = map(coordinates.user_entries, (position, *ends))
    return tuple(
        Estimated(name, value, None, None, None, at_bound=bool(at_bound), is_undetermined=not at_bound)
        if is_unknown
        else Estimated(name, value, error, low, high)
        for name, value, error, low, high, is_unknown, at_bound in zip(
            coordinates.names, values, errors.tolist(), lows, highs, unknown.tolist(), held.tolist(), strict=True
        )
    )


def without_errors(coordinates: Coordinates) -> tuple[Estimated, ...]:
    position = coordinates.read()
    is_lowest, is_highest = coordinates.at_bounds(position)
    entries = zip(coordinates.names, coordinates.user_entries(position), (is_lowest | is_highest).tolist(), strict=True)
    return tuple(Estimated(name, value, None, None, None, at_bound=at_bound) for name, value, at_bound in entries)


def irrelevant_inputs(coordinates: Coordinates, matrix: Tensor) -> tuple[str, ...]:
    """Lengthscales that the data do not determine even with all others known, from A [p, p].

    Those only jointly undetermined may matter: with the outputscale, one may form a linear function.
    """
    is_logarithm = {name for part in coordinates.parts if part.kind == "log" for name in part.names()}
    return tuple(
        name
        for name, information in zip(coordinates.names, matrix.diagonal().tolist(), strict=True)
        if "lengthscale" in name and name in is_logarithm and information < WIDEST**-2
    )

import importlib
import importlib.util
import math
from pathlib import Path

import torch
from torch import Tensor

from gpy_iterative.command_line.model import TableModel
from gpy_iterative.command_line.table import BadInputError
from gpy_iterative.fitting import Estimated, FitResult, FitStatus
from gpy_iterative.fitting.result import WIDTH

ADVICE = {
    FitStatus.CONVERGED: FitStatus.CONVERGED.advice,
    FitStatus.NOISE: (
        "Rounding, or the noise of stochastic estimates, hides what further steps gain: --double may go further."
    ),
    FitStatus.BOUND: (
        "The optimum lies at or beyond a bound, and a hyperparameter is held there. Noise at its least value means data "
        "without noise, or duplicate rows."
    ),
    FitStatus.BUDGET: (
        "The steps ran out, or the fit was interrupted: raise --max-steps; with --checkpoint the command goes on from here."
    ),
    FitStatus.STAGNATED: (
        "No step gains anything, yet this is no optimum: value and gradient disagree, or solves fail. Try --double, "
        "or leave out duplicate rows."
    ),
}
PICTURES = (".png", ".pdf", ".svg")


def score_lines(model: TableModel, y: Tensor, mean: Tensor, deviation: Tensor) -> list[str]:
    plain = (parameter.expand_as(y) for parameter in (model.target_units.mean, model.target_units.scale))
    (rmse, density), (plain_rmse, plain_density) = _scores(y, mean, deviation), _scores(y, *plain)
    inside = int(((y - mean).abs() < WIDTH * deviation).sum())
    return [
        f"Held-out rows, {model.target} in its own units (in brackets: without a model, by mean and standard deviation)",
        f"  root mean square error: {rmse:.4g} ({plain_rmse:.4g})",
        f"  mean log density: {density:.4g} ({plain_density:.4g})",
        f"  inside their 95 % intervals: {inside / len(y):.1%}, {inside} of {len(y)} rows",
    ]


def _scores(y: Tensor, mean: Tensor, deviation: Tensor) -> tuple[float, float]:
    return float((y - mean).square().mean().sqrt()), float(
        torch.distributions.Normal(mean, deviation).log_prob(y).mean()
    )


def fit_lines(model: TableModel, result: FitResult) -> list[str]:
    shift, scale = float(model.target_units.mean), float(model.target_units.scale)
    units = {column.name: " (days)" for column in model.columns if column.kind == "date"}
    rows = [  # name, power, factor, shift
        (f"noise of {model.target} (standard deviation)", 0.5, scale, 0.0),
        (f"mean of {model.target} far from the data", 1.0, scale, shift),
        (f"variation of {model.target} around it (standard deviation)", 0.5, scale, 0.0),
        *((f"lengthscale of {name}{units.get(name, '')}", 1.0, factor, 0.0) for name, factor in model.inputs.items()),
    ]
    lengthscales = [each for each in result.hyperparameters if "lengthscale" in each.name]
    useless = {  # not short ones, which separate rows
        name
        for name, each in zip(model.inputs, lengthscales, strict=True)
        if each.name in result.irrelevant and each.value > 1
    }
    unused = [column.name for column in model.columns if useless.issuperset(column.inputs)]
    unknown = ", not determined by the data" if result.has_standard_errors else ""
    return [
        f"{result.status.name}, {result.steps} steps, {result.seconds:.1f} s: {ADVICE[result.status]}",
        *([f"Trained by Adam, without standard errors: {result.reason}"] if result.method == "adam" else []),
        "Hyperparameters, in the table's units",
        *(
            _in_words(each, *row, unknown, model.mean_digits)
            for each, row in zip(result.hyperparameters, rows, strict=True)
        ),
        *([f"The data may do without these inputs: {', '.join(unused)}."] if unused else []),
    ]


def _in_words(
    each: Estimated, name: str, power: float, factor: float, shift: float, unknown: str, mean_digits: int
) -> str:
    """Value, standard error (a factor for positive values) and 95 % interval."""
    is_mean = each.name.endswith("constant")
    digits = min(17, 4 + mean_digits) if is_mean else 4
    value = f"  {name}: {each.value**power * factor + shift:.{digits}g}"
    if each.at_bound:
        return f"{value}, held at its bound"
    if each.standard_error is None or each.low is None or each.high is None:
        return f"{value}{unknown}"
    error = (
        f"{each.standard_error * factor:.2g}" if is_mean else f"a factor of {math.exp(each.standard_error * power):.4g}"
    )
    low, high = (end**power * factor + shift for end in (each.low, each.high))
    return f"{value}, standard error {error} (95 % interval {low:.{digits}g} to {high:.{digits}g})"


def check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInputError("--plot needs matplotlib, which is not installed: pip install matplotlib.")
    if path.suffix not in PICTURES:
        raise BadInputError(f"--plot {path} has to end in one of {', '.join(PICTURES)}.")


def save_plot(path: Path, name: str, y: Tensor, mean: Tensor, deviation: Tensor) -> None:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(mean, y, xerr=WIDTH * deviation, fmt="o", ms=3, lw=0.7, alpha=0.6)
    axes.axline((float(y.mean()), float(y.mean())), slope=1, color="0.3", lw=1)
    axes.set_xlabel(f"{name}, predicted with 95 % intervals")
    axes.set_ylabel(f"{name}, observed")
    figure.savefig(path)

"""Bias and noise of value and gradient: truncated conjugate gradients, random features, and their unbiased versions.

The setting of figure 1 of Potapczynski et al. 2021: the first rows of pol, inputs in [-1, 1], a squared exponential
kernel at fixed hyperparameters. Truths are exact (dense Cholesky factor, float64).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import ChosenData, app, console, finish
from benchmarks.datasets import rows_of
from benchmarks.models import SquaredExponentialRegression
from benchmarks.plots import plt, save_figure
from benchmarks.runner import Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from gpy_iterative.truncation import ExponentialTruncation

#: Of the paper's figure.
LENGTHSCALE, OUTPUTSCALE, NOISE = 0.366, 0.375, 0.0163
#: Frequencies between neighbours on the grid of a single sample.
FREQUENCY_STEP = 20
COLUMNS = ("log likelihood", "d log lengthscale", "d log outputscale", "d log noise")
MakeMll = Callable[[SquaredExponentialRegression], MarginalLogLikelihood]


@dataclass(frozen=True)
class Estimator:
    """An estimator of one family at one budget.

    Attributes:
        family: a line of the pictures.
        budget: expected steps, or frequencies of the base term.
        make: the likelihood of a model.
    """

    family: str
    budget: int
    make: MakeMll

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.family} ({self.budget})"


def _truncated(steps: int) -> MakeMll:
    return lambda m: gpi.mlls.TruncatedCGMarginalLogLikelihood(m.likelihood, m, num_steps=steps, generator=0)


def _roulette(steps: int) -> MakeMll:
    # Half of the budget for the steps that are always taken, at most a rate of .1.
    rate = max(0.1, 2 / steps)
    truncation = ExponentialTruncation(max(1, round(steps - 1 / math.expm1(rate))), rate)
    return lambda m: gpi.mlls.RussianRouletteMarginalLogLikelihood(m.likelihood, m, truncation=truncation, generator=0)


def _features(count: int) -> MakeMll:
    return lambda m: gpi.mlls.RFFMarginalLogLikelihood(m.likelihood, m, num_frequencies=count, generator=0)


def _single_sample(count: int) -> MakeMll:
    return lambda m: gpi.mlls.SingleSampleRFFMarginalLogLikelihood(
        m.likelihood, m, min_frequencies=count, frequency_step=FREQUENCY_STEP, probabilities="adaptive", generator=0
    )


ESTIMATORS = (
    *(Estimator("truncated CG", steps, _truncated(steps)) for steps in (5, 10, 20, 40)),
    *(Estimator("Russian roulette", steps, _roulette(steps)) for steps in (10, 20, 40)),
    *(Estimator("random features", count, _features(count)) for count in (50, 100, 200, 400)),
    *(Estimator("single sample", count, _single_sample(count)) for count in (50, 100, 200, 400)),
)


def figure_model(x: Tensor, y: Tensor) -> SquaredExponentialRegression:
    """The model of the figure."""
    model = SquaredExponentialRegression(x, y, ard=False, constant=False)
    model.covar_module.base_kernel.lengthscale = LENGTHSCALE
    model.covar_module.outputscale = OUTPUTSCALE
    model.likelihood.noise = NOISE
    return model


def figure_data(dataset: str, rows: int) -> tuple[Tensor, Tensor]:
    """The first rows; inputs in [-1, 1] (constant columns dropped) and targets standardised, over all rows; float64."""
    data = torch.as_tensor(rows_of(dataset), dtype=torch.float64)
    x, y = data[:, :-1], data[:, -1]
    low, high = x.amin(0), x.amax(0)
    varies = high > low
    x = (2 * (x - low)[:, varies] / (high - low)[varies]) - 1
    return x[:rows], ((y - y.mean()) / y.std())[:rows]


def value_and_gradient(model: SquaredExponentialRegression, mll: MarginalLogLikelihood) -> Tensor:
    """COLUMNS, not divided by n; gradients with respect to logarithms."""
    model.zero_grad()
    (x,) = model.train_inputs or ()
    value = mll(model(x), model.train_targets)
    value.backward()
    entries = [value.detach()]
    base, scaled, noise = model.covar_module.base_kernel, model.covar_module, model.likelihood.noise_covar
    for raw, natural, constraint in (
        (base.raw_lengthscale, base.lengthscale, base.raw_lengthscale_constraint),
        (scaled.raw_outputscale, scaled.outputscale, scaled.raw_outputscale_constraint),
        (noise.raw_noise, noise.noise, noise.raw_noise_constraint),
    ):
        point = raw.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(constraint.transform(point).sum(), point)
        entries.append((raw.grad / slope * natural.detach()).sum())
    return torch.stack(entries) * len(x)


def bias_table(
    x: Tensor, y: Tensor, draws: int, estimators: tuple[Estimator, ...]
) -> dict[str, dict[str, list[float]]]:
    """Estimator -> mean error and its standard error for each of COLUMNS; and the exact numbers."""
    model = figure_model(x, y)
    solver = gpi.solvers.Cholesky()
    truth = value_and_gradient(model, gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver))
    table = {"exact": {"mean": truth.tolist(), "sem": [0.0] * len(COLUMNS)}}
    for estimator in estimators:
        mll = estimator.make(model)
        samples = torch.stack([value_and_gradient(model, mll) for _ in range(draws)])
        table[estimator.name] = {
            "mean": (samples.mean(0) - truth).tolist(),
            "sem": (samples.std(0) / draws**0.5).tolist(),
        }
    return table


def table(outcome: Outcome, title: str) -> Table:
    """Bias ± standard error; the first row has the exact numbers."""
    rows = []
    for name, row in outcome["table"].items():
        cells = zip(row["mean"], row["sem"], strict=True)
        rows.append([name, *(f"{m:.2f}" if name == "exact" else f"{m:+.2f} ± {s:.2f}" for m, s in cells)])
    return Table(f"{title}; exact numbers in the first row", ["bias ± standard error", *COLUMNS], rows)


def draw_pictures(outcome: Outcome, folder: Path) -> list[Path]:
    """Two pictures: the bias against the budget, and the unbiased means with a band of two standard errors."""
    table = outcome["table"]
    biased = (("truncated CG", "steps"), ("random features", "frequencies"))
    unbiased = (("Russian roulette", "expected steps"), ("single sample", "frequencies of the base term"))
    paths = []
    for name, families in (("truncation_bias", biased), ("truncation_unbiased", unbiased)):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
        for axis, (family, label) in zip(axes, families, strict=True):
            members = [e for e in ESTIMATORS if e.family == family and e.name in table]
            budgets = [c.budget for c in members]
            for index, column in enumerate(COLUMNS):
                mean = torch.tensor([table[c.name]["mean"][index] for c in members])
                sem = torch.tensor([table[c.name]["sem"][index] for c in members])
                (line,) = axis.plot(budgets, mean, marker="o", label=column)
                axis.fill_between(budgets, mean - 2 * sem, mean + 2 * sem, alpha=0.25, color=line.get_color())
            axis.axhline(0, color="black", linewidth=0.8)
            axis.set_title(family)
            axis.set_xlabel(label)
            if name == "truncation_bias":
                axis.set_yscale("symlog", linthresh=1)
        axes[0].set_ylabel("error of the mean" if name == "truncation_unbiased" else "bias")
        axes[0].legend(fontsize=7)
        paths.append(save_figure(figure, folder / f"{name}.svg"))
    return paths


@contender("bias", "all")
def measure(*, dataset: str, rows: int, draws: int) -> Outcome:
    """Every estimator, whose grid of frequencies the rows can bear."""
    x, y = figure_data(dataset, rows)
    # The grid of a single sample ends at half of the data.
    chosen = (e for e in ESTIMATORS if e.family != "single sample" or e.budget + FREQUENCY_STEP <= len(y) // 2)
    return {"columns": COLUMNS, "table": bias_table(x, y, draws, tuple(chosen))}


@app.command()
def bias(
    dataset: ChosenData = "pol",
    rows: Annotated[int, typer.Option(min=1, help="First rows of the data.")] = 1000,
    draws: Annotated[int, typer.Option(help="Independent estimates of each estimator.")] = 200,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the two pictures of the documentation.")] = None,
) -> None:
    """Bias of value and gradient: truncated CG, Russian roulette, random features, single sample."""
    outcome = measure(dataset=dataset, rows=rows, draws=draws)
    console.print(table(outcome, f"{dataset}, first {rows} rows, {draws} draws").for_terminal())
    if pictures is not None:
        for path in draw_pictures(outcome, pictures):
            console.print(f"drew {path}")
    options = {"dataset": dataset, "rows": rows, "draws": draws}
    finish(f"bias_{dataset}", options, torch.get_num_threads(), **outcome)


SIZES = {Preset.SMOKE: (300, 2), Preset.QUICK: (1000, 40), Preset.PAPER: (1000, 10_000)}


def preset_runs(preset: Preset) -> list[Run]:
    """All estimators in one process."""
    rows, draws = SIZES[preset]
    return [Run("bias", "all", {"dataset": "pol", "rows": rows, "draws": draws})]


def _tables(found: Sequence[Measured]) -> list[Table]:
    return [
        table(measured.outcome, "pol, first {rows} rows, {draws} draws".format(**measured.run.options))
        for measured in found
    ]


register(
    Case(
        "bias",
        "Bias of value and gradient, the setting of figure 1 of Potapczynski et al. 2021.",
        preset_runs,
        _tables,
        lambda found, folder: draw_pictures(found[0].outcome, folder),
        shows_tables=False,
    )
)

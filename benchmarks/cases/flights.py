"""A third of a million flights on a small machine: an exact Gaussian process on a budget, beside inducing points.

Hyperparameters start at averages over fits to neighbourhoods; the steps are in `benchmarks.budgeted_training`. The rival
has the same kernel and the same wall-clock time.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import typer
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.budgeted_training import Options, fit, solver_of, train
from benchmarks.checkpoints import Checkpoint
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, run_and_show
from benchmarks.datasets import Split, load_flights
from benchmarks.metrics import prediction_scores
from benchmarks.models import matern_kernel
from benchmarks.runner import RESULTS, Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.training import posterior_scores, timed_scores
from benchmarks.variational import VariationalGP, VariationalTraining, cluster_centres

CASE = "flights"
FIT = "gpi.fit"
#: Steps of a fit at the most.
FIT_STEPS = 4
#: Where every step is saved.
FOLDER = Path("out") / "flights"
#: The mean's solve may take so many times the budget of a training step: it has one column only.
PREDICTION_BUDGETS = 2
#: The share of the training rows that the rival's rates are compared on, and of its time that each rate gets for it.
VALIDATION_SHARE, SEARCH_SHARE = 0.1, 0.1


@dataclass(frozen=True)
class RivalOptions:
    """Inducing points, and the rates of which the best is taken."""

    num_inducing: int = 1000
    rates: Sequence[float] = (0.003, 0.01, 0.03)


@contender(CASE, "ours")
def ours(*, folder: str, keep_steps: bool, **given: Any) -> Outcome:
    """Start, training and predictions; each step is saved in the folder, and printed there in ours.log.

    The steps are removed in the end unless they are kept: for more of them, or for other predictions.
    """
    options, checkpoint = Options(**given), Checkpoint(Path(folder) / "ours.pt")
    data = load_flights(rows=options.rows)
    training = train(data, checkpoint, options)
    outcome = tested(training.mll, training.seconds, data, options)
    if not keep_steps:
        checkpoint.remove()
    return outcome | {"steps": training.steps}


@contender(CASE, FIT)
def fitted(*, folder: str, keep_steps: bool, **given: Any) -> Outcome:
    """The same by `gpi.fit`, from the same start; `steps` is the most that it takes. Its rows are printed in fit.log."""
    options, place = Options(**given), Path(folder)
    data = load_flights(rows=options.rows)
    mll, seconds, result = fit(data, place, options)
    outcome = tested(mll, seconds, data, options)
    if not keep_steps:
        for name in ("start.pt", "fit.pt"):
            Checkpoint(place / name).remove()
    return outcome | {"status": result.status.name, "history": [asdict(row) for row in result.history]}


def tested(mll: gpi.mlls.HutchinsonMarginalLogLikelihood, seconds: float, data: Split, options: Options) -> Outcome:
    """Scores of predictions on the budget, after so many seconds of training."""
    start = time.perf_counter()
    posterior = mll.posterior(
        solver=replace(solver_of(options), max_epochs=PREDICTION_BUDGETS * options.max_epochs), rank=options.rank
    )
    rmse, log_likelihood = posterior_scores(mll.model, posterior, data)
    solves = posterior.solves
    predicted = time.perf_counter() - start
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds": seconds + predicted,
        "seconds_prediction": predicted,
        "prediction": {"status": solves.status.name, "epochs": solves.stats.epochs}
        | {"residual_targets": solves.stats.residual_norms["targets"]},
        "target_scale": data.target_scale,
        "training_rows": len(data.train_y),
    }


def train_rival(
    x: Tensor, y: Tensor, *, num_inducing: int, rate: float, seconds: float
) -> tuple[VariationalTraining, int]:
    """SVGP after so many seconds, in which its inducing points are found too, and how many batches that were."""
    start = time.perf_counter()
    model = VariationalGP(cluster_centres(x, num_inducing), gpytorch.means.ZeroMean(), matern_kernel(x))
    training = VariationalTraining(model, gpytorch.likelihoods.GaussianLikelihood(), x, y, rate=rate)
    return training, training.train_for(seconds - (time.perf_counter() - start))


def rate_scores(
    x: Tensor, y: Tensor, *, num_inducing: int, rates: Sequence[float], seconds: float
) -> dict[float, float]:
    """The log-likelihood on held-out training rows after a part of the time, rate by rate."""
    held_out = round(VALIDATION_SHARE * len(y))  # rows are in random order
    found = {}
    for rate in rates:
        training, _ = train_rival(
            x[held_out:], y[held_out:], num_inducing=num_inducing, rate=rate, seconds=SEARCH_SHARE * seconds
        )
        _, found[rate] = prediction_scores(training.predict, x[:held_out], y[:held_out])
    return found


@contender(CASE, "SVGP")
def rival(*, rows: int | None, seconds: float, **options: Any) -> Outcome:
    """All training rows and all of the time."""
    data = load_flights(rows=rows)
    outcome = best_rival(data, RivalOptions(**options), seconds)
    together = outcome["seconds"] + outcome["seconds_prediction"]
    return outcome | {
        "seconds": together,
        "target_scale": data.target_scale,
        "training_rows": len(data.train_y),
    }


def best_rival(data: Split, options: RivalOptions, seconds: float) -> Outcome:
    """SVGP for so many seconds at the rate that is best on held-out training rows; finding that is not counted."""
    x, y, num_inducing = data.train_x, data.train_y, options.num_inducing
    scores = rate_scores(x, y, num_inducing=num_inducing, rates=options.rates, seconds=seconds)
    best = max(scores, key=lambda rate: scores[rate])
    start = time.perf_counter()
    training, batches = train_rival(x, y, num_inducing=num_inducing, rate=best, seconds=seconds)
    found = timed_scores(start, lambda: prediction_scores(training.predict, data.test_x, data.test_y))
    return found | {
        "batches": batches,
        "passes": batches * training.batch_size / len(data.train_y),
        "rate": best,
        "rate_scores": {str(rate): score for rate, score in scores.items()},
        "noise": float(training.likelihood.noise.detach()),
    }


def planned_runs(
    options: Options, of_rival: RivalOptions, folder: Path, *, fit_steps: int = FIT_STEPS, keep_steps: bool
) -> list[Run]:
    """Ours by Adam and by `gpi.fit`, and SVGP with the time of the first. Each number of rows has a folder of its own."""
    piece = {"folder": str(steps_folder(folder, options.rows)), "keep_steps": keep_steps}
    first = Run(CASE, "ours", asdict(options), piece=piece)
    of_fit = Run(CASE, FIT, asdict(replace(options, steps=fit_steps)), piece=piece)
    return [first, of_fit, Run(CASE, "SVGP", {"rows": options.rows, **asdict(of_rival)}, same_time_as=first)]


def steps_folder(folder: Path, rows: int | None) -> Path:
    """Where the steps with so many rows are."""
    return folder / ("flights" if rows is None else f"flights_{rows}")


@app.command()
def flights(
    rows: Annotated[int | None, typer.Option(help="First training rows only; all 294,612 by default.")] = Options.rows,
    steps: Annotated[int, typer.Option(help="Of Adam, after the start.")] = Options.steps,
    max_epochs: Annotated[float, typer.Option(help="Of a step's solve.")] = Options.max_epochs,
    block_size: Annotated[int, typer.Option(help="Rows of a projection.")] = Options.block_size,
    num_probes: int = Options.num_probes,
    rate: float = Options.rate,
    subset_size: Annotated[int, typer.Option(help="Rows of a neighbourhood of the start.")] = Options.subset_size,
    num_subsets: int = Options.num_subsets,
    rank: Annotated[int, typer.Option(help="Of the predictive variances.")] = Options.rank,
    fit_steps: Annotated[int, typer.Option(help="Of gpi.fit at the most, after the start.")] = FIT_STEPS,
    compiled: Annotated[
        bool, typer.Option(help="Compile the tiles' arithmetic; needs a C++ compiler.")
    ] = Options.compiled,
    num_inducing: Annotated[int, typer.Option(help="Of the rival.")] = RivalOptions.num_inducing,
    rates: Annotated[list[float] | None, typer.Option(help="Of the rival; 0.003, 0.01 and 0.03 by default.")] = None,
    folder: Annotated[Path, typer.Option(help="Where every step is saved.")] = FOLDER,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Arrival delays of a third of a million flights, beside SVGP; hours. Goes on where it was interrupted."""
    options = Options(
        rows=rows,
        steps=steps,
        max_epochs=max_epochs,
        block_size=block_size,
        num_probes=num_probes,
        rate=rate,
        subset_size=subset_size,
        num_subsets=num_subsets,
        rank=rank,
        compiled=compiled,
    )
    of_rival = RivalOptions(num_inducing, tuple(rates) if rates else RivalOptions.rates)
    console.print(f"every step of ours is saved in {steps_folder(folder, rows)}, and printed in its ours.log")
    runs = planned_runs(options, of_rival, folder, fit_steps=fit_steps, keep_steps=True)
    run_and_show(RESULTS / "flights.json", runs, threads, tables)


def tables(found: Sequence[Measured]) -> list[Table]:
    """The predictions, the steps of ours, and those of its fit."""
    steps = [step_table(measured.outcome["steps"]) for measured in found if measured.run.contender == "ours"]
    history = [history_table(measured.outcome) for measured in found if measured.run.contender == FIT]
    return [prediction_table(found), *steps, *history] if found else []


def prediction_table(found: Sequence[Measured]) -> Table:
    """What the contenders predict, and what that took."""
    rows = []
    for measured in found:
        o = measured.outcome
        # A run that was interrupted had several processes.
        peak = max([o["peak_memory_mb"], *(step["peak_memory_mb"] for step in o.get("steps", ()))])
        rows.append(
            [
                measured.run.contender,
                f"{o['rmse']:.4f}",
                f"{o['rmse'] * o['target_scale']:.2f}",
                f"{o['log_likelihood']:.4f}",
                f"{o['seconds']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                f"{peak:.0f}",
            ]
        )
    return Table(
        f"{found[0].outcome['training_rows']:,} flights; RMSE also in minutes, log-likelihood of standardised delays",
        ["contender", "RMSE", "minutes", "log-likelihood", "s", "of it predictions", "MB"],
        rows,
    )


def step_table(steps: list[dict[str, Any]]) -> Table:
    """How every step ended; the start has no report."""
    columns = ["step", "s", "MB", "status", "epochs", "targets", "probes", "mll", "error"]
    rows = []
    for number, o in enumerate(steps):
        figures = [""] * 6
        if number:
            figures = [
                o["status"].lower().replace("_", " "),
                f"{o['epochs']:.2f}",
                f"{o['residual_targets']:.3f}",
                f"{o['residual_probes']:.3f}",
                f"{o['value']:.4f}",
                f"{o['value_sem']:.1g}",
            ]
        rows.append([str(number), f"{o['seconds']:.0f}", f"{o['peak_memory_mb']:.0f}", *figures])
    return Table(
        "Steps of ours, 0 is the start; residuals of targets and probes, the value and its error", columns, rows
    )


def history_table(outcome: Outcome) -> Table:
    """What `gpi.fit` said after every step; 0 is after the start."""
    rows = [
        [
            str(row["step"]),
            f"{row['seconds']:.0f}",
            f"{row['epochs']:.2f}",
            f"{row['value']:.4f}",
            f"{row['value_sem']:.1g}",
            f"{row['left_to_gain']:.3g}",
            f"{row['noise']:.2g}",
        ]
        for row in outcome["history"]
    ]
    columns = ["step", "s", "epochs", "mll", "error", "nats left to gain", "noise of that"]
    return Table(f"Steps of gpi.fit, which ended {outcome['status']}", columns, rows)


#: What the presets train with.
SIZES: dict[Preset, list[tuple[Options, RivalOptions]]] = {
    Preset.SMOKE: [
        (
            Options(rows=400, steps=2, block_size=64, num_probes=4, subset_size=100, num_subsets=1, rank=20),
            RivalOptions(num_inducing=20, rates=(0.01, 0.03)),
        )
    ],
    Preset.QUICK: [],
    Preset.PAPER: [(Options(), RivalOptions())],
}


def preset_runs(preset: Preset) -> list[Run]:
    """Ours, by both ways, and its rival on a few hundred flights, or on all."""
    return [run for sizes in SIZES[preset] for run in planned_runs(*sizes, FOLDER / preset.value, keep_steps=False)]


register(
    Case(
        CASE,
        "A third of a million flights' delays on a budget of epochs, beside SVGP with equal time.",
        preset_runs,
        tables,
    )
)

"""A third of a million flights on a small machine: an exact Gaussian process on a budget, beside inducing points.

Ours is one call of `gpi.fit` with a budget of steps, from hyperparameters of subsets. The rival has the same kernel and the
same wall-clock time.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import typer
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, run_and_show
from benchmarks.datasets import Split, load_flights
from benchmarks.metrics import prediction_scores
from benchmarks.models import MaternRegression, matern_kernel
from benchmarks.runner import RESULTS, Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.training import posterior_scores, timed_scores
from benchmarks.variational import VariationalGP, VariationalTraining, cluster_centres

CASE, OURS = "flights", "gpi.fit"
#: Where every step is saved.
FOLDER = Path("out") / "flights"
#: Options that saved steps do not depend on.
NOT_OF_TRAINING = ("steps", "rank")
#: The share of the training rows that the rival's rates are compared on, and of its time that each rate gets for it.
VALIDATION_SHARE, SEARCH_SHARE = 0.1, 0.1


@dataclass(frozen=True)
class Options:
    """The budget of ours; the command's help says what each is. By default the paper preset's."""

    rows: int | None = None
    steps: int = 2
    num_probes: int = 8
    rank: int = 64


@dataclass(frozen=True)
class RivalOptions:
    """Inducing points, and the rates of which the best is taken."""

    num_inducing: int = 1000
    rates: Sequence[float] = (0.003, 0.01, 0.03)


@contender(CASE, OURS)
def ours(*, folder: str, keep_steps: bool, **given: Any) -> Outcome:
    """Start, steps and predictions; every step is saved in the folder, and printed there in fit.log.

    The steps are removed in the end unless they are kept: for more of them, or for other predictions. Raises ValueError
    for a folder with steps of other options.
    """
    options, checkpoint = Options(**given), Path(folder) / "fit.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    budget = checkpoint.with_name("options.json")
    check_options(budget, options)
    data = load_flights(rows=options.rows)
    model = MaternRegression(data)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, num_probes=options.num_probes, generator=0)
    with (checkpoint.parent / "fit.log").open("a") as log:
        result = gpi.fit(
            mll,
            start="subsets",
            max_steps=options.steps,
            checkpoint=checkpoint,
            progress=False,
            callback=lambda row: print(row, file=log, flush=True),
        )
    start = time.perf_counter()
    posterior = mll.posterior(rank=options.rank)
    rmse, log_likelihood = posterior_scores(model, posterior, data)
    predicted = time.perf_counter() - start
    if not keep_steps:
        checkpoint.unlink()
        budget.unlink()
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds": result.seconds + predicted,
        "seconds_prediction": predicted,
        "prediction": asdict(posterior.report) | {"status": posterior.report.status.name},
        "target_scale": data.target_scale,
        "training_rows": len(data.train_y),
        "status": result.status.name,
        "history": [asdict(row) for row in result.history],
    }


def check_options(path: Path, options: Options) -> None:
    """Keeps the options of saved steps; raises ValueError where there are steps of others, which may have taken hours.

    A checkpoint of `gpi.fit` does not know them: another budget may go on from it.
    """
    own = {name: value for name, value in asdict(options).items() if name not in NOT_OF_TRAINING}
    found = json.loads(path.read_text()) if path.exists() else own
    different = [name for name, value in own.items() if value != found[name]]
    if different:
        raise ValueError(
            f"{path.parent} is of a run with another {', '.join(different)}: remove it, or name another folder."
        )
    path.write_text(json.dumps(own))


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


def planned_runs(options: Options, of_rival: RivalOptions, folder: Path, *, keep_steps: bool) -> list[Run]:
    """Ours, and SVGP with its time. Each number of rows has a folder of its own."""
    piece = {"folder": str(steps_folder(folder, options.rows)), "keep_steps": keep_steps}
    first = Run(CASE, OURS, asdict(options), piece=piece)
    return [first, Run(CASE, "SVGP", {"rows": options.rows, **asdict(of_rival)}, same_time_as=first)]


def steps_folder(folder: Path, rows: int | None) -> Path:
    """Where the steps with so many rows are."""
    return folder / ("flights" if rows is None else f"flights_{rows}")


@app.command()
def flights(
    rows: Annotated[
        int | None, typer.Option(min=1, help="First training rows only; all 294,612 by default.")
    ] = Options.rows,
    steps: Annotated[int, typer.Option(help="After the start.")] = Options.steps,
    num_probes: int = Options.num_probes,
    rank: Annotated[int, typer.Option(help="Of the predictive variances.")] = Options.rank,
    num_inducing: Annotated[int, typer.Option(help="Of the rival.")] = RivalOptions.num_inducing,
    rates: Annotated[list[float] | None, typer.Option(help="Of the rival; 0.003, 0.01 and 0.03 by default.")] = None,
    folder: Annotated[Path, typer.Option(help="Where every step is saved.")] = FOLDER,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Arrival delays of a third of a million flights, beside SVGP; an hour. Goes on where it was interrupted."""
    options = Options(
        rows=rows,
        steps=steps,
        num_probes=num_probes,
        rank=rank,
    )
    of_rival = RivalOptions(num_inducing, tuple(rates) if rates else RivalOptions.rates)
    console.print(f"every step of ours is saved in {steps_folder(folder, rows)}, and printed in its fit.log")
    runs = planned_runs(options, of_rival, folder, keep_steps=True)
    run_and_show(RESULTS / "flights.json", runs, threads, tables)


def tables(found: Sequence[Measured]) -> list[Table]:
    """The predictions, and the steps of ours."""
    history = [history_table(measured.outcome) for measured in found if measured.run.contender == OURS]
    return [prediction_table(found), *history] if found else []


def prediction_table(found: Sequence[Measured]) -> Table:
    """What the contenders predict, and what that took."""
    rows = []
    for measured in found:
        o = measured.outcome
        rows.append(
            [
                measured.run.contender,
                f"{o['rmse']:.4f}",
                f"{o['rmse'] * o['target_scale']:.2f}",
                f"{o['log_likelihood']:.4f}",
                f"{o['seconds']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                f"{o['peak_memory_mb']:.0f}",
            ]
        )
    return Table(
        f"{found[0].outcome['training_rows']:,} flights; RMSE also in minutes, log-likelihood of standardised delays",
        ["contender", "RMSE", "minutes", "log-likelihood", "s", "of it predictions", "MB"],
        rows,
    )


def history_table(outcome: Outcome) -> Table:
    """What `gpi.fit` said of every step; the first has the start's time."""
    rows = [
        [
            str(row["step"]),
            f"{row['seconds']:.0f}",
            f"{row['epochs']:.2f}",
            f"{row['value']:.4f}",
            f"{row['value_sem']:.1g}",
        ]
        for row in outcome["history"]
    ]
    return Table(f"Steps of ours, which ended {outcome['status']}", ["step", "s", "epochs", "mll", "error"], rows)


#: What the presets train with.
SIZES: dict[Preset, list[tuple[Options, RivalOptions]]] = {
    Preset.SMOKE: [
        (
            Options(rows=400, steps=2, num_probes=4, rank=20),
            RivalOptions(num_inducing=20, rates=(0.01, 0.03)),
        )
    ],
    Preset.QUICK: [],
    Preset.PAPER: [(Options(), RivalOptions())],
}


def preset_runs(preset: Preset) -> list[Run]:
    """Ours and its rival on a few hundred flights, or on all."""
    return [run for sizes in SIZES[preset] for run in planned_runs(*sizes, FOLDER / preset.value, keep_steps=False)]


register(
    Case(
        CASE,
        "A third of a million flights' delays on a budget of steps, beside SVGP with equal time.",
        preset_runs,
        tables,
    )
)

"""What a trained model predicts: RMSE and log-likelihood on the held-out rows, after Adam's steps and at the optimum."""

from functools import partial
from typing import Annotated

import typer

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    ChosenDevice,
    FirstRows,
    Threads,
    app,
    finish,
    names_of,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import Split, load
from benchmarks.devices import Device
from benchmarks.runner import Outcome, contender
from benchmarks.training import MakeMll, Train, by_adam, by_fit, train_and_test

ADAM, FIT = "Adam", "gpi.fit"
#: Before the way of training in the names of contenders.
PATHWISE = "pathwise, "
COLUMNS = ["split", "ended", "steps", "RMSE", "published", "log-likelihood", "published", "s training", "s prediction"]
COLUMNS += ["variance error"]


def stepped(
    make: MakeMll,
    *,
    dataset: str,
    split: int,
    rows: int | None,
    scales: bool,
    steps: int,
    rate: float,
    device: str = "cpu",
) -> Outcome:
    """Scores after so many steps of Adam from the papers' start."""
    data = load(dataset, split, rows=rows).to(device)
    return _tested(data, partial(by_adam, data=data, steps=steps, rate=rate), make, scales)


def fitted(make: MakeMll, *, dataset: str, split: int, rows: int | None, scales: bool, device: str = "cpu") -> Outcome:
    """Scores at the optimum, from the same start."""
    return _tested(load(dataset, split, rows=rows).to(device), by_fit, make, scales)


def _tested(data: Split, train: Train, make: MakeMll, scales: bool) -> Outcome:
    """Scores, and the error of the predictive variances."""
    outcome, posterior = train_and_test(data, train, make=make, scales=scales)
    return outcome | {"variance_error": posterior.variance_error(data.test_x).median}


_pathwise = partial(gpi.mlls.PathwiseMarginalLogLikelihood, num_probes=64, num_frequencies=1000)
contender("quality", ADAM)(partial(stepped, gpi.mlls.HutchinsonMarginalLogLikelihood))
contender("quality", FIT)(partial(fitted, gpi.mlls.HutchinsonMarginalLogLikelihood))
contender("quality", PATHWISE + ADAM)(partial(stepped, _pathwise))
contender("quality", PATHWISE + FIT)(partial(fitted, _pathwise))


@app.command()
def quality(
    dataset: ChosenData = "elevators",
    splits: int = 1,
    rows: FirstRows = None,
    steps: Annotated[int, typer.Option(help="Of Adam.")] = 100,
    rate: Annotated[float, typer.Option(help="Of Adam.")] = 0.1,
    only: Annotated[list[str] | None, names_of((ADAM, FIT), f"One of {ADAM} and {FIT}; both by default.")] = None,
    pathwise: Annotated[
        bool, typer.Option("--pathwise", help="Pathwise probes, saved under a name of their own.")
    ] = False,
    scales: Annotated[
        bool, typer.Option("--scales", help="The parameters are the scales of signal and noise, as in the paper.")
    ] = False,
    device: ChosenDevice = Device.CPU,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and log-likelihood after training, split by split, beside the published means of exact gradients."""
    of_adam = {"steps": steps, "rate": rate}
    outcomes: dict[str, Outcome] = {}
    for split in range(splits):
        options = {"dataset": dataset, "split": split, "rows": rows, "scales": scales, "device": device.value}
        for way in only or (ADAM, FIT):
            name = PATHWISE + way if pathwise else way
            given = options | of_adam if way == ADAM else options
            outcomes[f"{split}, {way}"] = run_contenders("quality", [name], threads=threads, **given)[name]
    theirs = published.LIN.get(dataset, {}).get("CG", {}).get("standard, cold")
    show(
        f"{dataset}; published: 100 steps of Adam",
        COLUMNS,
        [
            [
                name,
                o["status"],
                str(o["steps"]),
                f"{o['rmse']:.4f}",
                f"{theirs.rmse:.4f}" if theirs else "",
                f"{o['log_likelihood']:.4f}",
                f"{theirs.log_likelihood:.4f}" if theirs else "",
                f"{o['seconds']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                f"{o['variance_error']:.3f}",
            ]
            for name, o in succeeded_or_exit(outcomes).items()
        ],
    )
    file = f"quality_pathwise_{dataset}" if pathwise else f"quality_{dataset}"
    finish(file, of_adam | {"rows": rows, "scales": scales}, threads, device=device, outcomes=outcomes)

"""Training to the optimum by `gpi.fit`, beside a number of steps of Adam."""

from functools import partial
from typing import Literal

from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    ChosenSplit,
    FirstRows,
    Threads,
    app,
    finish,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import load
from benchmarks.runner import Outcome, contender
from benchmarks.training import by_adam, by_fit, train_and_test

FIT, ADAM = "gpi.fit", "Adam"


@contender("fit", FIT)
def fitted(*, dataset: str, split: int, rows: int | None, start: Literal["current", "subsets"]) -> Outcome:
    """The history of the fit, how it ended, and scores on the test rows."""
    outcome, _ = train_and_test(load(dataset, split, rows=rows), partial(by_fit, start=start))
    return outcome


@contender("fit", ADAM)
def stepped(*, dataset: str, split: int, rows: int | None, steps: int) -> Outcome:
    """The same of so many steps at a rate of .1, from the hyperparameters as they are."""
    data = load(dataset, split, rows=rows)
    outcome, _ = train_and_test(data, partial(by_adam, data=data, steps=steps))
    return outcome


@app.command()
def fit(
    dataset: ChosenData = "elevators",
    split: ChosenSplit = 0,
    rows: FirstRows = None,
    start: Literal["current", "subsets"] = "current",
    steps: int = 100,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Time, value and predictions of a fit to the optimum, and of so many steps of Adam; `--start subsets` for the fit."""
    options = {"dataset": dataset, "split": split, "rows": rows}
    outcomes = run_contenders("fit", [FIT], threads=threads, **options, start=start)
    outcomes |= run_contenders("fit", [ADAM], threads=threads, **options, steps=steps)
    show(
        f"{dataset}: value is the log marginal likelihood a datum",
        ["", "ended", "steps", "s training", "s prediction", "epochs", "value", "RMSE", "log-likelihood"],
        [
            [
                name,
                o["status"],
                str(o["steps"]),
                f"{o['seconds']:.1f}",
                f"{o['seconds_prediction']:.1f}",
                f"{o['epochs']:.0f}",
                f"{o['values'][-1]:.4f} ± {o['value_sems'][-1]:.4f}",
                f"{o['rmse']:.4f}",
                f"{o['log_likelihood']:.4f}",
            ]
            for name, o in succeeded_or_exit(outcomes).items()
        ],
    )
    file = f"fit_{dataset}" if start == "current" else f"fit_{start}_{dataset}"
    finish(file, options | {"start": start, "steps": steps}, threads, outcomes=outcomes)

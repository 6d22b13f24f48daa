"""Training to the optimum by `gpi.fit`, beside a number of steps of Adam."""

import time

import torch

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, finish, run_contenders, show, succeeded_or_exit
from benchmarks.datasets import load
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.training import posterior_scores, take_step

CONTENDERS = ["average information", "Adam"]


@contender("fit", "average information")
def train_to_the_optimum(*, dataset: str, split: int, rows: int | None, start: str, steps: int) -> Outcome:
    """The history of the fit (values a datum, seconds since the start), how it ended, and scores on the test rows."""
    data = load(dataset, split, rows=rows)
    model = MaternRegression(data)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    before = time.perf_counter()
    found = gpi.fit(mll, start=start, progress=False)  # pyright: ignore[reportArgumentType]
    seconds = time.perf_counter() - before
    rmse, log_likelihood = posterior_scores(model, mll.posterior(), data)
    return {
        "status": found.status.name,
        "steps": found.steps,
        "seconds": seconds,
        "values": [row.value for row in found.history],
        "value_sems": [row.value_sem for row in found.history],
        "left_to_gain": [row.left_to_gain for row in found.history],
        "epochs": sum(row.epochs or 0.0 for row in found.history),
        "rmse": rmse,
        "log_likelihood": log_likelihood,
    }


@contender("fit", "Adam")
def train_by_adam(*, dataset: str, split: int, rows: int | None, start: str, steps: int) -> Outcome:
    """The same of so many steps at a rate of .1, from the hyperparameters as they are."""
    data = load(dataset, split, rows=rows)
    model = MaternRegression(data)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before, values, sems, epochs = time.perf_counter(), [], [], 0.0
    for _ in range(steps):
        values.append(-take_step(model, mll, optimizer, data))
        sems.append(mll.report.value_sem.item())
        epochs += mll.report.epochs
    seconds = time.perf_counter() - before
    rmse, log_likelihood = posterior_scores(model, mll.posterior(), data)
    return {
        "status": "",
        "steps": steps,
        "seconds": seconds,
        "values": values,
        "value_sems": sems,
        "epochs": epochs,
        "rmse": rmse,
        "log_likelihood": log_likelihood,
    }


@app.command()
def fit(
    dataset: str = "elevators",
    split: int = 0,
    rows: int | None = None,
    start: str = "current",
    steps: int = 100,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Time, value and predictions of a fit to the optimum, and of so many steps of Adam; `--start subsets` for the fit."""
    options = {"dataset": dataset, "split": split, "rows": rows, "start": start, "steps": steps}
    outcomes = succeeded_or_exit(run_contenders("fit", CONTENDERS, threads=threads, **options))
    show(
        f"{dataset}: value is the log marginal likelihood a datum",
        ["", "ended", "steps", "seconds", "epochs", "value", "RMSE", "log-likelihood"],
        [
            [
                name,
                o["status"],
                str(o["steps"]),
                f"{o['seconds']:.1f}",
                f"{o['epochs']:.0f}",
                f"{o['values'][-1]:.4f} ± {o['value_sems'][-1]:.4f}",
                f"{o['rmse']:.4f}",
                f"{o['log_likelihood']:.4f}",
            ]
            for name, o in outcomes.items()
        ],
    )
    finish(f"fit_{dataset}" if start == "current" else f"fit_{start}_{dataset}", options, threads, outcomes=outcomes)

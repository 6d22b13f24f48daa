"""The paper's effect: epochs of alternating projections with pathwise probes and warm starts, and without.

Lin et al. 2024, tables 1 to 6: standard probes are Gaussian with identity covariance; the stopping rule is the mean.
"""

from typing import Annotated

import torch
import typer

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, finish, run_contenders, show
from benchmarks.datasets import load
from benchmarks.models import MaternRegression
from benchmarks.runner import CONTENDERS, Outcome, contender


def _run(
    pathwise: bool, warm: bool, *, dataset: str, rows: int, steps: int, block_size: int, max_epochs: int
) -> Outcome:
    data = load(dataset, rows=rows)
    model = MaternRegression(data)
    solver = gpi.solvers.AlternatingProjections(
        tolerance=0.01, probe_tolerance=0.01, block_size=block_size, stopping="mean", max_epochs=max_epochs, finish=None
    )
    common = {"num_probes": 64, "solver": solver, "warm_start": "previous" if warm else False, "generator": 0}
    if pathwise:
        mll = gpi.mlls.PathwiseMarginalLogLikelihood(model.likelihood, model, corrected=False, **common)
    else:
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, probes="gaussian", **common)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    epochs, statuses = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(model(data.train_x), data.train_y)).backward()
        optimizer.step()
        assert mll.report is not None
        epochs.append(mll.report.epochs)
        statuses.append(mll.report.status.name)
    return {"epochs": epochs, "total": sum(epochs), "statuses": statuses}


@contender("epochs", "standard, cold")
def standard_cold(**options: int) -> Outcome:
    """Gaussian probes, zero start."""
    return _run(False, False, **options)


@contender("epochs", "standard, warm")
def standard_warm(**options: int) -> Outcome:
    """Gaussian probes, previous solutions."""
    return _run(False, True, **options)


@contender("epochs", "pathwise, cold")
def pathwise_cold(**options: int) -> Outcome:
    """Prior samples, zero start."""
    return _run(True, False, **options)


@contender("epochs", "pathwise, warm")
def pathwise_warm(**options: int) -> Outcome:
    """Prior samples, previous solutions."""
    return _run(True, True, **options)


@app.command()
def epochs(
    dataset: str = "pol",
    rows: int = 6000,
    steps: int = 30,
    block_size: int = 512,
    max_epochs: int = 1000,
    only: Annotated[list[str] | None, typer.Option(help="Contenders, by name, beside 'standard, cold'.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Epochs of alternating projections: pathwise or standard probes, warm or cold."""
    options = {"dataset": dataset, "rows": rows, "steps": steps, "block_size": block_size, "max_epochs": max_epochs}
    names = [name for name in CONTENDERS["epochs"] if name == "standard, cold" or only is None or name in only]
    outcomes = run_contenders("epochs", names, threads=threads, **options)
    reference = outcomes["standard, cold"]["total"]
    show(
        f"{dataset}, {rows} rows, {steps} steps, blocks of {block_size}",
        ["probes, start", "epochs", "fewer by"],
        [[name, f"{o['total']:.0f}", f"{reference / o['total']:.1f}"] for name, o in outcomes.items()],
    )
    finish(f"epochs_{dataset}", options, threads, outcomes=outcomes)

"""Laplace's method for many points and classes: products, time and memory of the mode, with and without preconditioner.

The Gaussian mixture with ten classes in three dimensions, one Matern-3/2 kernel for all classes at hyperparameters that
were learned from 5,000 of its points.
"""

import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

import gpy_iterative as gpi
from benchmarks.cases.laplace_classification import NUM_SAMPLES, LaplaceClassifier
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, exit_if_missing
from benchmarks.datasets import gaussian_mixture
from benchmarks.metrics import classification_scores
from benchmarks.runner import RESULTS, Outcome, contender
from benchmarks.runs import Run, SavedRuns
from benchmarks.tables import Table
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.solvers import SolveStatus

CASE = "laplace-size"
LENGTHSCALE, OUTPUTSCALE = 0.94, 11.5


@contender(CASE, "ours")
def find_mode(
    *, rows: int, rank: int, max_rank: int, covariance_actions: int, max_outer: int, refinements: int
) -> Outcome:
    """The mode, refined or not, and what it predicts by itself and averaged over samples; rank 0 is no preconditioner."""
    data = gaussian_mixture(rows)
    solver = gpi.solvers.LaplaceNewton(
        max_rank=max_rank,
        max_outer=max_outer,
        num_covariance_actions=covariance_actions,
        preconditioner=gpi.preconditioners.RandomlyPivotedCholesky(rank=rank) if rank else None,
    )
    model = LaplaceClassifier(
        data.train_x, data.train_y, data.num_classes, LENGTHSCALE, solver=solver, num_refinements=refinements
    )
    model.covar_module.outputscale = OUTPUTSCALE
    model.eval()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # told by `converged`
        posterior = model.posterior()
    seconds = time.perf_counter() - start
    report = posterior.report
    scores = {
        method: classification_scores(
            model.predict_proba(data.test_x, method=method, num_samples=NUM_SAMPLES), data.test_y
        )
        for method in ("mode", "mc")
    }
    return {
        "products": report.epochs,
        "newton_steps": report.iterations,
        "relative_gradient": report.stationarity,
        "converged": report.status is SolveStatus.CONVERGED,
        "seconds": seconds,
        "scores": scores,
    }


@app.command()
def laplace_size(
    rows: Annotated[list[int] | None, typer.Option(help="Training points; several make several runs.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Of the preconditioner, 0 for none; several.")] = None,
    max_rank: Annotated[int, typer.Option(help="Actions that are kept.")] = 30,
    covariance_actions: Annotated[int, typer.Option(help="Further actions for the variance.")] = 0,
    max_outer: Annotated[int, typer.Option(help="Newton steps at the most.")] = 100,
    refinements: Annotated[int, typer.Option(help="Towards the variational approximation.")] = 0,
    path: Annotated[Path, typer.Option(help="Where runs are saved.")] = RESULTS / "laplace_size.json",
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Kernel products to the mode against points and preconditioner. Goes on where it was interrupted."""
    fixed = {
        "max_rank": max_rank,
        "covariance_actions": covariance_actions,
        "max_outer": max_outer,
        "refinements": refinements,
    }
    runs = [
        Run(CASE, "ours", {"rows": number, "rank": columns, **fixed})
        for number in rows or [5000, 20_000]
        for columns in rank or [0, 100, 300]
    ]
    table = Table(
        f"Ten classes, Matern-3/2, {covariance_actions} actions for the variance, {threads} threads",
        ["points", "rank", "Newton steps", "products", "converged", "s", "MB", "accuracy", "NLL of mode", "averaged"],
        [],
    )
    found = SavedRuns(path).execute(runs, threads, console)
    for measured in found:
        outcome, scores = measured.outcome, measured.outcome["scores"]
        table.rows.append(
            [
                f"{measured.run.options['rows']:,}",
                str(measured.run.options["rank"]),
                f"{outcome['newton_steps']:.0f}",
                f"{outcome['products']:.0f}",
                "yes" if outcome["converged"] else f"no, at {outcome['relative_gradient']:.1e}",
                f"{outcome['seconds']:.0f}",
                f"{outcome['peak_memory_mb']:.0f}",
                f"{scores['mode']['accuracy']:.4f}",
                f"{scores['mode']['nll']:.4f}",
                f"{scores['mc']['nll']:.4f}",
            ]
        )
    console.print(table.for_terminal())
    exit_if_missing(found, runs)

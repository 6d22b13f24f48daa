"""The gradient of a plain loop on fields in one to three dimensions, beside that of a float64 Cholesky factor."""

import time
from dataclasses import replace
from typing import Annotated

import torch
import typer

import gpy_iterative as gpi
from benchmarks.cases.spatial_fit import field
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, finish, show
from benchmarks.datasets import Split
from benchmarks.metrics import root_mean_square
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome

#: By dimension: the field's own lengthscale.
LENGTHSCALES = {1: 0.2, 2: 0.2, 3: 0.5}
NOISE = 0.01


def hyperparameters(dimension: int) -> dict[str, tuple[float, float]]:
    """Lengthscales and noise variances by name."""
    return {"start": (1.0, 1.0), "between": (0.4, 0.02), "own": (LENGTHSCALES[dimension], NOISE)}


def evaluated(
    data: Split, lengthscale: float, noise: float, seed: int | None
) -> tuple[torch.Tensor, float, float, float]:
    """Gradient, value and its standard error in nats, seconds, of a second evaluation; with None in float64 by Cholesky."""
    solver = None
    if seed is None:
        solver = gpi.solvers.Cholesky()
        data = replace(data, train_x=data.train_x.double(), train_y=data.train_y.double())
    model = MaternRegression(data)
    model.covar_module.base_kernel.lengthscale, model.likelihood.noise = lengthscale, noise
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver, generator=seed)
    for _ in range(1 if seed is None else 2):
        model.zero_grad()
        start = time.perf_counter()
        value = mll(model(data.train_x), data.train_y)
        value.backward()
        seconds = time.perf_counter() - start
    rows = len(data.train_y)
    return model.flat_gradient().double(), rows * value.item(), rows * mll.report.value_sem.item(), seconds


def errors(n: int, dimension: int, seeds: int) -> dict[str, Outcome]:
    """By hyperparameters: the gradient's relative errors and the value's in nats, once a seed."""
    lengthscale = LENGTHSCALES[dimension]
    data = field(n, dimension, test_rows=1, lengthscale=lengthscale, noise=NOISE, layout="uniform")
    found: dict[str, Outcome] = {}
    for name, values in hyperparameters(dimension).items():
        gradient, value, _, _ = evaluated(data, *values, None)
        runs = [evaluated(data, *values, seed) for seed in range(seeds)]
        found[name] = {
            "norm": n * float(gradient.norm()),
            "gradient": [float((run[0] - gradient).norm() / gradient.norm()) for run in runs],
            "value": [run[1] - value for run in runs],
            "value_sem": max(run[2] for run in runs),
            "seconds": min(run[3] for run in runs),
        }
    return found


def shown(outcome: Outcome) -> list[str]:
    """Cells of the table."""
    return [
        f"{outcome['norm']:.3g}",
        f"{100 * root_mean_square(torch.tensor(outcome['gradient'])):.2f} %",
        f"{100 * max(outcome['gradient']):.2f} %",
        f"{root_mean_square(torch.tensor(outcome['value'])):.1f}",
        f"{outcome['value_sem']:.1f}",
        f"{outcome['seconds']:.1f}",
    ]


@app.command()
def spatial_gradient(
    n: Annotated[int, typer.Option(help="Rows.")] = 10_000,
    d: Annotated[
        list[int] | None, typer.Option(min=1, max=3, help="Inputs; once for each. Without: 1, 2 and 3.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the probes.")] = 8,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Errors of gradient and value of a warm evaluation with default options; five minutes."""
    torch.set_num_threads(threads)
    outcomes: dict[str, Outcome] = {}
    for dimension in d or [1, 2, 3]:
        for name, outcome in errors(n, dimension, seeds).items():
            outcomes[f"d = {dimension}, {name}"] = outcome
            console.print(f"d = {dimension}, {name}", *shown(outcome), sep=" | ")
    show(
        f"gradient (relative) and value (nats) of {n:,} rows, {seeds} draws, beside float64 Cholesky",
        ["hyperparameters", "norm, nats", "gradient's error", "largest", "value's error", "standard error", "s"],
        [[name, *shown(outcome)] for name, outcome in outcomes.items()],
    )
    finish("spatial_gradient", {"n": n, "seeds": seeds}, threads, outcomes=outcomes)

"""Posterior functions beside BoTorch's: seconds, memory, and how they are spread.

The exact posterior of the same hyperparameters tells how they should be: with z the distance of a value from the exact
mean in exact standard deviations, the functions' mean of z is 0 and that of z^2 is 1.
"""

import statistics
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer

from benchmarks.command_line import (
    DEFAULT_THREADS,
    Threads,
    app,
    console,
    exit_if_missing,
    names_of,
    run_contenders,
    show,
    succeeded,
    succeeded_or_exit,
)
from benchmarks.runner import environment, save

#: The contenders of `benchmarks.path_samplers`, in a program of their own.
PROGRAM = "benchmarks.path_samplers"
METHODS = ("ours", "ours, float32", "botorch", "botorch, 16,384 features")


def accuracy(values: list[list[float]], mean: list[float], variance: list[float]) -> dict[str, float]:
    """Means of z and z^2 over functions and points, and their standard errors over functions."""
    centred = torch.tensor(values, dtype=torch.float64) - torch.tensor(mean, dtype=torch.float64)
    z = centred / torch.tensor(variance, dtype=torch.float64).sqrt()
    first, second = z.mean(-1).tolist(), z.square().mean(-1).tolist()
    root = len(first) ** 0.5
    return {
        "mean_z": statistics.mean(first),
        "mean_z_sem": statistics.stdev(first) / root,
        "mean_z2": statistics.mean(second),
        "mean_z2_sem": statistics.stdev(second) / root,
    }


@app.command()
def paths(
    dataset: str = "kin40k",
    rows: int = 10_000,
    num_paths: Annotated[int, typer.Option(help="Functions.")] = 64,
    only: Annotated[list[str] | None, names_of(METHODS, "Contenders, by name; all by default.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Posterior functions beside BoTorch's: seconds, memory, and whether they are spread as the exact posterior."""
    names = only or list(METHODS)
    process = {"program": PROGRAM, "threads": threads}
    fitted = succeeded_or_exit(run_contenders("paths", ["hyperparameters"], **process, dataset=dataset))
    options: dict[str, Any] = {
        "dataset": dataset,
        "rows": rows,
        "hyperparameters": fitted["hyperparameters"]["values"],
    }
    truth = succeeded_or_exit(run_contenders("paths", ["exact"], **process, **options))["exact"]
    outcomes = run_contenders("paths", names, **process, num_paths=num_paths, **options)
    good = succeeded(outcomes)
    for outcome in good.values():
        outcome |= accuracy(outcome.pop("values"), truth["mean"], truth["variance"])
    show(
        f"{num_paths} functions, {dataset}, {rows} rows, {threads} threads",
        ["contender", "s drawing", "s at 500 points", "MB", "mean of z", "mean of z^2"],
        [
            [
                name,
                f"{o['seconds_drawing']:.1f}",
                f"{o['seconds_evaluating']:.2f}",
                f"{o['peak_memory_mb']:.0f}",
                f"{o['mean_z']:.3f} +- {o['mean_z_sem']:.3f}",
                f"{o['mean_z2']:.3f} +- {o['mean_z2_sem']:.3f}",
            ]
            for name, o in good.items()
        ],
    )
    versions = environment(threads) | {"botorch": version("botorch")}
    content = {"environment": versions, "options": options | {"num_paths": num_paths}, "outcomes": outcomes}
    console.print(f"saved {save(f'paths_{dataset}_{rows}', content)}")
    exit_if_missing(list(good), names)

"""Fits of BoTorch's surrogate models: its default L-BFGS, and average information, at sizes of Bayesian optimisation."""

import importlib
import statistics
from functools import partial
from typing import Annotated

import typer

from benchmarks.command_line import DEFAULT_THREADS, Threads, app, finish, run_contenders, show, succeeded
from benchmarks.runner import Outcome, contender

OPTIMIZERS = [LBFGS, AVERAGE_INFORMATION] = ["L-BFGS", "average information"]
MODELS = [SINGLE, MULTITASK, MIXED] = ["SingleTaskGP", "MultiTaskGP", "MixedSingleTaskGP"]


def fitted(*, optimizer: str, model: str, rows: int) -> Outcome:
    """Only here is BoTorch imported, in the contender's own process: that changes settings of GPyTorch for all others."""
    return importlib.import_module("benchmarks.surrogate_fits").fitted(optimizer=optimizer, model=model, rows=rows)


for _name in OPTIMIZERS:
    contender("surrogates", _name)(partial(fitted, optimizer=_name))


@app.command()
def surrogates(
    rows: Annotated[list[int] | None, typer.Option(min=2, help="Observations; once for each size.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds and value of fits of BoTorch's models to a few hundred observations, by L-BFGS and by average information."""
    sizes = rows or [50, 200]
    outcomes = {
        f"{model}, {size}": succeeded(run_contenders("surrogates", OPTIMIZERS, threads=threads, model=model, rows=size))
        for model in MODELS
        for size in sizes
    }
    show(
        "Ten fits each: seconds together; nats of average information above L-BFGS; left: what L-BFGS gains from there",
        ["", LBFGS, AVERAGE_INFORMATION, "times faster", "least", "median", "most", "left (median)", "left (most)"],
        [
            [name, *_compared(*(by_optimizer[optimizer]["fits"] for optimizer in OPTIMIZERS))]
            for name, by_optimizer in outcomes.items()
            if len(by_optimizer) == len(OPTIMIZERS)
        ],
    )
    finish("surrogates", {"rows": sizes}, threads, outcomes=outcomes)


def _compared(theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> list[str]:
    pairs = list(zip(theirs, ours, strict=True))
    seconds = [sum(fit["seconds"] for fit in fits) for fits in (theirs, ours)]
    faster = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    gains, left = sorted(b["value"] - a["value"] for a, b in pairs), sorted(fit["left"] for fit in ours)
    nats = [f"{gain:+.2f}" for gain in (gains[0], statistics.median(gains), gains[-1])]
    return [
        *(f"{total:.1f}" for total in seconds),
        f"{faster:.1f}",
        *nats,
        f"{statistics.median(left):.2f}",
        f"{left[-1]:.2f}",
    ]

"""From the papers' start to scores on held-out rows: how long ours takes, and GPyTorch's exact inference as it comes.

Everyone takes the same steps of the same optimiser; what differs is the marginal log likelihood and the predictions. Ours
is shown from neighbourhoods, too: with a start that costs next to nothing, less than a third of the steps remain.
"""

from functools import partial
from typing import Annotated

import typer

from benchmarks import published
from benchmarks.cases.rivals import CASE, EXACT, train_exact
from benchmarks.command_line import (
    DEFAULT_THREADS,
    FirstRows,
    Threads,
    app,
    finish,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.runner import contender
from benchmarks.training import start_from_neighbourhoods

PREPARED = "ours, from neighbourhoods"
#: The part of the others' steps that it takes.
REMAINING = 0.3
SAME_STEPS = ["ours", "GPyTorch, CG"]


contender("total", PREPARED)(partial(train_exact, "ours", prepare=start_from_neighbourhoods))


@app.command()
def total(
    dataset: str = "elevators",
    split: int = 0,
    rows: FirstRows = None,
    steps: int = 100,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Contenders with the same steps, of: {'; '.join(EXACT)}. By default {' and '.join(SAME_STEPS)}."
        ),
    ] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds of training and prediction together, and the quality they buy, beside the published one."""
    options = {"dataset": dataset, "split": split, "rows": rows, "steps": steps}
    fewer = options | {"steps": round(REMAINING * steps)}
    outcomes = run_contenders("total", [PREPARED], threads=threads, **fewer)
    outcomes |= run_contenders(CASE, SAME_STEPS if only is None else only, threads=threads, **options)
    good = succeeded_or_exit(outcomes)
    seconds = {name: o["seconds"] + o["seconds_prediction"] for name, o in good.items()}
    slowest = max(seconds.values())
    table = [
        [
            name,
            str(o["steps_taken"]),
            f"{o['seconds']:.0f}",
            f"{o['seconds_prediction']:.1f}",
            f"{seconds[name]:.0f}",
            f"{slowest / seconds[name]:.1f}",
            f"{o['peak_memory_mb']:,.0f}",
            f"{o['rmse']:.4f}",
            f"{o['log_likelihood']:.4f}",
        ]
        for name, o in good.items()
    ]
    theirs = published.LIN.get(dataset, {}).get("CG", {}).get("standard, cold")
    if theirs:
        table.append(["published", "", "", "", "", "", "", f"{theirs.rmse:.4f}", f"{theirs.log_likelihood:.4f}"])
    show(
        f"{dataset}, {threads} threads",
        ["", "steps", "s training", "s prediction", "s together", "times faster", "MB", "RMSE", "log-likelihood"],
        table,
    )
    finish(f"total_{dataset}", options, threads, outcomes=outcomes)

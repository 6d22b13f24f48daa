"""How many times fewer epochs pathwise probes and warm starts take over a whole training, at the price of few cold solves.

Lin et al. 2024, table 1, is about a hundred steps; the solves of the last steps, where the noise is small, are what costs
most from zero. A solve from zero knows nothing of the steps before it: its epochs at every tenth step of one training
tell the epochs of all of them.
"""

import statistics
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import published
from benchmarks.cases.pathwise import (
    FROM_ONES,
    MAX_EPOCHS,
    REFERENCE,
    SOLVERS,
    make_mll,
    make_solver,
    published_speed_up,
    shown,
    start_model,
)
from benchmarks.runner import Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.training import posterior_scores, take_step
from gpy_iterative.errors import ConvergenceWarning

CASE = "warm-starts"
WARM = published.LIN_VARIANTS[-1]


def train(
    solver: str, *, steps: int, every: int, block_size: int, max_epochs: float, rate: float, **start: Any
) -> Outcome:
    """Epochs of every step with pathwise probes and warm starts, and of solves with standard probes from zero.

    Args:
        solver: of SOLVERS; both have the same options.
        every: the cold solves are those of the middle step of so many.
        start: of `start_model`.

    The other arguments are those of `pathwise.train`.
    """
    data, model = start_model(**start)
    warm, cold = (make_mll(model, make_solver(solver, block_size, max_epochs), name) for name in (WARM, REFERENCE))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    reports, cold_reports, began = [], [], time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the table tells which solves came to the limit
        for step in range(steps):
            if step % every == every // 2:
                with torch.no_grad():
                    cold(model(data.train_x), data.train_y)
                cold_reports.append(cold.report)
            take_step(model, warm, optimizer, data)
            reports.append(warm.report)
        seconds = time.perf_counter() - began
        rmse, log_likelihood = posterior_scores(model, warm.posterior(), data)
    return {
        "train_rows": len(data.train_y),
        "epochs": [report.epochs for report in reports],
        "cold_epochs": [report.epochs for report in cold_reports],
        "at_limit": sum(report.status.name != "CONVERGED" for report in reports),
        "cold_at_limit": sum(report.status.name != "CONVERGED" for report in cold_reports),
        "seconds": seconds,
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "noise": float(model.likelihood.noise.detach()),
    }


for _solver in SOLVERS:
    contender(CASE, _solver)(partial(train, _solver))


def preset_runs(preset: Preset) -> list[Run]:
    """SMOKE and QUICK; PAPER takes every step of every variant, in `pathwise`."""
    if preset is Preset.PAPER:
        return []
    smoke = {"dataset": "wine", "rows": 300, "steps": 4, "every": 2, "block_size": 30}
    quick = {"dataset": "pol", "rows": 5000, "steps": 100, "every": 10, "block_size": 500}
    sizes = {"split": 0, "scales": True, "max_epochs": MAX_EPOCHS, **(smoke if preset is Preset.SMOKE else quick)}
    return [Run(CASE, solver, sizes | FROM_ONES) for solver in SOLVERS]


def mean_epochs(epochs: Sequence[float], at_limit: int) -> str:
    """Of a step, and how many steps came to the limit."""
    return f"{statistics.fmean(epochs):.1f}" + (f" ({at_limit} of {len(epochs)} at the limit)" if at_limit else "")


def tables(found: Sequence[Measured]) -> list[Table]:
    """A table a data set, with a row a solver."""
    groups: dict[str, list[Measured]] = {}
    for measured in found:
        groups.setdefault(measured.run.options["dataset"], []).append(measured)
    return [_of_dataset(members) for members in groups.values()]


def _of_dataset(found: Sequence[Measured]) -> Table:
    options, rows = found[0].run.options, []
    for measured in found:
        solver, done = measured.run.contender, measured.outcome
        cold, warm = done["cold_epochs"], done["epochs"]
        rows.append(
            [
                solver,
                mean_epochs(cold, done["cold_at_limit"]),
                mean_epochs(warm, done["at_limit"]),
                f"{statistics.fmean(cold) / statistics.fmean(warm):.1f}",
                shown(published_speed_up(options["dataset"], solver, WARM)),
                shown(published.LIN_SPEED_UPS[solver][published.LIN_VARIANTS.index(WARM)]),
            ]
        )
    return Table(
        f"{options['dataset']}, {found[0].outcome['train_rows']:,} rows, {options['steps']} steps at {options['rate']} "
        f"from {options['start_from']}, blocks of {options['block_size']}, at most {options['max_epochs']} epochs a solve; "
        f"{REFERENCE}: every {options['every']}th step",
        [
            "solver",
            f"epochs a step, {REFERENCE}",
            f"epochs a step, {WARM}",
            "fewer by",
            "published, less time",
            "published average",
        ],
        rows,
    )


register(
    Case(
        CASE,
        "Epochs of a hundred steps with pathwise probes and warm starts, against standard probes from zero.",
        preset_runs,
        tables,
        note="Every solve to a mean relative residual of 0.01, with 64 probes, as in `pathwise`.",
    )
)

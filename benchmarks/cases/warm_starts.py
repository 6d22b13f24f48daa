"""How many times fewer epochs pathwise probes and warm starts take over a whole training, at the price of few cold solves.

Lin et al. 2024, table 1, is about a hundred steps; the solves of the last steps, where the noise is small, are what costs
most from zero. A solve from zero knows nothing of the steps before it: its epochs at every twentieth step of one training
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
    # On pol cold solves come to the limit at most of the steps, and take hours to say no more than that.
    quick = {"dataset": "elevators", "rows": 5000, "steps": 100, "every": 20, "block_size": 500}
    sizes = {"split": 0, "scales": True, "max_epochs": MAX_EPOCHS, **(smoke if preset is Preset.SMOKE else quick)}
    return [Run(CASE, solver, sizes | FROM_ONES) for solver in SOLVERS]


def mean_epochs(epochs: Sequence[float], at_limit: int) -> str:
    """Of a step, and how many steps came to the limit."""
    return f"{statistics.fmean(epochs):.1f}" + (f" ({at_limit} of {len(epochs)} at the limit)" if at_limit else "")


def tables(found: Sequence[Measured]) -> list[Table]:
    """A row for each data set and solver, and one for each solver's average over several data sets."""
    rows, ratios = [], {solver: [] for solver in SOLVERS}
    for measured in sorted(found, key=lambda measured: SOLVERS.index(measured.run.contender)):
        solver, dataset, done = measured.run.contender, measured.run.options["dataset"], measured.outcome
        cold, warm = done["cold_epochs"], done["epochs"]
        ratio = statistics.fmean(cold) / statistics.fmean(warm)
        ratios[solver].append((ratio, bool(done["cold_at_limit"])))
        rows.append(
            [
                solver,
                dataset,
                mean_epochs(cold, done["cold_at_limit"]),
                mean_epochs(warm, done["at_limit"]),
                fewer_by(ratio, is_bound=bool(done["cold_at_limit"])),
                shown(published_speed_up(dataset, solver, WARM)),
            ]
        )
    for solver, known in ratios.items():
        if len(known) > 1:
            average = statistics.fmean(ratio for ratio, _ in known)
            theirs = published.LIN_SPEED_UPS[solver][published.LIN_VARIANTS.index(WARM)]
            is_bound = any(is_bound for _, is_bound in known)
            rows.append([solver, "average", "", "", fewer_by(average, is_bound=is_bound), shown(theirs)])
    options, size = found[0].run.options, found[0].outcome["train_rows"]
    return [
        Table(
            f"{size:,} rows, {options['steps']} steps at {options['rate']} from {options['start_from']}, "
            f"blocks of {options['block_size']}, at most {options['max_epochs']} epochs a solve; "
            f"{REFERENCE}: every {options['every']}th step (published: all rows, time, five data sets)",
            ["solver", "data set", f"epochs a step, {REFERENCE}", f"epochs a step, {WARM}", "fewer by", "published"],
            rows,
        )
    ]


def fewer_by(ratio: float, *, is_bound: bool) -> str:
    """A ratio; a lower bound on it where cold solves came to the limit."""
    return f"at least {ratio:.1f}" if is_bound else f"{ratio:.1f}"


register(
    Case(
        CASE,
        "Epochs of a hundred steps with pathwise probes and warm starts, against standard probes from zero.",
        preset_runs,
        tables,
        note="Every solve to a mean relative residual of 0.01, with 64 probes, as in `pathwise`.",
    )
)

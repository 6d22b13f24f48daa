"""What random truncation costs beside a fixed one: seconds of a training step, and the expected length of its run."""

import statistics
import time

from gpytorch.mlls import MarginalLogLikelihood

import gpy_iterative as gpi
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    Threads,
    app,
    finish,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import load_random_split
from benchmarks.models import SquaredExponentialRegression
from benchmarks.runner import Outcome, contender
from gpy_iterative.truncation import ExponentialTruncation

#: Truncations of the targets, and whether the ten probes have their own.
SETTINGS: dict[str, tuple[int, str] | None] = {
    "CG, 100 steps": None,
    "M = 2, shared": (2, "shared"),
    "M = 8, shared": (8, "shared"),
    "M = 2, independent": (2, "independent"),
}
NUM_PROBES = 10
#: So little that no column converges within the longest run.
NOISE = 1e-3
TRUNCATION = ExponentialTruncation(min_steps=80, rate=0.05)


def expected_length(name: str) -> float:
    """E[largest J] of a run."""
    setting = SETTINGS[name]
    if setting is None:
        return 100.0
    count, probes = setting
    return TRUNCATION.expected_max(count + (NUM_PROBES if probes == "independent" else 0))


def _mll(name: str, model: SquaredExponentialRegression) -> MarginalLogLikelihood:
    setting = SETTINGS[name]
    if setting is None:
        return gpi.mlls.TruncatedCGMarginalLogLikelihood(model.likelihood, model, num_probes=NUM_PROBES, generator=0)
    count, probes = setting
    return gpi.mlls.RussianRouletteMarginalLogLikelihood(
        model.likelihood,
        model,
        truncation=TRUNCATION,
        num_truncations=count,
        num_probes=NUM_PROBES,
        probe_truncation=probes,
        generator=0,
    )


@contender("truncation-cost", "all")
def step_seconds(*, dataset: str, rows: int | None, repeats: int) -> Outcome:
    """Steps of all settings in turn, so that what else the machine does falls on all of them."""
    data = load_random_split(dataset, rows=rows)
    model = SquaredExponentialRegression(data.train_x, data.train_y, ard=True, constant=True)
    model.likelihood.noise = NOISE
    mlls = {name: _mll(name, model) for name in SETTINGS}
    seconds: dict[str, list[float]] = {name: [] for name in mlls}
    lengths: dict[str, list[int]] = {name: [] for name in mlls}
    for repeat in range(repeats + 1):
        for name, mll in mlls.items():
            start = time.perf_counter()
            (-mll(model(data.train_x), data.train_y)).backward()
            if repeat:  # the first one evaluates tiles into fresh memory
                seconds[name].append(time.perf_counter() - start)
                lengths[name].append(mll.report.iterations)
    return {
        name: {
            "seconds": statistics.fmean(seconds[name]),
            "length": statistics.fmean(lengths[name]),
            "seconds_a_step": sum(seconds[name]) / sum(lengths[name]),
            "expected_length": expected_length(name),
        }
        for name in mlls
    }


@app.command(name="truncation-cost")
def truncation_cost(
    dataset: ChosenData = "pol", rows: int | None = 4000, repeats: int = 20, threads: Threads = DEFAULT_THREADS
) -> None:
    """Seconds of a step: Russian roulette beside truncated CG, with the expected length of its run."""
    options = {"dataset": dataset, "rows": rows, "repeats": repeats}
    outcome = succeeded_or_exit(run_contenders("truncation-cost", ["all"], threads=threads, **options))["all"]
    reference = outcome["CG, 100 steps"]
    show(
        f"{dataset}, {rows or 'all'} rows, {repeats} steps each, rate 0.05, 80 steps at the least",
        ["truncations", "s / step", "over CG", "its run's length / 100", "expected length / 100"],
        [
            [
                name,
                f"{o['seconds']:.3f}",
                f"{o['seconds'] / reference['seconds']:.2f}",
                f"{o['length'] / 100:.2f}",
                f"{o['expected_length'] / 100:.2f}",
            ]
            for name, o in outcome.items()
            if name != "peak_memory_mb"
        ],
    )
    finish(f"truncation_cost_{dataset}", options, threads, outcome=outcome)

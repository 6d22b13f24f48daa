"""Three solvers, standard and pathwise probes, cold and warm starts: epochs, time and predictions.

Lin et al. 2024, tables 1 to 6: solved to a relative residual of 0.01 by the mean over columns, 64 probes, Adam. Standard
probes are Gaussian with identity covariance, pathwise ones weighted as published; a warm start is the previous
solution. Beside them this package's own: corrected weights and extrapolated starts.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    Threads,
    app,
    finish,
    names_of,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import Split, load
from benchmarks.models import MaternRegression
from benchmarks.plots import plt, save_figure
from benchmarks.runner import Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.training import posterior_scores, take_step, timed_scores
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood, PathwiseMarginalLogLikelihood
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.solvers import AlternatingProjections, ConjugateGradients, IterativeSolver, StochasticGradientDescent

CASE = "pathwise"
SOLVERS = ("CG", "AP", "SGD")
OURS = "corrected, extrapolated"
#: Probes and start, as the papers' tables order them, and ours.
VARIANTS = (*published.LIN_VARIANTS, OURS)
REFERENCE = "standard, cold"
NUM_PROBES = 64


def make_solver(name: str, block_size: int, max_epochs: float) -> IterativeSolver:
    """One of SOLVERS under the papers' stopping rule; blocks of alternating projections are the batches of descent."""
    options = {"tolerance": 0.01, "probe_tolerance": 0.01, "stopping": "mean", "max_epochs": max_epochs}
    if name == "CG":
        return ConjugateGradients(preconditioner=PivotedCholesky(rank=100), **options)
    if name == "AP":
        return AlternatingProjections(block_size=block_size, fallback=None, **options)
    return StochasticGradientDescent(batch_size=block_size, **options)


def make_mll(
    model: MaternRegression, solver: IterativeSolver, variant: str
) -> HutchinsonMarginalLogLikelihood | PathwiseMarginalLogLikelihood:
    """One of VARIANTS."""
    probes, start = variant.split(", ")
    common = {
        "num_probes": NUM_PROBES,
        "solver": solver,
        "warm_start": {"cold": False, "warm": "previous", "extrapolated": "extrapolated"}[start],
        "generator": 0,
    }
    if probes == "standard":
        return HutchinsonMarginalLogLikelihood(model.likelihood, model, probes="gaussian", **common)
    return PathwiseMarginalLogLikelihood(
        model.likelihood, model, num_frequencies=1000, corrected=probes == "corrected", **common
    )


def start_model(
    dataset: str, split: int, *, rows: int | None, scales: bool, start_from: Literal["ones", "subsets"]
) -> tuple[Split, MaternRegression]:
    """The data, and the model with the hyperparameters that training starts from."""
    data = load(dataset, split, rows=rows)
    model = MaternRegression(data, scales=scales)
    if start_from == "subsets":
        gpi.initialize_from_subsets(model, model.likelihood, subset_size=1000, num_subsets=3, generator=0)
    return data, model


def train(
    solver: str,
    variant: str,
    *,
    dataset: str,
    split: int,
    rows: int | None,
    steps: int,
    block_size: int,
    max_epochs: float,
    scales: bool,
    rate: float,
    start_from: Literal["ones", "subsets"],
) -> Outcome:
    """Epochs, seconds and residuals of every step, and what the trained model predicts.

    Args:
        solver, variant: of SOLVERS and VARIANTS.
        dataset, split, rows: training data.
        steps, rate: of Adam.
        block_size: rows of a block or batch.
        max_epochs: budget of a step's solve.
        start_from: all hyperparameters at 1, or their averages over fits to three subsets of 1,000 rows, the paper's start
            for large data (whose time does not count).
        scales: whether Adam moves the scales of signal and noise, as in the paper, or their variances, as in GPyTorch.
    """
    data, model = start_model(dataset, split, rows=rows, scales=scales, start_from=start_from)
    mll = make_mll(model, make_solver(solver, block_size, max_epochs), variant)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    reports, start = [], time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a budget that runs out is what some runs are about
        for _ in range(steps):
            take_step(model, mll, optimizer, data)
            reports.append(mll.report)
        tested = timed_scores(start, lambda: posterior_scores(model, mll.posterior(), data))
    return {
        "train_rows": len(data.train_y),
        "epochs": [report.epochs for report in reports],
        "total": sum(report.epochs for report in reports),
        "statuses": [report.status.name for report in reports],
        "residual_targets": [report.residual_targets for report in reports],
        "residual_probes": [report.residual_probes for report in reports],
        **tested,
        "noise": float(model.likelihood.noise.detach()),
    }


for _solver in SOLVERS:
    for _variant in VARIANTS:
        contender(CASE, f"{_solver}, {_variant}")(partial(train, _solver, _variant))


@app.command()
def epochs(
    dataset: ChosenData = "pol",
    rows: int = 6000,
    steps: int = 30,
    block_size: int = 512,
    max_epochs: int = 1000,
    only: Annotated[
        list[str] | None, names_of(published.LIN_VARIANTS, "Probes and start, beside 'standard, cold'.")
    ] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Epochs of alternating projections: pathwise or standard probes, warm or cold."""
    options = {"dataset": dataset, "rows": rows, "steps": steps, "block_size": block_size, "max_epochs": max_epochs}
    names = [name for name in published.LIN_VARIANTS if name != REFERENCE and (only is None or name in only)]
    fixed = {"threads": threads, "split": 0, "scales": False, "rate": 0.1, "start_from": "ones", **options}
    # On its own: the others are nothing without it.
    first = succeeded_or_exit(run_contenders(CASE, [f"AP, {REFERENCE}"], **fixed))
    whole = first | run_contenders(CASE, [f"AP, {name}" for name in names], **fixed)
    outcomes = {name: whole[f"AP, {name}"] for name in (REFERENCE, *names)}
    good = succeeded_or_exit(outcomes)
    reference = good[REFERENCE]["total"]
    show(
        f"{dataset}, {rows} rows, {steps} steps, blocks of {block_size}",
        ["probes, start", "epochs", "fewer by"],
        [[name, f"{o['total']:.0f}", f"{reference / o['total']:.1f}"] for name, o in good.items()],
    )
    finish(f"epochs_{dataset}", options, threads, outcomes=outcomes)


def planned_run(solver: str, variant: str, *, dataset: str, split: int = 0, **sizes: int | float | str | None) -> Run:
    """A run with the paper's parameters."""
    return Run(CASE, f"{solver}, {variant}", {"dataset": dataset, "split": split, "scales": True, **sizes})


#: The paper's protocols for small data and for large data. Solves are hard, and warm starts worth most, once
#: hyperparameters have settled: from ones that takes half of a hundred steps, from subsets none.
FROM_ONES = {"rate": 0.1, "start_from": "ones"}
FROM_SUBSETS = {"rate": 0.03, "start_from": "subsets"}
QUICK_SOLVERS = SOLVERS[:2]
QUICK_SIZES = {"rows": 5000, "steps": 30, "block_size": 500, **FROM_SUBSETS}
#: Of a step's solve.
MAX_EPOCHS = 1000


def preset_runs(preset: Preset) -> list[Run]:
    """Every solver with all probes and starts, solved to tolerance, or 1,000 epochs a step; SMOKE has AP alone, and QUICK
    the published variants, and leaves SGD to `warm-starts`: its cold solves take an hour.
    """
    if preset is Preset.SMOKE:
        problems = [("wine", 0, {"rows": 300, "steps": 2, "block_size": 30, **FROM_ONES})]
    elif preset is Preset.QUICK:
        # Within minutes: from subsets a cold solve by alternating projections takes 500 epochs (elevators), not 100.
        problems = [("pol", 0, QUICK_SIZES | FROM_ONES)]
    else:
        large = ("protein", "keggdirected")
        problems = [
            (name, split, {"rows": None, "steps": 100, "block_size": 2000 if name in large else 1000, **FROM_ONES})
            for name in published.LIN
            for split in range(10)
        ]
    return [
        planned_run(
            solver,
            variant,
            dataset=name,
            split=split,
            max_epochs=MAX_EPOCHS,
            **sizes,
        )
        for name, split, sizes in problems
        for solver in (QUICK_SOLVERS if preset is Preset.QUICK else SOLVERS)
        for variant in (published.LIN_VARIANTS if preset is Preset.QUICK else VARIANTS)
        if preset is not Preset.SMOKE or solver == "AP" or variant == OURS
    ]


Groups = dict[tuple[str, str, str], list[Outcome]]


def grouped(found: Sequence[Measured]) -> Groups:
    """Outcomes of all splits by data set, solver, and probes and start."""
    groups: Groups = {}
    for measured in found:
        solver, variant = measured.run.contender.split(", ", 1)
        groups.setdefault((measured.run.options["dataset"], solver, variant), []).append(measured.outcome)
    return groups


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Of a figure, or of the means of a list, over splits."""
    values = [outcome[name] for outcome in outcomes]
    return statistics.fmean(statistics.fmean(v) if isinstance(v, list) else v for v in values)


def speed_up(groups: Groups, dataset: str, solver: str, variant: str, name: str) -> float | None:
    """How many times less of `total` or `seconds` than standard probes from zero; None where one is missing."""
    ours, theirs = (groups.get((dataset, solver, which)) for which in (variant, REFERENCE))
    return mean(theirs, name) / mean(ours, name) if ours and theirs else None


def published_speed_up(dataset: str, solver: str, variant: str) -> float | None:
    """The ratio of printed minutes."""
    rows = published.LIN.get(dataset, {}).get(solver, {})
    return rows[REFERENCE].minutes / rows[variant].minutes if variant in rows else None


def shown(value: float | None, digits: int = 1) -> str:
    """A cell, empty where there is no figure."""
    return "" if value is None else f"{value:.{digits}f}"


def tables(found: Sequence[Measured]) -> list[Table]:
    """Table 1, the averages, and one of tables 2 to 6 for each data set."""
    groups = grouped(found)
    datasets = list(dict.fromkeys(dataset for dataset, _, _ in groups))
    averages = [_averages(groups, datasets)] if len(datasets) > 1 else []
    return averages + [_of_dataset(groups, name, found) for name in datasets]


def _averages(groups: Groups, datasets: Sequence[str]) -> Table:
    rows = []
    for solver in SOLVERS:
        for index, variant in enumerate(VARIANTS):
            ratios = {
                name: [speed_up(groups, dataset, solver, variant, name) for dataset in datasets]
                for name in ("total", "seconds")
            }
            if None in ratios["total"]:
                continue
            theirs = published.LIN_SPEED_UPS[solver][index] if variant != OURS else None
            rows.append(
                [
                    f"{solver}, {variant}",
                    shown(statistics.fmean(ratios["total"])),
                    shown(statistics.fmean(ratios["seconds"])),
                    shown(theirs),
                ]
            )
    return Table(
        f"Average speed-up over {', '.join(datasets)} (published: five data sets, 100 steps, time)",
        ["solver, probes, start", "fewer epochs", "less time", "published"],
        rows,
    )


def _of_dataset(groups: Groups, dataset: str, found: Sequence[Measured]) -> Table:
    first = next(measured for measured in found if measured.run.options["dataset"] == dataset)
    rows = []
    for (name, solver, variant), outcomes in groups.items():
        if name != dataset:
            continue
        theirs = published.LIN.get(dataset, {}).get(solver, {}).get(variant)
        stopped = sum(status != "CONVERGED" for outcome in outcomes for status in outcome["statuses"])
        rows.append(
            [
                f"{solver}, {variant}",
                f"{mean(outcomes, 'total'):.0f}" + (f" ({stopped} steps at the limit)" if stopped else ""),
                shown(speed_up(groups, dataset, solver, variant, "total")),
                shown(mean(outcomes, "seconds")),
                shown(speed_up(groups, dataset, solver, variant, "seconds")),
                shown(published_speed_up(dataset, solver, variant)),
                shown(mean(outcomes, "rmse"), 4),
                shown(theirs.rmse if theirs else None, 4),
                shown(mean(outcomes, "log_likelihood"), 3),
                shown(theirs.log_likelihood if theirs else None, 3),
            ]
        )
    options, size = first.run.options, first.outcome["train_rows"]
    return Table(
        f"{dataset}, {size:,} rows, {options['steps']} steps at {options['rate']} from {options['start_from']}, "
        f"blocks of {options['block_size']} "
        "(published: all rows, 100 steps)",
        [
            "solver, probes, start",
            "epochs",
            "fewer by",
            "s",
            "less by",
            "published",
            "RMSE",
            "published",
            "log-likelihood",
            "published",
        ],
        rows,
    )


def draw_steps(
    groups: Groups, path: Path, figure_of: Callable[[Outcome], list[float]], label: str, title: str = "{0}, {1}"
) -> Path:
    """A figure of each step of the first split: a row a data set, a column a solver, a line for probes and start."""
    datasets = list(dict.fromkeys(dataset for dataset, _, _ in groups))
    size = (9, 0.5 + 2.5 * len(datasets))
    figure, axes = plt.subplots(len(datasets), len(SOLVERS), figsize=size, layout="constrained", squeeze=False)
    for (dataset, solver, variant), (outcome, *_) in groups.items():
        axis = axes[datasets.index(dataset), SOLVERS.index(solver)]
        axis.plot(figure_of(outcome), label=variant, linestyle="--" if variant == OURS else "-")
        axis.set_title(title.format(dataset, solver), fontsize=9)
        axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.set_ylabel(label)
    axes[0, 0].legend(fontsize=6)
    return save_figure(figure, path)


register(
    Case(
        CASE,
        "Pathwise probes and warm starts, solved to tolerance: tables 1 to 6 of Lin et al. 2024.",
        preset_runs,
        tables,
        lambda found, folder: [
            draw_steps(grouped(found), folder / "pathwise_epochs.svg", lambda outcome: outcome["epochs"], "epochs")
        ],
        note="Every solve to a mean relative residual of 0.01, with 64 probes; Adam on the paper's parameters.",
    )
)

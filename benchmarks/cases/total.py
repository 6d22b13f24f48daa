"""From the papers' start to scores on held-out rows: how long ours takes, and GPyTorch's exact inference as it comes.

GPyTorch and ours take the same steps of Adam; what differs is the marginal log likelihood and the predictions. Ours is
shown from neighbourhoods, too: with a start that costs next to nothing, less than a third of the steps remain. `gpi.fit`
trains ours to the optimum, from the papers' start and from subsets.

Steps are not quality. So the hyperparameters that each had on its way are scored by the predictions of a Cholesky factor
in float64, the same for all: that tells how long each took to come near the best of them.
"""

import time
from functools import partial
from typing import Annotated, Literal

import torch

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.cases.rivals import CASE, EXACT, train_exact
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    ChosenSplit,
    FirstRows,
    Threads,
    app,
    finish,
    names_of,
    run_contenders,
    show,
    succeeded,
    succeeded_or_exit,
)
from benchmarks.datasets import load
from benchmarks.metrics import regression_scores
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.training import by_fit, start_from_neighbourhoods, train_and_test

PREPARED = "ours, from neighbourhoods"
FIT, FIT_PREPARED = "gpi.fit", "gpi.fit, from subsets"
#: Runs of this package alone, which take minutes.
OWN = [PREPARED, FIT, FIT_PREPARED]
EXACT_SCORES = "exact predictions"
#: The part of the others' steps that it takes.
REMAINING = 0.3
SAME_STEPS = ["ours", "GPyTorch, CG"]
#: Hyperparameters of every way of Adam that are scored, and after how many steps of a fit they are.
MARKS, EVERY = 4, 3


contender("total", PREPARED)(partial(train_exact, "ours", prepare=start_from_neighbourhoods))


def fitted(start: Literal["current", "subsets"], *, dataset: str, split: int, rows: int | None, every: int) -> Outcome:
    """What `train_exact` returns, of a fit that stops by itself."""
    data = load(dataset, split, rows=rows)
    way: dict[int, tuple[float, list[float]]] = {}

    def train(mll: gpi.mlls.IterativeMarginalLogLikelihood) -> Outcome:
        begin = time.perf_counter()

        def mark(row: gpi.fitting.HistoryRow) -> None:
            """The model is one step ahead of the row."""
            if (row.step + 1) % every == 0:
                way[row.step + 1] = time.perf_counter() - begin, mll.model.flat_parameters().tolist()

        told = by_fit(mll, start=start, callback=mark)
        way[told["steps"]] = time.perf_counter() - begin, mll.model.flat_parameters().tolist()
        return told

    outcome, _ = train_and_test(data, train)
    taken = outcome.pop("steps")
    marks = [(step, *mark) for step, mark in sorted(way.items()) if step <= taken]
    return outcome | {"steps_taken": taken, "train_rows": len(data.train_y), "way": marks}


contender("total", FIT)(partial(fitted, "current"))
contender("total", FIT_PREPARED)(partial(fitted, "subsets"))


@contender("total", EXACT_SCORES)
@torch.no_grad()
def exact_scores(*, dataset: str, split: int, rows: int | None, parameters: list[list[float]]) -> Outcome:
    """What predictions by a Cholesky factor in float64 make of hyperparameters: a log-likelihood for each."""
    data = load(dataset, split, rows=rows, dtype=torch.float64)
    found = []
    for values in parameters:
        model = MaternRegression(data).eval()
        model.set_flat_parameters(torch.tensor(values, dtype=torch.float64))
        kernel, noise = model.covar_module, model.likelihood.noise
        factor = torch.linalg.cholesky(kernel(data.train_x).add_diagonal(noise).to_dense())
        cross = torch.linalg.solve_triangular(factor, kernel(data.train_x, data.test_x).to_dense(), upper=False)
        mean = cross.mT @ torch.linalg.solve_triangular(factor, data.train_y.unsqueeze(-1), upper=False)
        variance = kernel(data.test_x, diag=True) - cross.square().sum(-2) + noise
        found.append(regression_scores(mean.squeeze(-1), variance, data.test_y)[1])
    return {"log_likelihoods": found}


@app.command()
def total(
    dataset: ChosenData = "elevators",
    split: ChosenSplit = 0,
    rows: FirstRows = None,
    steps: int = 100,
    only: Annotated[
        list[str] | None,
        names_of(
            EXACT,
            f"Contenders with the same steps, of: {'; '.join(EXACT)}. By default {' and '.join(SAME_STEPS)}.",
        ),
    ] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds of training and prediction together, and the quality they buy, beside the published one."""
    options = {"dataset": dataset, "split": split, "rows": rows}
    outcomes = {}
    for name in OWN + (SAME_STEPS if only is None else only):
        taken = round(REMAINING * steps) if name == PREPARED else steps
        of_adam = {"steps": taken, "every": max(1, taken // MARKS)}
        given = options | ({"every": EVERY} if name in (FIT, FIT_PREPARED) else of_adam)
        outcomes |= run_contenders("total" if name in OWN else CASE, [name], threads=threads, **given)
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
    parameters = [values for o in good.values() for _, _, values in o["way"]]
    exact = run_contenders("total", [EXACT_SCORES], threads=threads, parameters=parameters, **options)
    for found in succeeded(exact).values():
        _show_ways(good, found["log_likelihoods"])
    finish(f"total_{dataset}", options | {"steps": steps}, threads, outcomes=outcomes | exact)


def _show_ways(good: dict[str, Outcome], log_likelihoods: list[float]) -> None:
    """What every contender's hyperparameters were worth on its way, and how far below the best of all that is."""
    scores, best = iter(log_likelihoods), max(log_likelihoods)
    rows = []
    for name, outcome in good.items():
        for step, seconds, _ in outcome["way"]:
            score = next(scores)
            rows.append([name, str(step), f"{seconds:.0f}", f"{score:.4f}", f"{best - score:.4f}"])
    columns = ["", "step", "s training", "log-likelihood", "below best"]
    show("Hyperparameters on the way, by exact predictions", columns, rows)

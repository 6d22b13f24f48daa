"""One evaluation of the marginal log likelihood under each preconditioner, at the hyperparameters of small subsets."""

import time

import torch

import gpy_iterative as gpi
from benchmarks.command_line import FirstRows, SeveralData, app, console, finish, show
from benchmarks.datasets import load
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome
from gpy_iterative.preconditioners import LowRankPlusVecchia, PreconditionerRecipe, RandomlyPivotedCholesky, Vecchia
from gpy_iterative.solvers import ConjugateGradients

RECIPES: dict[str, PreconditionerRecipe] = {
    "low rank 500": RandomlyPivotedCholesky(500),
    "Vecchia": Vecchia(),
    "low rank plus Vecchia": LowRankPlusVecchia(),
}
DATASETS = ["elevators", "protein", "pol", "kin40k"]
PROBES = 8


def evaluations(dataset: str, rows: int | None, max_epochs: float) -> dict[str, Outcome]:
    """Iterations, seconds with the gradient, and the value's standard error by recipe."""
    data = load(dataset, rows=rows)
    model = MaternRegression(data)
    gpi.initialize_from_subsets(model, model.likelihood, generator=0)
    model.train()
    found: dict[str, Outcome] = {}
    for name, recipe in RECIPES.items():
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            model.likelihood,
            model,
            num_probes=PROBES,
            solver=ConjugateGradients(preconditioner=recipe, max_epochs=max_epochs),
            generator=0,
        )
        start = time.perf_counter()
        value = mll(model(data.train_x), data.train_y)
        value.backward()
        seconds, report = time.perf_counter() - start, mll.report
        found[name] = {
            "rows": len(data.train_y),
            "status": report.status.name,
            "iterations": report.iterations,
            "seconds": seconds,
            "value": value.item(),
            "value_sem": report.value_sem.item(),
        }
    return found


def shown(outcome: Outcome) -> str:
    """A cell of the table."""
    more = "" if outcome["status"] == "CONVERGED" else "more than "
    return f"{more}{outcome['iterations']} iterations, {outcome['seconds']:.1f} s, {outcome['value_sem']:.4f}"


@app.command()
def preconditioners(
    datasets: SeveralData = DATASETS,
    rows: FirstRows = None,
    max_epochs: float = 300,
) -> None:
    """Iterations, seconds and the value's standard error of one evaluation under each preconditioner; some minutes."""
    outcomes: dict[str, dict[str, Outcome]] = {}
    for dataset in datasets:
        outcomes[dataset] = evaluations(dataset, rows, max_epochs)
        console.print(dataset, *map(shown, outcomes[dataset].values()), sep=" | ")
    show(
        f"one evaluation with {PROBES} probes and its gradient; standard error of the value per datum",
        ["data", *RECIPES],
        [[name, *map(shown, found.values())] for name, found in outcomes.items()],
    )
    finish("preconditioners", {"rows": rows, "max_epochs": max_epochs}, torch.get_num_threads(), outcomes=outcomes)

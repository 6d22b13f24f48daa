"""What a trained model predicts: root mean square error and log-likelihood on the held-out rows."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, finish, run_contenders, show, succeeded_or_exit
from benchmarks.datasets import load
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.training import posterior_scores, take_step

MakeMll = Callable[..., gpi.mlls.IterativeMarginalLogLikelihood]


def train_and_predict(
    make: MakeMll, *, dataset: str, split: int, rows: int | None, steps: int, rate: float, scales: bool
) -> Outcome:
    """Adam from the papers' start, then the posterior on the test rows of the split.

    Args:
        make: the marginal log likelihood.
        dataset, split, rows: training data.
        steps, rate: of Adam.
        scales: whether Adam moves the scales of signal and noise, as in the paper, or their variances, as in GPyTorch.
    """
    data = load(dataset, split, rows=rows)
    model = MaternRegression(data, scales=scales)
    mll = make(model.likelihood, model, generator=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    start = time.perf_counter()
    for _ in range(steps):
        take_step(model, mll, optimizer, data)
    trained = time.perf_counter()
    posterior = mll.posterior()
    rmse, log_likelihood = posterior_scores(model, posterior, data)
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds_training": trained - start,
        "seconds_prediction": time.perf_counter() - trained,
        "variance_error": posterior.variance_error(data.test_x).median,
    }


contender("quality", "ours")(partial(train_and_predict, gpi.mlls.HutchinsonMarginalLogLikelihood))
contender("quality", "pathwise")(
    partial(train_and_predict, partial(gpi.mlls.PathwiseMarginalLogLikelihood, num_probes=64, num_frequencies=1000))
)


@app.command()
def quality(
    dataset: str = "elevators",
    splits: int = 1,
    rows: int | None = None,
    steps: int = 100,
    rate: float = 0.1,
    pathwise: Annotated[
        bool, typer.Option("--pathwise", help="Pathwise probes, saved under a name of their own.")
    ] = False,
    scales: Annotated[
        bool, typer.Option("--scales", help="Adam moves the scales of signal and noise, as in the paper.")
    ] = False,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and log-likelihood after training, split by split, beside the published means of exact gradients."""
    outcomes: dict[str, Outcome] = {}
    name = "pathwise" if pathwise else "ours"
    for split in range(splits):
        options = {"dataset": dataset, "split": split, "rows": rows, "steps": steps, "rate": rate, "scales": scales}
        outcomes[str(split)] = run_contenders("quality", [name], threads=threads, **options)[name]
    theirs = published.LIN.get(dataset, {}).get("CG", {}).get("standard, cold")
    show(
        f"{dataset}, {steps} steps",
        ["split", "RMSE", "published", "log-likelihood", "published", "s training", "s prediction", "variance error"],
        [
            [
                split,
                f"{o['rmse']:.4f}",
                f"{theirs.rmse:.4f}" if theirs else "",
                f"{o['log_likelihood']:.4f}",
                f"{theirs.log_likelihood:.4f}" if theirs else "",
                f"{o['seconds_training']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                f"{o['variance_error']:.3f}",
            ]
            for split, o in succeeded_or_exit(outcomes).items()
        ],
    )
    file = f"quality_pathwise_{dataset}" if pathwise else f"quality_{dataset}"
    finish(file, {"steps": steps, "rate": rate, "rows": rows, "scales": scales}, threads, outcomes=outcomes)

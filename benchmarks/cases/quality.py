"""What a trained model predicts: root mean square error and log-likelihood on the held-out rows."""

import time

import torch

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, finish, run_contenders, show
from benchmarks.datasets import load
from benchmarks.metrics import regression_scores
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender


@contender("quality", "ours")
def train_and_predict(*, dataset: str, split: int, rows: int | None, steps: int, rate: float) -> Outcome:
    """Adam from the papers' start, then the posterior on the test rows of the split."""
    data = load(dataset, split, rows=rows)
    model = MaternRegression(data)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(model(data.train_x), data.train_y)).backward()
        optimizer.step()
    trained = time.perf_counter()
    posterior = mll.posterior()
    with torch.no_grad():
        prediction = model.likelihood(posterior(data.test_x))
        rmse, log_likelihood = regression_scores(prediction.mean, prediction.variance, data.test_y)
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds_training": trained - start,
        "seconds_prediction": time.perf_counter() - trained,
        "variance_error": posterior.variance_error(data.test_x).median,
    }


@app.command()
def quality(
    dataset: str = "elevators",
    splits: int = 1,
    rows: int | None = None,
    steps: int = 100,
    rate: float = 0.1,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and log-likelihood after training, split by split."""
    outcomes = {}
    for split in range(splits):
        options = {"dataset": dataset, "split": split, "rows": rows, "steps": steps, "rate": rate}
        outcomes[split] = run_contenders("quality", ["ours"], threads=threads, **options)["ours"]
    show(
        f"{dataset}, {steps} steps",
        ["split", "RMSE", "log-likelihood", "s training", "s prediction", "variance error"],
        [
            [
                str(split),
                f"{o['rmse']:.4f}",
                f"{o['log_likelihood']:.4f}",
                f"{o['seconds_training']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                f"{o['variance_error']:.3f}",
            ]
            for split, o in outcomes.items()
        ],
    )
    finish(f"quality_{dataset}", {"steps": steps, "rate": rate, "rows": rows}, threads, outcomes=outcomes)

"""What a trained model predicts: root mean square error and log-likelihood on the held-out rows."""

import math
import time

import torch

import gpy_iterative as gpi
from benchmarks.datasets import load
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
        rmse, log_likelihood = scores(prediction.mean, prediction.variance, data.test_y)
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds_training": trained - start,
        "seconds_prediction": time.perf_counter() - trained,
        "variance_error": posterior.variance_error(data.test_x).median,
    }


def scores(mean: torch.Tensor, variance: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """RMSE, and the mean log density of each target under its own predictive normal."""
    rmse = float((mean - target).square().mean().sqrt())
    log_density = -0.5 * ((mean - target).square() / variance + variance.log() + math.log(2 * math.pi))
    return rmse, float(log_density.mean())

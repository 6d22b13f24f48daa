"""Training as a user writes it, by steps of Adam or by `gpi.fit`, and what comes out in the end."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Literal

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split
from benchmarks.metrics import regression_scores
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome

MakeMll = Callable[..., gpi.mlls.IterativeMarginalLogLikelihood]
#: Trains the model of a marginal log likelihood in place, and returns what there is to tell of it.
Train = Callable[[gpi.mlls.IterativeMarginalLogLikelihood], Outcome]


def take_step(model: ExactGP, mll: MarginalLogLikelihood, optimizer: torch.optim.Optimizer, data: Split) -> float:
    """Value, gradient and a step of the optimiser; returns the loss."""
    optimizer.zero_grad()
    loss = -mll(model(data.train_x), data.train_y)
    loss.backward()
    optimizer.step()
    return loss.item()


def dense_computations() -> AbstractContextManager:
    """GPyTorch's settings for Cholesky factors."""
    return gpytorch.settings.fast_computations(False, False, False)


def close_estimates() -> AbstractContextManager:
    """GPyTorch's settings for 64 probes in place of 10, solved to 0.01 in place of 1."""
    stack = ExitStack()
    stack.enter_context(gpytorch.settings.num_trace_samples(64))
    stack.enter_context(gpytorch.settings.cg_tolerance(0.01))
    return stack


def start_from_neighbourhoods(model: ExactGP) -> None:
    """Sets the hyperparameters to what two neighbourhoods of 1,500 rows agree on: a matter of seconds."""
    gpi.initialize_from_subsets(model, model.likelihood, subset_size=1500, num_subsets=2)


def timed_scores(start: float, score: Callable[[], tuple[float, float]]) -> Outcome:
    """RMSE and log-likelihood, the seconds of the training that began at `start`, and those of the predictions."""
    trained = time.perf_counter()
    rmse, log_likelihood = score()
    seconds = {"seconds": trained - start, "seconds_prediction": time.perf_counter() - trained}
    return seconds | {"rmse": rmse, "log_likelihood": log_likelihood}


@torch.no_grad()
def posterior_scores(
    model: ExactGP, posterior: Callable[[Tensor], MultivariateNormal], data: Split
) -> tuple[float, float]:
    """RMSE and mean log-likelihood of the held-out rows by a latent posterior and the model's likelihood."""
    prediction = model.likelihood(posterior(data.test_x))
    return regression_scores(prediction.mean, prediction.variance, data.test_y)


def by_adam(mll: gpi.mlls.IterativeMarginalLogLikelihood, *, data: Split, steps: int, rate: float = 0.1) -> Outcome:
    """So many steps of Adam: values a datum with their standard errors, and passes over the kernel matrix."""
    optimizer = torch.optim.Adam(mll.model.parameters(), lr=rate)
    values, sems, epochs = [], [], 0.0
    for _ in range(steps):
        values.append(-take_step(mll.model, mll, optimizer, data))
        sems.append(mll.report.value_sem.item())
        epochs += mll.report.epochs
    return {"status": "", "steps": steps, "values": values, "value_sems": sems, "epochs": epochs}


def by_fit(
    mll: gpi.mlls.IterativeMarginalLogLikelihood,
    *,
    start: Literal["current", "subsets"] = "current",
    callback: Callable[[gpi.fitting.HistoryRow], object] | None = None,
) -> Outcome:
    """`gpi.fit` until it stops by itself: the same of its history, how it ended, and what was left to gain."""
    result = gpi.fit(mll, start=start, progress=False, callback=callback)
    return {
        "status": result.status.name,
        "steps": result.steps,
        "values": [row.value for row in result.history],
        "value_sems": [row.value_sem for row in result.history],
        "left_to_gain": [row.left_to_gain for row in result.history],
        "epochs": sum(row.epochs or 0.0 for row in result.history),
    }


def train_and_test(
    data: Split, train: Train, *, make: MakeMll = gpi.mlls.HutchinsonMarginalLogLikelihood, scales: bool = False
) -> tuple[Outcome, gpi.prediction.PathwisePosterior]:
    """From the papers' start to scores on the test rows.

    Args:
        data: a split.
        train: `by_adam` or `by_fit` with its options.
        make: the marginal log likelihood.
        scales: whether the parameters are the scales of signal and noise, as in the papers, or their variances.

    Returns:
        What the training tells, its seconds, those of the predictions, and the scores; and the posterior.
    """
    model = MaternRegression(data, scales=scales)
    mll = make(model.likelihood, model, generator=0)
    start = time.perf_counter()
    told = train(mll)
    trained = time.perf_counter()
    posterior = mll.posterior()
    rmse, log_likelihood = posterior_scores(model, posterior, data)
    seconds = {"seconds": trained - start, "seconds_prediction": time.perf_counter() - trained}
    return told | seconds | {"rmse": rmse, "log_likelihood": log_likelihood}, posterior

"""One step of training as a user writes it, and what comes out in the end."""

import torch
from gpytorch.mlls import MarginalLogLikelihood

from benchmarks.datasets import Split
from benchmarks.metrics import regression_scores
from benchmarks.models import MaternRegression
from gpy_iterative.prediction import PathwisePosterior


def take_step(
    model: MaternRegression, mll: MarginalLogLikelihood, optimizer: torch.optim.Optimizer, data: Split
) -> float:
    """Value, gradient and a step of the optimiser; returns the loss."""
    optimizer.zero_grad()
    loss = -mll(model(data.train_x), data.train_y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def posterior_scores(model: MaternRegression, posterior: PathwisePosterior, data: Split) -> tuple[float, float]:
    """RMSE and mean log-likelihood of the held-out rows."""
    prediction = model.likelihood(posterior(data.test_x))
    return regression_scores(prediction.mean, prediction.variance, data.test_y)

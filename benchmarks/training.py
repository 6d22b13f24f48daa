"""One step of training as a user writes it, and what comes out in the end."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split
from benchmarks.metrics import regression_scores


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
    """Sets the hyperparameters to the average of fits to two neighbourhoods of 1,500 rows: a matter of seconds."""
    gpi.initialize_from_subsets(model, model.likelihood, subset_size=1500, num_subsets=2, optimizer_steps=30)


@torch.no_grad()
def posterior_scores(
    model: ExactGP, posterior: Callable[[Tensor], MultivariateNormal], data: Split
) -> tuple[float, float]:
    """RMSE and mean log-likelihood of the held-out rows by a latent posterior and the model's likelihood."""
    prediction = model.likelihood(posterior(data.test_x))
    return regression_scores(prediction.mean, prediction.variance, data.test_y)

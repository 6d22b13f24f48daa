"""The rival with inducing points: GPyTorch's SVGP, as its tutorial trains it, for regression and for classification."""

import time
from collections.abc import Callable
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    VariationalStrategy,
)
from scipy.cluster.vq import kmeans2
from torch import Tensor

#: Rows that centres of clusters are found from.
CLUSTERED_ROWS = 20_000


class VariationalGP(gpytorch.models.ApproximateGP):
    """Learned inducing points with a full covariance.

    Args:
        inducing_points: to start from, [m, d].
        mean, kernel: the prior of every latent function.
        classes: several latent functions that share the points, or None for a single one.
    """

    def __init__(
        self,
        inducing_points: Tensor,
        mean: gpytorch.means.Mean,
        kernel: gpytorch.kernels.Kernel,
        classes: int | None = None,
    ) -> None:
        batch = torch.Size([] if classes is None else [classes])
        distribution = CholeskyVariationalDistribution(len(inducing_points), batch_shape=batch)
        strategy = VariationalStrategy(self, inducing_points.clone(), distribution)
        super().__init__(
            strategy if classes is None else IndependentMultitaskVariationalStrategy(strategy, num_tasks=classes)
        )
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def random_rows(x: Tensor, count: int) -> Tensor:
    """Inducing points to start from: training rows drawn with seed 0."""
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]]


def cluster_centres(x: Tensor, count: int) -> Tensor:
    """Inducing points to start from: centres of k-means on random training rows; as many as these at the most."""
    rows = random_rows(x, CLUSTERED_ROWS)
    centres, _ = kmeans2(
        rows.numpy(), min(count, len(rows)), minit="points", seed=0
    )  # "++" takes longer than some trainings
    return torch.as_tensor(centres).to(x)


class VariationalTraining:
    """Adam on mini-batches of the evidence bound, all parameters at one rate.

    Args:
        model, likelihood: what is trained.
        x, y: training data.
        batch_size: rows drawn for a step.
        rate: Adam's at the start.
        decay: what is left of the rate at the end.
    """

    def __init__(
        self,
        model: gpytorch.models.ApproximateGP,
        likelihood: gpytorch.likelihoods.Likelihood,
        x: Tensor,
        y: Tensor,
        *,
        batch_size: int = 1024,
        rate: float = 0.01,
        decay: float = 0.1,
    ) -> None:
        self.model, self.likelihood = model, likelihood
        self.x, self.y = x, y
        self.batch_size, self.rate, self.decay = batch_size, rate, decay
        self.generator = torch.Generator().manual_seed(0)
        self.mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
        self.optimizer = torch.optim.Adam(list(self.mll.parameters()), lr=rate)

    def step(self, fraction: float) -> float:
        """One step, when `fraction` of the training is done; returns the loss."""
        self.optimizer.param_groups[0]["lr"] = self.rate * self.decay ** min(1.0, fraction)
        batch = torch.randint(len(self.x), (self.batch_size,), generator=self.generator)
        self.optimizer.zero_grad()
        loss = -self.mll(self.model(self.x[batch]), self.y[batch])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train_for(self, seconds: float, report: Callable[[float, float], object] = lambda spent, loss: None) -> int:
        """Steps for so long; `report` is told the seconds and the loss of each. Returns their number."""
        start, steps, spent = time.perf_counter(), 0, 0.0
        while spent < seconds:
            loss = self.step(spent / seconds)
            steps, spent = steps + 1, time.perf_counter() - start
            report(spent, loss)
        return steps

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "mll": self.mll.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.mll.load_state_dict(state["mll"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])

    @torch.no_grad()
    def predict(self, x: Tensor) -> MultivariateNormal:
        """Of targets, noise included."""
        self.mll.eval()
        prediction = self.likelihood(self.model(x))
        self.mll.train()
        return prediction

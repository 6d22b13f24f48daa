"""Fits of coregionalisation factors, whose curvature counts the latent functions' degrees of freedom, not the data."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

import gpy_iterative as gpi

TASKS = 3


class Coregionalised(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=TASKS)
        self.covar_module = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=TASKS, rank=1)

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("has_global_noise", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tasks_with_unequal_noises_are_fitted(seed: int, has_global_noise: bool) -> None:
    """Factors moved by up to 500: fits took all their steps, or ended STAGNATED."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(120, 1, generator=generator, dtype=torch.float64)
    noise = torch.logspace(-1.7, -0.3, TASKS, dtype=torch.float64)
    y = (6 * x + torch.arange(TASKS)).sin() + noise * torch.randn(120, TASKS, generator=generator, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=TASKS, has_global_noise=has_global_noise)
    model = Coregionalised(x, y, likelihood).double()
    start = torch.randn(TASKS, 1, generator=generator, dtype=torch.float64)
    model.covar_module.task_covar_module.covar_factor.data.copy_(start)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
    result = gpi.fit(mll, progress=False, max_steps=20)
    assert result.status in (gpi.fitting.FitStatus.CONVERGED, gpi.fitting.FitStatus.BOUND)
    assert max(row.step_length for row in result.history) < 20

"""Small GPyTorch models of every kind a user brings, for the marginal log likelihoods' tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from torch import Tensor


class Regression(gpytorch.models.ExactGP):
    """Constant mean, any kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: kernels.Kernel, batch: tuple[int, ...] = ()):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size(batch))
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class DeepKernelRegression(Regression):
    """A network in front of the kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any):
        super().__init__(x, y, likelihood, kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2)))
        self.network = torch.nn.Sequential(torch.nn.Linear(x.shape[-1], 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))

    def forward(self, x: Tensor) -> MultivariateNormal:
        return super().forward(self.network(x))


class SumInForward(Regression):
    """Two kernel calls added, scaled and jittered in `forward`."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any):
        super().__init__(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)))
        self.second = kernels.RBFKernel(active_dims=(0,))

    def forward(self, x: Tensor) -> MultivariateNormal:
        covariance = self.covar_module(x) + 0.7 * self.second(x)
        return MultivariateNormal(self.mean_module(x), covariance.add_jitter(1e-3))


class MultitaskRegression(gpytorch.models.ExactGP):
    """Two tasks, Kronecker covariance."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2, rank=1)

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True)
class Case:
    """A model, its likelihood, and how the mll is called."""

    model: gpytorch.models.ExactGP
    likelihood: Any
    x: Tensor
    y: Tensor
    params: tuple[Any, ...] = ()


def data(n: int = 40, d: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Seed-free inputs [n, d] in a cube and standardised targets [n]."""
    index = torch.arange(1, n + 1, dtype=torch.float64)
    x = (index[:, None] * torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], dtype=torch.float64)[:d].sqrt()) % 1.0 * 4 - 2
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, -1] + 0.1 * torch.cos(37.0 * index)
    return x.to(dtype), ((y - y.mean()) / y.std()).to(dtype)


def _move(model: gpytorch.models.ExactGP, seed: int = 0) -> None:
    """Distinct hyperparameters, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def regression(kernel: kernels.Kernel, n: int = 40, dtype: torch.dtype = torch.float64, **options: Any) -> Case:
    x, y = data(n, dtype=dtype)
    likelihood = GaussianLikelihood(**options)
    model = Regression(x, y, likelihood, kernel).to(dtype)
    _move(model)
    return Case(model, likelihood, x, y)


def _batch() -> Case:
    x, y = data()
    shape = torch.Size([2])
    likelihood = GaussianLikelihood(batch_shape=shape)
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3, batch_shape=shape), batch_shape=shape)
    model = Regression(x, torch.stack([y, y.flip(0)]), likelihood, kernel, (2,)).double()
    _move(model)
    return Case(model, likelihood, x, torch.stack([y, y.flip(0)]))


def _deep() -> Case:
    x, y = data()
    likelihood = GaussianLikelihood()
    generator = torch.Generator().manual_seed(3)
    model = DeepKernelRegression(x, y, likelihood).double()
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return Case(model, likelihood, x, y)


def _sum_in_forward() -> Case:
    x, y = data()
    likelihood = GaussianLikelihood()
    model = SumInForward(x, y, likelihood).double()
    _move(model)
    return Case(model, likelihood, x, y)


def _fixed_noise() -> Case:
    x, y = data()
    likelihood = FixedNoiseGaussianLikelihood(noise=torch.linspace(0.05, 0.3, 40).double(), learn_additional_noise=True)
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=3))).double()
    _move(model)
    return Case(model, likelihood, x, y)


def _multitask() -> Case:
    x, y = data(25)
    targets = torch.stack([y, y.flip(0)], dim=-1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    model = MultitaskRegression(x, targets, likelihood).double()
    _move(model)
    return Case(model, likelihood, x, targets)


def _multitask_low_rank_noise() -> Case:
    x, y = data(25)
    targets = torch.stack([y, y.flip(0)], dim=-1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2, rank=1)
    model = MultitaskRegression(x, targets, likelihood).double()
    _move(model)
    return Case(model, likelihood, x, targets)


def _with_priors() -> Case:
    return regression(
        kernels.ScaleKernel(
            kernels.RBFKernel(ard_num_dims=3, lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0)),
            outputscale_prior=gpytorch.priors.GammaPrior(2.0, 0.15),
        ),
        noise_prior=gpytorch.priors.GammaPrior(1.1, 0.05),
    )


def _inducing_points() -> Case:
    x, y = data()
    likelihood = GaussianLikelihood()
    base = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3))
    kernel = kernels.InducingPointKernel(base, inducing_points=x[::4].clone(), likelihood=likelihood)
    model = Regression(x, y, likelihood, kernel).double()
    _move(model)
    return Case(model, likelihood, x, y)


def _scaled(kernel: Callable[[], kernels.Kernel]) -> Callable[[], Case]:
    return lambda: regression(kernels.ScaleKernel(kernel()))


CASES: dict[str, Callable[[], Case]] = {
    "rbf": _scaled(lambda: kernels.RBFKernel(ard_num_dims=3)),
    "matern-1/2": _scaled(lambda: kernels.MaternKernel(nu=0.5)),
    "matern-3/2": _scaled(lambda: kernels.MaternKernel(nu=1.5, ard_num_dims=3)),
    "matern-5/2": _scaled(lambda: kernels.MaternKernel(nu=2.5)),
    "rational-quadratic": _scaled(lambda: kernels.RQKernel()),
    "unscaled": lambda: regression(kernels.RBFKernel()),
    "additive": lambda: regression(
        kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, active_dims=(0, 2))) + kernels.RBFKernel(active_dims=(1,))
    ),
    "product": _scaled(lambda: kernels.PeriodicKernel(active_dims=(0,)) * kernels.RBFKernel(active_dims=(1, 2))),
    "spectral-mixture": lambda: regression(kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3)),
    "linear": _scaled(lambda: kernels.LinearKernel()),
    "deep": _deep,
    "sum-in-forward": _sum_in_forward,
    "batch": _batch,
    "fixed-noise": _fixed_noise,
    "multitask": _multitask,
    "multitask-low-rank-noise": _multitask_low_rank_noise,
    "priors": _with_priors,
    "inducing-points": _inducing_points,
}

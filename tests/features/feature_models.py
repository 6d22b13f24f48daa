"""Models of every kernel with a finite feature map, for the tests of mini-batch marginal log likelihoods."""

from collections.abc import Callable

import torch
from gpytorch import kernels
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

import gpy_iterative as gpi
from tests.exact.gaussian_models import Case, Regression, data


class Quadratic(gpi.kernels.FiniteFeatureKernel):
    """A user's own: 1, x, x^2 with a learned slope."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.slope = torch.nn.Parameter(torch.tensor(0.7))

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x[..., :1]), self.slope * x, x.square()], dim=-1)


class Counting(torch.nn.Module):
    """Remembers how many rows it was called with."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[-2])
        return self.module(x)


def fourier(num_samples: int = 6, num_dims: int = 3, **options) -> kernels.RFFKernel:
    kernel = kernels.RFFKernel(num_samples=num_samples, num_dims=num_dims, **options)
    kernel.randn_weights = torch.randn(num_dims, num_samples, generator=torch.Generator().manual_seed(0))
    return kernel


def network(width: int = 5, inputs: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(inputs, 7), torch.nn.Tanh(), torch.nn.Linear(7, width))


KERNELS: dict[str, Callable[[], kernels.Kernel]] = {
    "linear": lambda: kernels.LinearKernel(),
    "linear-ard": lambda: kernels.ScaleKernel(kernels.LinearKernel(ard_num_dims=2, active_dims=(0, 2))),
    "fourier": lambda: kernels.ScaleKernel(fourier()),
    "fourier-ard": lambda: kernels.ScaleKernel(fourier(ard_num_dims=3)),
    "polynomial": lambda: kernels.ScaleKernel(kernels.PolynomialKernel(power=3)),
    "additive": lambda: (
        kernels.ScaleKernel(
            # (GPyTorch adds two low-rank kernels through a jittered factor: one of two is dense here.)
            kernels.ScaleKernel(fourier(4, 2, active_dims=(0, 1))) + kernels.PolynomialKernel(power=1, active_dims=(2,))
        )
        + kernels.ConstantKernel()
    ),
    "product": lambda: kernels.ScaleKernel(fourier(3, 1, active_dims=(1,))) * kernels.LinearKernel(active_dims=(0, 2)),
    "own": lambda: kernels.ScaleKernel(Quadratic()),
    "deep": lambda: gpi.kernels.DeepFeatureKernel(network(), kernels.LinearKernel()),
    "deep-fourier": lambda: kernels.ScaleKernel(gpi.kernels.DeepFeatureKernel(network(), fourier(8, 5))),
    "more-features-than-data": lambda: kernels.ScaleKernel(fourier(40)),
}


def feature_case(
    kernel: kernels.Kernel, n: int = 40, dtype: torch.dtype = torch.float64, likelihood: object = None
) -> Case:
    """A regression whose parameters were moved from their defaults, the same for the same kernel."""
    x, y = data(n, dtype=dtype)
    likelihood = GaussianLikelihood() if likelihood is None else likelihood
    model = Regression(x, y, likelihood, kernel).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return Case(model, likelihood, x, y)


def fixed_noise_case(n: int = 40) -> Case:
    noise = torch.linspace(0.05, 0.3, n).double()
    return feature_case(
        kernels.ScaleKernel(fourier()), n, likelihood=FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True)
    )

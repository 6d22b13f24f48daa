"""Small problems with likelihoods that are not Gaussian, for everything that Laplace's method touches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpytorch
import gpytorch.likelihoods as gl
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.likelihoods import LogitBernoulliLikelihood, PoissonLogLikelihood
from gpy_iterative.linear_operators import KernelProducts, latent_prior
from gpy_iterative.linear_operators.latent import LatentPrior


class LaplaceModel(gpi.models.IterativeLaplaceGP):
    """Constant means and RBF kernels: one function, or C with kernels of their own ("own"), one kernel ("shared"), the
    same as a multitask prior ("multitask"), or correlated functions ("coregionalised").
    """

    def __init__(
        self, x: Tensor, y: Tensor, likelihood: gl.Likelihood, latents: int = 1, kind: str = "own", **options: Any
    ):
        super().__init__(x, y, likelihood, **options)
        self.kind, self.latents = kind, latents
        batch = torch.Size([latents]) if latents > 1 else torch.Size([])
        own = batch if kind in ("own", "multitask") else torch.Size([])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=own), batch_shape=own)
        if kind == "coregionalised":
            self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=latents)
            self.covar_module = gpytorch.kernels.MultitaskKernel(
                gpytorch.kernels.RBFKernel(), num_tasks=latents, rank=1
            )
            self.covar_module.task_covar_module.initialize(covar_factor=torch.cos(torch.arange(latents)).unsqueeze(-1))
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        mean, covariance = self.mean_module(x), self.covar_module(x)
        if self.kind == "coregionalised":
            return MultitaskMultivariateNormal(mean, covariance)
        prior = MultivariateNormal(mean, covariance)
        return MultitaskMultivariateNormal.from_batch_mvn(prior) if self.kind == "multitask" else prior


class Exposed(gl.likelihood._OneDimensionalLikelihood):
    """Counts under exposures, which come as an argument."""

    def forward(self, function_samples: Tensor, *args: Tensor, **kwargs: Any) -> torch.distributions.Poisson:
        return torch.distributions.Poisson((args[0] if args else 1.0) * function_samples.exp())


@dataclass
class Case:
    """A model with its data."""

    model: LaplaceModel
    x: Tensor
    y: Tensor

    @property
    def likelihood(self) -> gl.Likelihood:
        return self.model.likelihood

    def prior(self) -> LatentPrior:
        """The prior at the training points, without graph."""
        prior = latent_prior(gpytorch.Module.__call__(self.model, self.x), KernelProducts())
        return LatentPrior(prior.operator.detach(), prior.mean.detach())

    def pointwise(self) -> gpi.likelihoods.PointwiseLikelihood:
        return gpi.likelihoods.PointwiseLikelihood(self.likelihood, self.y, self.model.latents)


def inputs(n: int) -> Tensor:
    """[n, 2] in [-2, 2]; no random numbers."""
    index = torch.arange(1, n + 1, dtype=torch.float64)
    return (index[:, None] * torch.tensor([2.0, 3.0], dtype=torch.float64).sqrt()) % 1.0 * 4 - 2


def _binary(signal: Tensor, noise: Tensor) -> Tensor:
    return (signal + 0.8 * noise > 0).double()


def _counts(signal: Tensor, noise: Tensor) -> Tensor:
    return (signal + 0.3 * noise).exp().mul(1.5).round()


def _classes(signal: Tensor, noise: Tensor) -> Tensor:
    return (signal + 0.3 * noise > -0.4).long() + (signal - 0.3 * noise > 0.5).long()


def _real(signal: Tensor, noise: Tensor) -> Tensor:
    outliers = torch.zeros_like(noise)
    outliers[::11] = 3.0
    return signal + 0.3 * noise + outliers


def _fractions(signal: Tensor, noise: Tensor) -> Tensor:
    return torch.sigmoid(2 * signal + 0.5 * noise)


#: name -> (likelihood, targets from a signal and noise, latent functions)
LIKELIHOODS: dict[str, tuple[Callable[[], gl.Likelihood], Callable[[Tensor, Tensor], Tensor], int]] = {
    "probit": (gl.BernoulliLikelihood, _binary, 1),
    "logit": (LogitBernoulliLikelihood, _binary, 1),
    "poisson-log": (PoissonLogLikelihood, _counts, 1),
    "poisson-softplus": (gl.PoissonLikelihood, _counts, 1),
    "negative-binomial": (gl.NegativeBinomialLikelihood, _counts, 1),
    "student": (gl.StudentTLikelihood, _real, 1),
    "beta": (gl.BetaLikelihood, _fractions, 1),
    "gaussian": (gl.GaussianLikelihood, _real, 1),
    "softmax": (lambda: gl.SoftmaxLikelihood(num_classes=3, mixing_weights=False), _classes, 3),
    "softmax-mixed": (lambda: _mixed(3), _classes, 3),
    "softmax-wide": (lambda: _mixed(4), _classes, 4),
}


def _mixed(features: int) -> gl.SoftmaxLikelihood:
    likelihood = gl.SoftmaxLikelihood(num_features=features, num_classes=3)
    weights = torch.cos(torch.arange(3.0 * features) * 1.7 + 0.4).view(3, features)
    likelihood.mixing_weights.data.copy_(weights)
    return likelihood


def add_constant(problem: Case, constant: float) -> None:
    """Adds a constant kernel to a model of one latent function, whose lengthscale becomes .3."""
    trend = gpytorch.kernels.ConstantKernel().double()
    trend.constant = torch.tensor(constant, dtype=torch.float64)
    problem.model.covar_module.base_kernel.lengthscale = 0.3
    problem.model.covar_module = problem.model.covar_module + trend


def case(name: str, n: int = 30, kind: str = "own", dtype: torch.dtype = torch.float64, **options: Any) -> Case:
    """One of the likelihoods on n points, with means and hyperparameters that are all different."""
    make, targets, latents = LIKELIHOODS[name]
    x = inputs(n)
    y = targets(torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1], torch.cos(37.0 * torch.arange(1, n + 1, dtype=torch.float64)))
    likelihood = make().to(dtype)
    x, y = x.to(dtype), y.to(dtype) if y.is_floating_point() else y
    model = LaplaceModel(x, y, likelihood, latents, kind, **options).to(dtype)
    if kind != "coregionalised":
        scales = (
            torch.arange(latents, dtype=dtype) if kind != "shared" and latents > 1 else torch.zeros((), dtype=dtype)
        )
        model.covar_module.outputscale = 1.5 * 0.6**scales
        lengthscale = 0.7 * 1.5**scales
        model.covar_module.base_kernel.lengthscale = lengthscale.view(-1, 1, 1) if lengthscale.dim() else lengthscale
        offsets = 0.1 + 0.2 * torch.arange(latents, dtype=dtype)
        model.mean_module.initialize(constant=offsets if latents > 1 else offsets[0])
    return Case(model, x, y)

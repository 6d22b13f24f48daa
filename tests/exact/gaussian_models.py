"""Small GPyTorch models of every kind a user brings, for the marginal log likelihoods' tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    DirichletClassificationLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
    _GaussianLikelihoodBase,
)
from gpytorch.likelihoods.noise_models import HeteroskedasticNoise
from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator
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
    """Two tasks, Kronecker covariance unless the kernel is another one."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        likelihood: Any,
        kernel: kernels.Kernel | None = None,
        mean: gpytorch.means.Mean | None = None,
    ):
        super().__init__(x, y, likelihood)
        self.mean_module = mean or gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = kernel or kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2, rank=1)

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class ListedOutputs(Regression):
    """Two values for each input, as one list: BoTorch's HigherOrderGP."""

    def forward(self, x: Tensor) -> MultivariateNormal:
        prior, tasks = super().forward(x), x.new_tensor([[1.0, 0.3], [0.3, 0.7]])
        covariance = KroneckerProductLinearOperator(prior.lazy_covariance_matrix, DenseLinearOperator(tasks))
        return MultivariateNormal(prior.mean.repeat_interleave(2, dim=-1), covariance)


class IndependentOutputs(Regression):
    """Two outputs as a batch of two models."""

    def forward(self, x: Tensor) -> MultitaskMultivariateNormal:
        return MultitaskMultivariateNormal.from_batch_mvn(super().forward(x))


class SummedBatch(Regression):
    """One kernel for every input dimension, evaluated as a batch and summed: additive structure."""

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x.mT.unsqueeze(-1)).sum(-3))


class UserKernel(kernels.Kernel):
    """Somebody's own: for two lists of points, and for no batches of them."""

    has_lengthscale = True

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        distances = ((x1[:, None] - x2[None]) / self.lengthscale).abs().sum(-1)
        return torch.exp(-distances.diagonal() if diag else -distances)


class BorrowingKernel(kernels.Kernel):
    """Uses a network and an amplitude that it does not own."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.borrowed = [network]

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor:
        left, right = self.borrowed[0](x1), self.borrowed[0](x2)
        return self.amplitude * self.covar_dist(left, right, square_dist=True, **params).neg().exp()


class LendingRegression(Regression):
    """A network that mean and kernel share, and an amplitude that the model hands to its kernel at every call."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any):
        network = torch.nn.Sequential(torch.nn.Linear(x.shape[-1], 3), torch.nn.Tanh())
        super().__init__(x, y, likelihood, BorrowingKernel(network) + kernels.RBFKernel())
        self.network, self.amplitude = network, torch.nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor) -> MultivariateNormal:
        amplitude = self.covar_module.kernels[0].amplitude = self.amplitude.exp()
        return MultivariateNormal(amplitude * self.network(x).sum(-1), self.covar_module(x))


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


TWO = torch.Size([2])


def _batch(base: kernels.Kernel | None = None) -> Case:
    x, y = data()
    likelihood = GaussianLikelihood(batch_shape=TWO)
    kernel = kernels.ScaleKernel(base or kernels.RBFKernel(ard_num_dims=3, batch_shape=TWO), batch_shape=TWO)
    model = Regression(x, torch.stack([y, y.flip(0)]), likelihood, kernel, (2,)).double()
    _move(model)
    return Case(model, likelihood, x, torch.stack([y, y.flip(0)]))


def _batch_of_products() -> Case:
    return _batch(kernels.PeriodicKernel(batch_shape=TWO) * kernels.RBFKernel(batch_shape=TWO))


def _independent_outputs() -> Case:
    x, y = data(25)
    targets = torch.stack([y, y.flip(0)], dim=-1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    kernel = kernels.ScaleKernel(kernels.MaternKernel(batch_shape=TWO), batch_shape=TWO)
    model = IndependentOutputs(x, targets, likelihood, kernel, (2,)).double()
    _move(model)
    return Case(model, likelihood, x, targets)


def _listed_outputs() -> Case:
    x, y = data(25)
    likelihood, targets = GaussianLikelihood(), torch.stack([y, y.flip(0)], dim=-1).flatten()
    model = ListedOutputs(x, targets, likelihood, kernels.ScaleKernel(kernels.MaternKernel())).double()
    _move(model)
    return Case(model, likelihood, x, targets)


def _summed_batch() -> Case:
    x, y = data()
    likelihood, shape = GaussianLikelihood(), torch.Size([3])
    kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=shape), batch_shape=shape)
    model = SummedBatch(x, y, likelihood, kernel).double()
    _move(model)
    return Case(model, likelihood, x, y)


def _dirichlet_classification() -> Case:
    x, y = data()
    likelihood = DirichletClassificationLikelihood((y > 0).long(), learn_additional_noise=True, dtype=torch.float64)
    kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=TWO), batch_shape=TWO)
    model = Regression(x, likelihood.transformed_targets, likelihood, kernel, (2,)).double()
    _move(model)
    return Case(model, likelihood, x, likelihood.transformed_targets)


def _heteroskedastic() -> Case:
    """The noise is another GP's posterior mean, at inputs that the likelihood is called with."""
    x, y = data()
    noise_model = Regression(x, torch.cos(x[:, 1]) - 2, GaussianLikelihood(), kernels.RBFKernel()).double()
    likelihood = _GaussianLikelihoodBase(HeteroskedasticNoise(noise_model))
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.RBFKernel())).double()
    _move(model)
    return Case(model, likelihood, x, y, (x,))


def _deep() -> Case:
    x, y = data()
    likelihood = GaussianLikelihood()
    generator = torch.Generator().manual_seed(3)
    model = DeepKernelRegression(x, y, likelihood).double()
    for parameter in model.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return Case(model, likelihood, x, y)


def _lending() -> Case:
    x, y = data()
    likelihood = GaussianLikelihood()
    model = LendingRegression(x, y, likelihood).double()
    _move(model)
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


def _multitask(kernel: kernels.Kernel | None = None) -> Case:
    x, y = data(25)
    targets = torch.stack([y, y.flip(0)], dim=-1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=2)
    with torch.random.fork_rng():  # GPyTorch draws the tasks' covariance
        torch.manual_seed(0)
        model = MultitaskRegression(x, targets, likelihood, kernel).double()
    _move(model)
    return Case(model, likelihood, x, targets)


def _coregionalization() -> Case:
    # GPyTorch overlooks active dims of a multitask kernel's data kernel; the same number is wanted here.
    parts = [kernels.MaternKernel(nu=1.5), kernels.PeriodicKernel(active_dims=(1,))]
    return _multitask(kernels.LCMKernel(parts, num_tasks=2, rank=1))


def _tasks_at_the_same_inputs() -> Case:
    """Two tasks at 16 points, without two data, in random order."""
    points, _ = data(16)
    tasks = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(16)
    x = torch.cat([points[:, :2].repeat_interleave(2, dim=0), tasks.unsqueeze(-1)], dim=-1)
    return _tasks_of_rows(x[torch.randperm(32, generator=torch.Generator().manual_seed(2))][2:])


class TasksOfRows(Regression):
    """One observation of one task in a row; the task follows from the last input."""

    def forward(self, x: Tensor) -> MultivariateNormal:
        task = (x[..., -1:] > 0).to(x)
        return super().forward(torch.cat([x, task], dim=-1))


def _tasks_of_rows(x: Tensor | None = None) -> Case:
    drawn, y = data(30)
    x = drawn if x is None else x
    dims = tuple(range(x.shape[-1])) if x is drawn else (0, 1)
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=len(dims), active_dims=dims))
    likelihood = GaussianLikelihood()
    with torch.random.fork_rng():  # GPyTorch draws the tasks' covariance
        torch.manual_seed(0)
        tasks = kernels.IndexKernel(num_tasks=2, rank=1, active_dims=(3,))
    model = TasksOfRows(x, y, likelihood, kernel * tasks).double()
    _move(model)
    return Case(model, likelihood, x, y)


def _derivatives() -> Case:
    """Observations of a function and of its gradient."""
    x, y = data(12)
    targets = torch.stack([y, y.flip(0), y.cos(), y.sin()], dim=-1)
    likelihood = MultitaskGaussianLikelihood(num_tasks=4)
    kernel = kernels.ScaleKernel(kernels.RBFKernelGrad(ard_num_dims=3))
    model = MultitaskRegression(x, targets, likelihood, kernel, gpytorch.means.ConstantMeanGrad()).double()
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


def _on_grid(missing: int) -> Case:
    """In random order."""
    x = torch.cartesian_prod(*(torch.linspace(-2, 2, size, dtype=torch.float64) for size in (5, 3, 3)))
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(3))][missing:]
    smooth = kernels.RBFKernel(active_dims=(0, 1), ard_num_dims=2)
    case = regression(kernels.ScaleKernel(smooth * kernels.MaternKernel(active_dims=(2,))), len(x))
    case.model.set_train_data(x, case.y)
    return replace(case, x=x)


def _inducing_points() -> Case:
    x, y = data()
    likelihood = GaussianLikelihood()
    base = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3))
    kernel = kernels.InducingPointKernel(base, inducing_points=x[::4].clone(), likelihood=likelihood)
    model = Regression(x, y, likelihood, kernel).double()
    _move(model)
    return Case(model, likelihood, x, y)


def _fourier_features() -> kernels.Kernel:
    kernel = kernels.RFFKernel(num_samples=15, num_dims=3)
    kernel.randn_weights = torch.randn(kernel.randn_weights.shape, generator=torch.Generator().manual_seed(0))
    return kernels.ScaleKernel(kernel)


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
    "separable": _scaled(
        lambda: kernels.MaternKernel(nu=1.5, active_dims=(0, 1), ard_num_dims=2) * kernels.RQKernel(active_dims=(2,))
    ),
    "spectral-mixture": lambda: regression(kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3)),
    "linear": _scaled(lambda: kernels.LinearKernel()),
    "deep": _deep,
    "sum-in-forward": _sum_in_forward,
    "batch": _batch,
    "fixed-noise": _fixed_noise,
    "multitask": _multitask,
    "multitask-low-rank-noise": _multitask_low_rank_noise,
    "priors": _with_priors,
    "complete-grid": lambda: _on_grid(missing=0),
    "incomplete-grid": lambda: _on_grid(missing=5),
    "inducing-points": _inducing_points,
    "coregionalization": _coregionalization,
    "tasks-of-rows": _tasks_of_rows,
    "same-inputs": _tasks_at_the_same_inputs,
    "derivatives": _derivatives,
    "independent-outputs": _independent_outputs,
    "listed-outputs": _listed_outputs,
    "summed-batch": _summed_batch,
    "batch-of-products": _batch_of_products,
    "dirichlet-classification": _dirichlet_classification,
    "heteroskedastic": _heteroskedastic,
    "random-fourier-features": lambda: regression(_fourier_features()),
    "borrowed tensors": _lending,
    "user's own": _scaled(UserKernel),
    "piecewise-polynomial": _scaled(lambda: kernels.PiecewisePolynomialKernel(q=2)),
}

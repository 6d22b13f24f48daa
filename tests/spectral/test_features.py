"""Random features have the kernel as their mean, for every kernel that has features and for what is made of them."""

import gpytorch
import pytest
import torch
from gpytorch import kernels
from scipy import special

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators import KernelTerm, kernel_terms
from gpy_iterative.spectral import (
    RandomFourierFeatures,
    SpectralDensity,
    gamma_quantile,
    has_random_features,
    register_spectral_density,
)
from tests.mlls.gaussian_models import data

KERNELS = {
    "rbf": lambda: kernels.RBFKernel(ard_num_dims=3),
    "matern-1/2": lambda: kernels.MaternKernel(nu=0.5, ard_num_dims=3),
    "matern-3/2": lambda: kernels.MaternKernel(nu=1.5, ard_num_dims=3),
    "matern-5/2": lambda: kernels.MaternKernel(nu=2.5, ard_num_dims=3),
    "rational quadratic": lambda: kernels.RQKernel(ard_num_dims=3),
    "scaled sum": lambda: kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0, 2)) + kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, active_dims=(1,)))
    ),
    "product": lambda: kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0,)) * kernels.MaternKernel(nu=2.5, active_dims=(1, 2))
    ),
    "product of sums": lambda: (
        (kernels.RBFKernel(active_dims=(0,)) + kernels.RBFKernel(active_dims=(1,))) * kernels.RQKernel()
    ),
    "linear": lambda: kernels.ScaleKernel(kernels.LinearKernel()) + kernels.RBFKernel(),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> kernels.Kernel:
    kernel = KERNELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in kernel.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return kernel


def features(kernel: kernels.Kernel, x: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    terms = kernel_terms(kernel(x))
    maker = RandomFourierFeatures(count)
    return maker.features(terms, maker.draw(terms, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_reproduce_the_kernel(name: str, dtype: torch.dtype) -> None:
    kernel, (x, _) = make(name, dtype), data(40, dtype=dtype)
    phi = features(kernel, x, 100_000)
    assert phi.dtype == dtype
    matrix = kernel(x).to_dense()
    assert (phi @ phi.mT - matrix).abs().max() < 0.03 * matrix.max()


def test_one_chi_square_for_each_frequency_not_for_each_coordinate() -> None:
    """The mistake, a product of one-dimensional kernels, is visible at once."""
    kernel, (x, _) = make("matern-3/2"), data(40)
    scaled = x / kernel.lengthscale
    product = torch.ones(40, 40).double()
    for column in scaled.mT:
        r = 3**0.5 * (column[:, None] - column[None]).abs()
        product = product * (1 + r) * torch.exp(-r)
    phi = features(kernel, x, 100_000)
    assert (phi @ phi.mT - product).abs().max() > 0.06  # the features themselves are within 0.03


def test_scale_of_a_term() -> None:
    kernel, (x, _) = make("rbf"), data(40)
    terms = [KernelTerm(kernel, x, torch.tensor(4.0).double())]
    maker = RandomFourierFeatures(1000)
    draws = maker.draw(terms, torch.Generator().manual_seed(0))
    torch.testing.assert_close(maker.features(terms, draws), 2 * features(kernel, x, 1000))


def test_frozen_draws_move_smoothly_with_the_hyperparameters() -> None:
    kernel, (x, _) = make("rational quadratic"), data(20)
    terms = kernel_terms(kernel(x))
    maker = RandomFourierFeatures(200)
    draws = maker.draw(terms, torch.Generator().manual_seed(0))
    before = maker.features(terms, draws)
    for parameter in kernel.parameters():
        parameter.data += 1e-5
    after = maker.features(kernel_terms(kernel(x)), draws)
    change = (after - before).abs().max()
    assert 0 < change < 1e-2


def test_applied_features_are_the_features_times_weights() -> None:
    kernel, (x, _) = make("scaled sum"), data(30)
    terms = kernel_terms(kernel(x))
    maker = RandomFourierFeatures(50)
    draws = maker.draw(terms, torch.Generator().manual_seed(0))
    weights = torch.randn(maker.num_features(terms), 4, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(maker.apply(terms, draws, weights), maker.features(terms, draws) @ weights)


@pytest.mark.parametrize("alpha", [0.05, 0.7, 3.0, 200.0])
def test_gamma_quantile(alpha: float) -> None:
    probability = torch.linspace(0.01, 0.99, 50).double()
    expected = torch.from_numpy(special.gammaincinv(alpha, probability.numpy()) / alpha)
    torch.testing.assert_close(gamma_quantile(probability, torch.tensor([alpha]).double()), expected)


def test_batches_share_their_draws() -> None:
    kernel = kernels.RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = torch.tensor([[[0.5]], [[2.0]]])
    x, _ = data(20)
    phi = features(kernel, x, 100_000)
    assert (phi @ phi.mT - kernel(x).to_dense()).abs().max() < 0.03


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.PeriodicKernel(),
        kernels.RBFKernelGrad(),
        kernels.RBFKernel() + kernels.PolynomialKernel(power=2),
        kernels.LinearKernel() * kernels.RBFKernel(),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_kernels_without_a_density(kernel: kernels.Kernel) -> None:
    x, _ = data(10)
    assert not has_random_features(kernel)
    with pytest.raises(SpectralDensityMissingError, match=r"register_spectral_density[\s\S]*Hutchinson"):
        RandomFourierFeatures(10).draw(kernel_terms(kernel.double()(x)), torch.Generator())


def test_a_registered_density_serves_a_users_kernel() -> None:
    class Laplace1d(kernels.Kernel):
        has_lengthscale = True

        def forward(self, x1: torch.Tensor, x2: torch.Tensor, **params) -> torch.Tensor:
            return torch.exp(-(x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs().squeeze(-1) / self.lengthscale)

    @register_spectral_density(Laplace1d)
    class Cauchy(SpectralDensity):
        def draw(self, kernel, dims, count, normal, uniform):
            return {"cauchy": torch.tan(torch.pi * (uniform(dims, count) - 0.5))}

        def frequencies(self, kernel, draws):
            return draws["cauchy"]

    x, _ = data(30)
    kernel = Laplace1d().double()
    phi = features(kernel, x[:, :1], 100_000)
    assert (phi @ phi.mT - kernel(x[:, :1]).to_dense()).abs().max() < 0.03
    with gpytorch.settings.debug(False):
        assert has_random_features(kernel)


def test_number_of_frequencies() -> None:
    with pytest.raises(ValueError, match="num_frequencies"):
        RandomFourierFeatures(0)

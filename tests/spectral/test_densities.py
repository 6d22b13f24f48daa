"""Spectral densities: quantiles, and which kernels an entry of the registry speaks for."""

from collections.abc import Iterator

import pytest
import torch
from gpytorch import kernels
from scipy import special, stats

from gpy_iterative.linear_operators.prior_parts import kernel_terms
from gpy_iterative.spectral import (
    RandomFourierFeatures,
    SpectralDensity,
    densities,
    register_spectral_density,
    spectral_density,
)
from gpy_iterative.spectral.densities import gamma_quantile
from tests.exact.gaussian_models import data


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries made by a test end with it."""
    monkeypatch.setattr(densities, "_REGISTRY", dict(densities._REGISTRY))
    return


@pytest.mark.parametrize("alpha", [0.05, 0.7, 3.0, 200.0, 1e4])
def test_gamma_quantile(alpha: float) -> None:
    probability = torch.tensor([1e-6, *(i / 50 for i in range(1, 50)), 1 - 1e-9], dtype=torch.float64)
    expected = torch.from_numpy(special.gammaincinv(alpha, probability.numpy()) / alpha)
    torch.testing.assert_close(gamma_quantile(probability, torch.tensor([alpha], dtype=torch.float64)), expected)


def test_gamma_quantile_of_a_heavy_tail_is_finite_and_monotone() -> None:
    """Alpha = 1e-4 puts its mass at 0 and its mean, 1, into quantiles beyond 1e4."""
    quantile = gamma_quantile(
        *(torch.tensor(values, dtype=torch.float64) for values in ([0.5, 0.999, 1 - 1e-8, 1 - 1e-12], [1e-4]))
    )
    assert torch.isfinite(quantile).all()
    assert (quantile.diff() > 0).all()
    assert quantile[-1] > 1e5


def test_gamma_quantile_is_smooth_in_alpha() -> None:
    probability = torch.linspace(0.05, 0.95, 19).double()
    at = lambda alpha: gamma_quantile(probability, torch.tensor([alpha], dtype=torch.float64))
    wide, narrow = ((at(0.7 + h) - at(0.7 - h)) / (2 * h) for h in (2e-4, 1e-4))
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_matern_frequencies_are_multivariate_t(nu: float) -> None:
    """Coordinates are t with 2 nu degrees of freedom, and |omega|^2 / d is F: coordinates share their chi-square."""
    kernel, (x, _) = kernels.MaternKernel(nu=nu).double(), data(5)
    draws = RandomFourierFeatures(20_000).draw(kernel_terms(kernel(x)), torch.Generator().manual_seed(0))
    omega = densities.StudentT().frequencies(
        kernel, {name.removeprefix("term0."): tensor for name, tensor in draws.items()}
    )
    assert stats.kstest(omega[0].numpy(), stats.t(2 * nu).cdf).pvalue > 1e-3
    assert stats.kstest((omega.square().sum(0) / 3).numpy(), stats.f(3, 2 * nu).cdf).pvalue > 1e-3


class RoughRBF(kernels.RBFKernel):
    """A subclass that computes the same."""


class HalvedRBF(kernels.RBFKernel):
    """A subclass whose lengthscale is another."""

    @property
    def lengthscale(self) -> torch.Tensor:
        return kernels.RBFKernel.lengthscale.fget(self) / 2

    @lengthscale.setter
    def lengthscale(self, value: torch.Tensor) -> None:
        self._set_lengthscale(value)


def test_subclasses_count_only_where_they_compute_the_same() -> None:
    patched = kernels.RBFKernel()
    patched.forward = lambda x1, x2, **_: x1 @ x2.mT
    assert spectral_density(RoughRBF()) is spectral_density(kernels.RBFKernel())
    for kernel in (
        HalvedRBF(),
        patched,
        kernels.RBFKernelGrad(),
        kernels.RBFKernelGradGrad(),
        kernels.Matern52KernelGrad(),
    ):
        assert spectral_density(kernel) is None


def test_gpytorchs_keops_kernels_have_the_densities_of_the_stock_ones() -> None:
    assert isinstance(spectral_density(kernels.keops.RBFKernel()), densities.Gaussian)
    assert isinstance(spectral_density(kernels.keops.MaternKernel()), densities.StudentT)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("scaled", [True, False], ids=["with a lengthscale", "without"])
def test_a_registered_density_serves_a_users_kernel(scaled: bool) -> None:
    class Exponential(kernels.Kernel):
        has_lengthscale = scaled

        def forward(self, x1: torch.Tensor, x2: torch.Tensor, **params) -> torch.Tensor:
            distance = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs().squeeze(-1)
            return torch.exp(-distance / (self.lengthscale if scaled else 1))

    @register_spectral_density(Exponential)
    class Cauchy(SpectralDensity):
        def draw(self, kernel, dims, count, normal, uniform):
            return {"cauchy.angle": torch.pi * (uniform(dims, count) - 0.5)}

        def frequencies(self, kernel, draws):
            return draws["cauchy.angle"].tan()

    x, _ = data(30)
    kernel = Exponential().double()
    terms = kernel_terms(kernel(x[:, :1]))
    maker = RandomFourierFeatures(100_000)
    phi = maker.features(terms, maker.draw(terms, torch.Generator().manual_seed(0)))
    assert (phi @ phi.mT - kernel(x[:, :1]).to_dense()).abs().max() < 0.03

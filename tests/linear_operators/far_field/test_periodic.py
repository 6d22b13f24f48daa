"""Far fields of periodic kernels over a thousand periods."""

from functools import cache

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.fitting.steps.directional import directional_product
from gpy_iterative.linear_operators import KernelProducts, operator_of_kernel
from gpy_iterative.linear_operators.extensions import far_field_error
from tests.exact.gaussian_models import Regression

TIGHT = gpi.solvers.ConjugateGradients(tolerance=1e-6)
START = 1e5
PERIOD, PERIODIC = 1.03, {"periodic": "base_kernel", "product": "base_kernel.kernels.0"}


def made(name: str, dtype: torch.dtype) -> kernels.Kernel:
    periodic, trend = kernels.PeriodicKernel().to(dtype), kernels.RBFKernel().to(dtype)
    kernel = kernels.ScaleKernel(periodic if name == "periodic" else periodic * trend).to(dtype)
    periodic.lengthscale, periodic.period_length, trend.lengthscale = 0.7, PERIOD, 30.0
    kernel.outputscale = 1.7
    if dtype == torch.float64:
        # A thousand periods of float32's rounding would be another function.
        periodic.period_length = made(name, torch.float32).get_submodule(PERIODIC[name]).period_length.double()
    return kernel


def series(n: int) -> Tensor:
    """Times far from zero, over a thousand periods; float32 has them too."""
    x = START + 1000 * torch.rand(n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.float().double()


def gradient(name: str, n: int, dtype: torch.dtype, far_field: float | None) -> Tensor:
    """Derivatives of sum_ij W_ij K_ij by all hyperparameters."""
    kernel, x, generator = made(name, dtype), series(n).to(dtype), torch.Generator().manual_seed(1)
    noise = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    left, right = (noise + (2 * torch.pi / PERIOD * series(n) + 0.3).sin() * torch.tensor([[[1.0]], [[2.0]]])).to(dtype)
    operator = operator_of_kernel(kernel, x, None, KernelProducts(far_field=far_field))
    assert (far_field_error(operator.detach()) is None) == (far_field is None)
    found = torch.autograd.grad((left * (operator @ right)).sum(), list(kernel.parameters()))
    return torch.cat([each.reshape(-1) for each in found]).double()


exact_gradient = cache(lambda name, n: gradient(name, n, torch.float64, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["periodic", "product"])
@pytest.mark.parametrize(
    ("n", "dtype", "far_field"),
    [
        (2000, torch.float64, 1e-6),
        (2000, torch.float32, 1e-6),
        (10_000, torch.float64, "auto"),
        (10_000, torch.float32, "auto"),
    ],
)
def test_gradients_are_those_of_tiles(name: str, n: int, dtype: torch.dtype, far_field: float) -> None:
    """Skeletons moved by their own periods had others."""
    found, exact = gradient(name, n, dtype, far_field), exact_gradient(name, n)
    assert ((found - exact).abs() < 1e-3 * exact.abs()).all()


@pytest.mark.parametrize("far_field", [None, 1e-7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-3)])
def test_products_move_with_the_period(far_field: float | None, dtype: torch.dtype, tolerance: float) -> None:
    """Central differences move far points along tangents, off their circles."""
    kernel, x, generator = made("product", dtype), series(1000).to(dtype), torch.Generator().manual_seed(1)
    vector = torch.randn(1000, generator=generator, dtype=torch.float32).double()
    period = kernel.base_kernel.kernels[0].raw_period_length
    operator = operator_of_kernel(kernel, x, None, KernelProducts(far_field=far_field))
    covector = torch.zeros_like(operator.x1, requires_grad=True)
    (pulled,) = torch.autograd.grad(operator.x1, period, covector, create_graph=True)
    (moves,) = torch.autograd.grad(pulled.sum(), covector)
    found = directional_product(operator.detach(), vector.to(dtype)).along((moves, None))
    assert found is not None

    twin, x = made("product", torch.float64), x.double() - START
    own = twin.base_kernel.kernels[0].raw_period_length
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            own += sign * 1e-6
            ends.append(twin(x).to_dense() @ vector)
            own -= sign * 1e-6
    exact = (ends[0] - ends[1]) / 2e-6
    assert (found.double() - exact).norm() < tolerance * exact.norm()


@pytest.mark.parametrize("name", ["periodic", "product"])
def test_predictions_are_those_of_dense_matrices(name: str) -> None:
    x, generator = series(900), torch.Generator().manual_seed(1)
    y = (2 * torch.pi / PERIOD * x[:, 0]).sin() + 0.3 * torch.randn(900, generator=generator, dtype=torch.float64)
    likelihood, trend = gpytorch.likelihoods.GaussianLikelihood(), kernels.MaternKernel(nu=1.5)
    likelihood.noise, trend.lengthscale = 0.09, 50.0
    model = Regression(x, y, likelihood, made(name, torch.float64) + kernels.ScaleKernel(trend)).double()
    options = {"solver": TIGHT, "exact_below": 0, "rank": 300, "products": KernelProducts(far_field=1e-7)}
    posterior = gpi.prediction.PathwisePosterior(model, likelihood, **options)
    points = torch.cat([series(900)[::50] + 0.1, series(1)[:1] - 3.0])
    with torch.no_grad():
        found = posterior(points)
        near, data = points - START, x - START  # GPyTorch would round distances between large times
        inner, cross = model.covar_module(data).to_dense(), model.covar_module(near, data).to_dense()
        factor = torch.linalg.cholesky(inner + 0.09 * torch.eye(900, dtype=torch.float64))
        residual = (y - model.mean_module(x)).unsqueeze(-1)
        mean = model.mean_module(points) + (cross @ torch.cholesky_solve(residual, factor)).squeeze(-1)
        variance = model.covar_module(near, diag=True) - (cross * torch.cholesky_solve(cross.mT, factor).mT).sum(-1)
    assert ((found.mean - mean) / variance.sqrt()).abs().max() < 1e-3
    torch.testing.assert_close(found.variance, variance, rtol=5e-3, atol=0.0)

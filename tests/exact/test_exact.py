"""Small problems: value and every gradient equal GPyTorch's exact marginal log likelihood."""

import copy
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators import KernelProducts
from tests.exact.gaussian_models import CASES, Case, Regression


def value_and_gradients(mll: gpytorch.mlls.MarginalLogLikelihood, case: Case) -> tuple[torch.Tensor, dict]:
    case.model.train()
    case.likelihood.train()
    case.model.zero_grad()
    value = mll(case.model(case.x), case.y, *case.params)
    value.sum().backward()
    return value.detach(), {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]
)
def test_equals_gpytorch(name: str, mll_class: type) -> None:
    case = CASES[name]()
    with gpytorch.settings.fast_computations(False, False, False):
        expected, expected_gradients = value_and_gradients(
            gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), case
        )
    mll = mll_class(case.likelihood, case.model)
    value, gradients = value_and_gradients(mll, case)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[parameter], rtol=1e-7, atol=1e-8, msg=lambda m, p=parameter: f"{p}: {m}"
        )
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert mll.report.value_sem.abs().max() == 0
    torch.testing.assert_close(mll.report.value, value)


def test_masked_targets_are_dropped() -> None:
    case = CASES["matern-3/2"]()
    y = case.y.clone()
    y[[3, 17]] = torch.nan
    masked = Case(case.model, case.likelihood, case.x, y)
    with gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.fast_computations(False, False, False):
        expected, expected_gradients = value_and_gradients(
            gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), masked
        )
        value, gradients = value_and_gradients(
            gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model), masked
        )
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("unknown", [torch.nan, torch.inf])
def test_noise_of_missing_targets_has_no_meaning(unknown: float) -> None:
    case = CASES["matern-3/2"]()
    y, noise = case.y.clone(), torch.linspace(0.01, 0.2, 40, dtype=torch.float64)
    y[[3, 17]] = torch.nan

    def answer(missing: float) -> list[torch.Tensor]:
        noise[[3, 17]] = missing
        case.model.likelihood = likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise.clone())
        case.model.set_train_data(targets=y)
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, case.model)
        value, gradients = value_and_gradients(mll, Case(case.model, likelihood, case.x, y))
        prediction = mll.posterior()(case.x[:5] + 0.1)
        case.model.train()
        return [value, *gradients.values(), prediction.mean.detach(), prediction.variance.detach()]

    with gpytorch.settings.observation_nan_policy("mask"):
        torch.testing.assert_close(answer(unknown), answer(0.1), rtol=0, atol=0)
        noise[5] = unknown
        with pytest.raises(ValueError, match=r"noise\[5\] is (nan|inf)"):
            answer(0.1)


class CategoryKernel(kernels.Kernel):
    """Features that are looked up in a table: its inputs must be integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("table", torch.nn.Parameter(torch.linspace(-1, 2, 8).view(4, 2) ** 2))

    def forward(self, x1: torch.Tensor, x2: torch.Tensor, diag: bool = False, **params) -> torch.Tensor:
        left, right = self.table[x1].flatten(-2), self.table[x2].flatten(-2)
        return (left * right).sum(-1) if diag else left @ right.mT


@pytest.mark.parametrize("kernel", [kernels.RBFKernel, kernels.PeriodicKernel, CategoryKernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", [None, "native"])
def test_integers_are_inputs(kernel: type, dtype: torch.dtype, precision: Any) -> None:
    """Categories, counts: what a kernel computes with is what it makes of them."""
    x = torch.stack([torch.arange(30) % 4, torch.arange(30) // 9], dim=-1)
    y = torch.sin(x.sum(-1).to(dtype))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernel())).to(dtype)
    case = Case(model, likelihood, x, y)
    stock = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    expected, expected_gradients = value_and_gradients(stock, case)
    products = KernelProducts(tile_size=8, precision=precision or "native")
    solver = gpi.solvers.ConjugateGradients(tolerance=1e-3 if dtype == torch.float32 else 1e-6) if precision else None
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver, products=products)
    value, gradients = value_and_gradients(mll, case)
    if solver is None:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-5)
    model.eval()
    with torch.no_grad():
        theirs = model(x[:5])
        ours = mll.posterior()(x[:5])
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-3, atol=1e-3)


def test_second_derivatives_are_refused() -> None:
    case = CASES["rbf"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    value = mll(case.model(case.x), case.y)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(value, list(case.model.parameters()), create_graph=True)


@pytest.mark.parametrize("mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.RFFMarginalLogLikelihood])
def test_second_derivatives_in_the_mean_alone_are_refused(mll_class: type) -> None:
    case = CASES["rbf"]()
    case.model.requires_grad_(False)
    constant = case.model.mean_module.raw_constant.requires_grad_()
    value = mll_class(case.likelihood, case.model)(case.model(case.x), case.y)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(value, constant, create_graph=True)


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    case = CASES["rbf"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    value = mll(case.model(case.x), case.y)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter += 0.1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize(
    ("kernel", "width"),
    [
        (kernels.MaternKernel(nu=0.5), 1.0),
        (kernels.MaternKernel(nu=0.5) * kernels.MaternKernel(), 8760.0),
        (kernels.PiecewisePolynomialKernel(), 8760.0),
    ],
)
def test_near_points_in_float32(kernel: kernels.Kernel, width: float) -> None:
    """Neighbours on a line keep their distances, whatever the kernel, and however far others are."""
    x = width * torch.rand(400, 1, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float64, torch.float32):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(x.to(dtype), torch.sin(x[:, 0]).to(dtype), likelihood, kernel).to(dtype)
        likelihood.noise = 1e-3
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
        model.zero_grad()
        mll(model(model.train_inputs[0]), model.train_targets).backward()
        assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
        found.append({name: float(p.grad) for name, p in model.named_parameters() if "lengthscale" in name})
    exact, single = found
    for name, gradient in single.items():
        assert abs(gradient - exact[name]) <= 0.02 * abs(exact[name]) + 1e-3, name


@pytest.mark.parametrize("kernel", [kernels.MaternKernel, kernels.PeriodicKernel], ids=["radial", "any other kernel"])
def test_exact_values_of_float32_models_are_those_of_float64(kernel: Callable[[], kernels.Kernel]) -> None:
    """Their entries, weights and derivatives are: with little noise float32 would hold nothing of the gradient."""
    x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    y = torch.sin(6 * x[:, 0]) + x[:, 1].square()
    single = Regression(x, y, GaussianLikelihood(), kernels.ScaleKernel(kernel()))
    single.covar_module.base_kernel.lengthscale, single.likelihood.noise = 2.0, 2e-4
    double = copy.deepcopy(single).double()
    double.set_train_data(x.double(), y.double(), strict=False)
    found = []
    for model in (single, double):
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
        value = mll(model(model.train_inputs[0]), model.train_targets)
        value.backward()
        assert value.dtype == mll.report.value_sem.dtype == model.train_targets.dtype
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found.append(torch.cat([value.detach().unsqueeze(0), gradients]).double())
    low, high = found
    assert (low - high).norm() <= 2e-5 * high[1:].norm()


class OwnCodeInFloat32(kernels.Kernel):
    """An RBF kernel whose weights are no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.eye(2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        squares = (x1 @ self.weights).unsqueeze(-2).sub((x2 @ self.weights).unsqueeze(-3)).square().sum(-1)
        values = squares.mul(-0.5).exp()
        return values.diagonal(dim1=-2, dim2=-1) if diag else values


def test_kernels_that_know_float32_alone_are_exact_in_it() -> None:
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
    found = []
    for kernel in (OwnCodeInFloat32(), kernels.RBFKernel()):
        model = Regression(x, x.sum(-1), GaussianLikelihood(), kernels.ScaleKernel(kernel))
        if isinstance(kernel, kernels.RBFKernel):
            kernel.lengthscale = 1.0
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
        value = mll(model(x), model.train_targets)
        value.backward()
        found.append((value.detach(), model.covar_module.raw_outputscale.grad, model.likelihood.raw_noise.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

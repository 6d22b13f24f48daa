"""Stock GPyTorch code on a MatrixFreeKernel answers as on the kernel itself."""

from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels

from gpy_iterative.kernels import MatrixFreeKernel
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from tests.exact.gaussian_models import Regression, data

PRODUCTS = KernelProducts(tile_size=16)

WRAPPED: dict[str, tuple[Callable[[], kernels.Kernel], Callable[[], kernels.Kernel]]] = {
    "outside a scale": (
        lambda: kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3)),
        lambda: MatrixFreeKernel(kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3)), PRODUCTS),
    ),
    "inside a scale": (
        lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, active_dims=(0, 2))),
        lambda: kernels.ScaleKernel(MatrixFreeKernel(kernels.MaternKernel(nu=1.5, active_dims=(0, 2)), PRODUCTS)),
    ),
    "in a sum": (
        lambda: kernels.RBFKernel(active_dims=(0,)) + kernels.PeriodicKernel(active_dims=(1,)),
        lambda: (
            MatrixFreeKernel(kernels.RBFKernel(active_dims=(0,)), PRODUCTS)
            + MatrixFreeKernel(kernels.PeriodicKernel(active_dims=(1,)), PRODUCTS)
        ),
    ),
    "around a product": (
        lambda: kernels.RBFKernel() * kernels.LinearKernel(),
        lambda: MatrixFreeKernel(kernels.RBFKernel() * kernels.LinearKernel(), PRODUCTS),
    ),
}


def model_of(kernel: kernels.Kernel) -> Regression:
    x, y = data(60)
    return Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()


@pytest.mark.parametrize("name", WRAPPED)
def test_stock_mll_and_predictions(name: str) -> None:
    results = []
    for make in WRAPPED[name]:
        model = model_of(make())
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        value = mll(model(*model.train_inputs), model.train_targets)
        value.backward()
        gradients = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        model.eval()
        with torch.no_grad():
            prediction = model(model.train_inputs[0][:7] + 0.05)
            results.append((value.detach(), gradients, prediction.mean, prediction.variance))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_stock_conjugate_gradients_run_on_the_operator() -> None:
    kernel = WRAPPED["outside a scale"][1]()
    model = model_of(kernel).eval()
    expected = model_of(WRAPPED["outside a scale"][0]()).eval()
    x = model.train_inputs[0][:5] + 0.05
    with torch.no_grad():
        truth = expected(x).mean
        with gpytorch.settings.max_cholesky_size(0), gpytorch.settings.eval_cg_tolerance(1e-4):
            torch.testing.assert_close(model(x).mean, truth, rtol=1e-2, atol=1e-2)


def test_it_evaluates_to_the_radial_operator() -> None:
    x, _ = data(20)
    kernel = MatrixFreeKernel(kernels.ScaleKernel(kernels.RBFKernel())).double()
    assert isinstance(kernel(x).evaluate_kernel(), RadialKernelLinearOperator)
    torch.testing.assert_close(kernel(x, diag=True), kernel(x).to_dense().diagonal())


def test_batches() -> None:
    x, _ = data(20)
    base = kernels.RBFKernel(batch_shape=torch.Size([2])).double()
    base.lengthscale = torch.tensor([[[0.5]], [[2.0]]])
    torch.testing.assert_close(MatrixFreeKernel(base)(x).to_dense(), base(x).to_dense())


def test_arguments_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"needs a gpytorch\.kernels\.Kernel, got 'rbf'"):
        MatrixFreeKernel("rbf")
    with pytest.raises(TypeError, match="products must be None or a KernelProducts"):
        MatrixFreeKernel(kernels.RBFKernel(), "tiles")

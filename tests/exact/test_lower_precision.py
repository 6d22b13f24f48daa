"""Steps and predictions whose solves iterate in lower precision, against native ones."""

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.linear_operators.products import Precision
from tests import oracles


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        kernels = gpytorch.kernels.MaternKernel(1.5, ard_num_dims=x.shape[-1]) + gpytorch.kernels.PeriodicKernel()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernels)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def results(precision: Precision, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    x, _, y = (part.to(dtype) for part in oracles.problem(150))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(dtype)
    likelihood.noise = 0.1
    model = Model(x, y, likelihood).to(dtype)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        likelihood,
        model,
        solver=gpi.solvers.ConjugateGradients(tolerance=1e-7, probe_tolerance=1e-7),
        products=KernelProducts(tile_size=32, precision=precision),
        generator=0,
    )
    value = mll(model(x), y)
    value.backward()
    found = {name: parameter.grad for name, parameter in mll.named_parameters()} | {"value": value.detach()}
    mll.posterior()
    with torch.no_grad():
        prediction = model(x[:7] + 0.05)
    return found | {"mean": prediction.mean, "variance": prediction.variance}


def test_value_gradient_and_predictions_are_those_of_native_products() -> None:
    for (name, native), lower in zip(results("native").items(), results("float32").values(), strict=True):
        torch.testing.assert_close(lower, native, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_a_precision_that_the_data_do_not_allow_is_refused_before_any_work() -> None:
    with pytest.raises(
        ValueError, match=r"precision='float32' is for float64 inputs.*convert model and data to float64"
    ):
        results("float32", torch.float32)

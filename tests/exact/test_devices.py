"""Marginal log likelihoods and posteriors on an accelerator: values, gradients and predictions are those of the CPU."""

from collections.abc import Callable

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.solvers import AlternatingProjections, Cholesky, ConjugateGradients
from tests import oracles
from tests.devices import moved
from tests.exact.gaussian_models import Regression
from tests.laplace.cases import LaplaceModel

N = 40
TIGHT = ConjugateGradients(tolerance=1e-9, probe_tolerance=1e-9)
PRODUCTS = KernelProducts(tile_size=16)


def regression(device: torch.device) -> tuple[gpytorch.likelihoods.GaussianLikelihood, Regression, Tensor, Tensor]:
    x, _, y = oracles.problem(N)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.1
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=x.shape[-1]))
    x, y = x.to(device), y.to(device)
    model = Regression(x, y, moved(likelihood, device), kernel.double())
    return likelihood, moved(model.double(), device), x, y


METHODS: dict[str, Callable[..., gpi.mlls.HutchinsonMarginalLogLikelihood]] = {
    "exact": lambda *parts: gpi.mlls.HutchinsonMarginalLogLikelihood(*parts, solver=Cholesky(), generator=0),
    "hutchinson": lambda *parts: gpi.mlls.HutchinsonMarginalLogLikelihood(
        *parts, solver=TIGHT, products=PRODUCTS, generator=0
    ),
    "projections": lambda *parts: gpi.mlls.HutchinsonMarginalLogLikelihood(
        *parts,
        solver=AlternatingProjections(block_size=16, tolerance=1e-8, probe_tolerance=1e-8),
        products=PRODUCTS,
        generator=0,
    ),
    "float32 products": lambda *parts: gpi.mlls.HutchinsonMarginalLogLikelihood(
        *parts, solver=TIGHT, products=KernelProducts(tile_size=16, precision="float32"), generator=0
    ),
    "pathwise": lambda *parts: gpi.mlls.PathwiseMarginalLogLikelihood(
        *parts, solver=TIGHT, products=PRODUCTS, num_probes=8, num_frequencies=50, generator=0
    ),
    "russian roulette": lambda *parts: gpi.mlls.RussianRouletteMarginalLogLikelihood(*parts, generator=0),
    "random features": lambda *parts: gpi.mlls.RFFMarginalLogLikelihood(*parts, num_frequencies=40, generator=0),
}


def step_and_prediction(name: str, device: torch.device) -> dict[str, Tensor]:
    likelihood, model, x, y = regression(device)
    mll = METHODS[name](likelihood, model)
    found = {}
    for step in range(2):  # the second one starts warm
        mll.zero_grad()
        value = mll(model(x), y)
        value.backward()
        found |= {f"{step} {key}": parameter.grad for key, parameter in mll.named_parameters()}
        found[f"{step} value"] = value
    posterior = mll.posterior()
    with torch.no_grad():
        prediction = likelihood(model(x[:5] + 0.05))
        found |= {"mean": prediction.mean, "variance": prediction.variance, "paths": posterior.sample_paths(3)(x[:5])}
    return {key: tensor.detach().cpu() for key, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_training_and_predictions(name: str, device: torch.device) -> None:
    expected, found = step_and_prediction(name, torch.device("cpu")), step_and_prediction(name, device)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def laplace(device: torch.device) -> dict[str, Tensor]:
    x, _, y = oracles.problem(N)
    x, y = x.to(device), y.exp().round().to(device)
    likelihood = gpi.likelihoods.PoissonLogLikelihood()
    model = moved(LaplaceModel(x, y, likelihood).double(), device)
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(likelihood, model, generator=0)
    value = mll(model(x), y)
    value.backward()
    found = {"value": value} | {key: parameter.grad for key, parameter in mll.named_parameters()}
    model.eval()
    with torch.no_grad():
        latent = model(x[:5] + 0.05)
        found |= {"mean": latent.mean, "variance": latent.variance}
    return {key: tensor.detach().cpu() for key, tensor in found.items() if tensor is not None}


def test_mode_solvers(device: torch.device) -> None:
    expected, found = laplace(torch.device("cpu")), laplace(device)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_a_run_that_was_saved_on_the_cpu_goes_on_on_a_device(device: torch.device) -> None:
    likelihood, model, x, y = regression(torch.device("cpu"))
    mll = METHODS["hutchinson"](likelihood, model)
    mll(model(x), y)
    state = mll.training_state()
    expected = mll(model(x), y).detach()
    likelihood, model, x, y = regression(device)
    resumed = METHODS["hutchinson"](likelihood, model)
    resumed.load_training_state(state)
    torch.testing.assert_close(resumed(model(x), y).detach().cpu(), expected, rtol=1e-9, atol=1e-9)
    assert resumed.report.epochs < 1  # a warm start from the solution itself

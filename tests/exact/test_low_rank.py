"""Models whose kernels have few features are exact at any size, and never dense."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import RootLinearOperator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.exact.prediction.projection import GalerkinProjection
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from tests.exact.gaussian_models import Regression

TRAIN, TEST = slice(0, 80), slice(80, None)
MakesKernel = Callable[[Tensor, gpytorch.likelihoods.Likelihood], kernels.Kernel]


def _inducing_points(x: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> kernels.Kernel:
    base = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3))
    return kernels.InducingPointKernel(base, inducing_points=x[:8].clone(), likelihood=likelihood)


def _features(x: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> kernels.Kernel:
    return (
        kernels.ScaleKernel(kernels.RFFKernel(num_samples=6, num_dims=3))
        + kernels.LinearKernel()
        + kernels.ConstantKernel()
    )


def made(kernel: MakesKernel, rows: int) -> tuple[Regression, gpytorch.likelihoods.Likelihood]:
    torch.manual_seed(0)  # RFFKernel draws frequencies from the global generator
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(rows, 3, generator=generator, dtype=torch.float64)
    y = (5 * x[:, 0]).sin() + x[:, 1] + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, kernel(x, likelihood)).double()
    return model, likelihood


def dense(kernel: kernels.Kernel, x: Tensor) -> Tensor:
    """Term by term: linear_operator factorises the first of a sum of roots, which may be singular."""
    terms = kernel.kernels if isinstance(kernel, kernels.AdditiveKernel) else [kernel]
    return torch.stack([term(x).to_dense() for term in terms]).sum(0)


@contextmanager
def no_matrix() -> Iterator[None]:
    def refused(operator: object) -> Tensor:
        raise AssertionError("a dense matrix of all pairs of data")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoisyLinearOperator, "to_dense", refused)
        patch.setattr(RootLinearOperator, "to_dense", refused)
        yield


@pytest.mark.parametrize("kernel", [_inducing_points, _features])
def test_value_and_gradient_are_those_of_dense_algebra(kernel: MakesKernel) -> None:
    model, likelihood = made(kernel, 80)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
    x, y = model.train_inputs[0], model.train_targets
    with no_matrix():
        value = mll(model(x), y)
        value.backward()
    assert mll.report.epochs == 0
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    covariance = dense(model.covar_module, x) + likelihood.noise * torch.eye(80, dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(model.mean_module(x), covariance).log_prob(y) / 80
    for term in model.added_loss_terms():  # of inducing points
        expected = expected + term.loss() / 80
    expected.backward()
    torch.testing.assert_close(value, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize("kernel", [_inducing_points, _features])
def test_predictions_are_those_of_dense_algebra(kernel: MakesKernel) -> None:
    model, likelihood = made(kernel, 80)
    new = torch.rand(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with no_matrix():
        posterior = gpi.prediction.PathwisePosterior(model, likelihood, exact_below=0)
        found = posterior(new)
        mean, variance, covariance = found.mean, found.variance, found.lazy_covariance_matrix
    model.eval()
    joint = torch.cat([model.train_inputs[0], new])
    prior, matrix = model.mean_module(joint), dense(model.covar_module, joint)
    known, cross, own = (matrix[rows] for rows in ((TRAIN, TRAIN), (TEST, TRAIN), (TEST, TEST)))
    system = known + likelihood.noise * torch.eye(80, dtype=torch.float64)
    gain = torch.linalg.solve(system, cross.mT).mT
    torch.testing.assert_close(mean, prior[TEST] + gain @ (model.train_targets - prior[TRAIN]))
    torch.testing.assert_close(covariance.to_dense(), own - gain @ cross.mT)
    torch.testing.assert_close(variance, (own - gain @ cross.mT).diagonal())
    more = posterior.condition_on_observations(new[:2], mean[:2].detach())
    torch.testing.assert_close(more(new).mean, mean, rtol=1e-3, atol=1e-3)
    assert (more(new).variance[:2] < variance[:2]).all()
    projection = posterior.solves.projection()
    assert isinstance(projection, GalerkinProjection)
    assert projection.basis.shape[-1] <= 16  # features: a variance costs as many multiply-adds as a mean, not n


def test_variances_at_all_data_are_those_at_each() -> None:
    """There an InducingPointKernel adds to K(x, X) what its features leave of the variance, as if it were K(X, X)."""
    model, likelihood = made(_inducing_points, 80)
    model.covar_module.base_kernel.base_kernel.lengthscale = 0.3
    x = model.train_inputs[0]
    posterior = gpi.prediction.PathwisePosterior(model, likelihood)
    found = posterior(x)
    torch.testing.assert_close(found.variance, torch.cat([posterior(x[:40]).variance, posterior(x[40:]).variance]))
    torch.testing.assert_close(found.covariance_matrix.diagonal(), found.variance)
    model.eval()
    with gpytorch.settings.debug(False):
        torch.testing.assert_close(found.variance, model(x).variance)


@pytest.mark.parametrize("kernel", [_inducing_points, _features])
def test_a_fit_is_exact_beyond_exact_sizes(kernel: MakesKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.linear_solvers.default.EXACT_BELOW", 50)
    model, likelihood = made(kernel, 80)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() < 2 or parameter.shape[-2] == 1)  # not inducing points
    with no_matrix():
        result = gpi.fit(gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0), progress=False)
    assert (result.method, result.status) == ("average_information", gpi.fitting.FitStatus.CONVERGED)
    assert all(row.value_sem == 0 for row in result.history)

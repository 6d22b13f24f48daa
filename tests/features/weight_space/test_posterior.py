"""Predictions from weights are those of the exact GP, follow the model, and are functions."""

import copy

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import UnsupportedLikelihoodError
from gpy_iterative.features.weight_space import problem
from gpy_iterative.features.weight_space.posterior import WeightSpacePosterior
from tests.exact.gaussian_models import Case, Regression, data
from tests.features.feature_models import KERNELS, feature_case, fixed_noise_case
from tests.features.test_exact import METHODS
from tests.monte_carlo import assert_mean_within


def dense_posterior(case: Case, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance by dense matrices."""
    n = len(case.y)
    prior = gpytorch.Module.__call__(case.model, torch.cat([case.x, x]))
    covariance, mean = prior.lazy_covariance_matrix.to_dense().detach(), prior.loc.detach()
    system = covariance[:n, :n] + torch.diag(noise.expand(n))
    cross = covariance[n:, :n]
    solved = torch.linalg.solve(system, torch.cat([(case.y - mean[:n]).unsqueeze(-1), cross.mT], -1))
    return mean[n:] + cross @ solved[:, 0], covariance[n:, n:] - cross @ solved[:, 1:]


@pytest.mark.parametrize("name", [*KERNELS, "fixed-noise"])
def test_equals_dense(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = fixed_noise_case() if name == "fixed-noise" else feature_case(KERNELS[name]())
    noise = case.likelihood.noise.detach()
    x = case.x[:5] * 0.9 + 0.05
    mean, covariance = dense_posterior(case, x, noise)
    monkeypatch.setattr(problem, "CHUNK_SIZE", 11)
    found = WeightSpacePosterior(case.model, case.likelihood)(x)
    torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.covariance_matrix, covariance, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(found.variance, covariance.diagonal(), rtol=1e-7, atol=1e-8)
    assert not found.mean.requires_grad


def test_it_reports_its_pass() -> None:
    case = feature_case(KERNELS["fourier"]())
    posterior = WeightSpacePosterior(case.model, case.likelihood)
    assert (posterior.report.num_data, posterior.report.num_features) == (40, 12)


@pytest.mark.parametrize("method", METHODS)
def test_from_every_method_in_the_middle_of_training(method: str) -> None:
    case = feature_case(KERNELS["deep"]())
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=0)
    mll(case.model(case.x), case.y)
    x = case.x[:4] + 0.1
    posterior = mll.posterior()
    mean, _ = dense_posterior(case, x, case.likelihood.noise.detach())
    torch.testing.assert_close(posterior(x).mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(mll.posterior()(x).mean, mean, rtol=1e-8, atol=1e-8)
    assert not case.model.training  # as after the posterior of every other method
    assert not case.likelihood.training
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter += 0.1
    mean, _ = dense_posterior(case, x, case.likelihood.noise.detach())
    torch.testing.assert_close(posterior(x).mean, mean, rtol=1e-8, atol=1e-8)
    case.model.set_train_data(case.x[:20], case.y[:20], strict=False)
    shorter = Case(case.model, case.likelihood, case.x[:20], case.y[:20])
    mean, _ = dense_posterior(shorter, x, case.likelihood.noise.detach())
    torch.testing.assert_close(posterior(x).mean, mean, rtol=1e-8, atol=1e-8)


def test_jitter_of_the_models_forward_counts_as_gpytorch_counts_it() -> None:
    class Jittered(Regression):
        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            covariance = self.covar_module(x) + 0.7 * self.covar_module.base_kernel(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covariance.add_jitter(0.05))

    case = feature_case(KERNELS["fourier"]())
    model = Jittered(case.x, case.y, case.likelihood, case.model.covar_module).double()
    case = Case(model, case.likelihood, case.x, case.y)
    normal = gpytorch.Module.__call__(model, case.x)
    dense = normal.lazy_covariance_matrix.to_dense() + case.likelihood.noise * torch.eye(40)
    expected = torch.distributions.MultivariateNormal(normal.loc, dense).log_prob(case.y) / 40
    mll = gpi.mlls.VariationalFeatureMarginalLogLikelihood(case.likelihood, model, batch_size=40)
    torch.testing.assert_close(mll(model(case.x), case.y), expected, rtol=1e-8, atol=1e-8)
    x = case.x[:5] + 0.1
    mean, covariance = dense_posterior(case, x, case.likelihood.noise.detach())
    torch.testing.assert_close(mll.posterior()(x).mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(mll.posterior()(x).covariance_matrix, covariance, rtol=1e-7, atol=1e-8)


def test_batches_gradients_and_dtypes() -> None:
    for dtype in (torch.float32, torch.float64):
        case = feature_case(KERNELS["fourier"](), dtype=dtype)
        posterior = WeightSpacePosterior(case.model, case.likelihood)
        x = case.x[:6].clone().requires_grad_()
        whole = posterior(x)
        assert whole.mean.dtype == whole.variance.dtype == dtype
        (gradient,) = torch.autograd.grad(whole.variance.sum() + whole.mean.sum(), x)
        assert gradient.abs().max() > 0
        assert all(parameter.grad is None for parameter in case.model.parameters())
        batch = posterior(case.x[:6].view(2, 3, 3))
        torch.testing.assert_close(batch.mean.reshape(-1), whole.mean.detach())
        torch.testing.assert_close(batch.variance.reshape(-1), whole.variance.detach(), rtol=1e-4, atol=1e-5)
        assert case.likelihood(whole).variance.min() > case.likelihood.noise


def test_sample_paths_are_functions_with_the_posteriors_moments() -> None:
    case = feature_case(KERNELS["fourier"]())
    posterior = WeightSpacePosterior(case.model, case.likelihood, seed=3)
    x = case.x[:3] + 0.2
    paths = posterior.sample_paths(4000)
    values = paths(x)
    assert values.shape == (4000, 3)
    torch.testing.assert_close(paths(x[1:2]), values[:, 1:2])
    expected = posterior(x)
    assert_mean_within(values, expected.mean, max_sem=0.05)
    assert_mean_within((values - expected.mean).square(), expected.variance, max_sem=0.05)
    torch.testing.assert_close(posterior.sample_paths(7)(x), values[:7])
    for parameter in case.model.parameters():  # the functions stay what they were
        parameter.data += 1
    torch.testing.assert_close(copy.deepcopy(paths)(x), values)
    point = x.clone().requires_grad_()
    assert torch.autograd.grad(paths(point).sum(), point)[0].abs().max() > 0


def test_paths_from_inference_mode_are_differentiable_outside() -> None:
    case = feature_case(KERNELS["deep-fourier"]())
    with torch.inference_mode():
        paths = WeightSpacePosterior(case.model, case.likelihood).sample_paths(2)
        values = paths(case.x[:3])
    x = case.x[:3].clone().requires_grad_()
    torch.testing.assert_close(paths(x), values)
    assert torch.autograd.grad(paths(x).sum(), x)[0].abs().max() > 0


def test_bad_input() -> None:
    case = feature_case(KERNELS["fourier"]())
    posterior = WeightSpacePosterior(case.model, case.likelihood)
    with pytest.raises(ValueError, match="do not fit"):
        posterior(case.x[:, :2])
    with pytest.raises(ValueError, match="dtype"):
        posterior(case.x.float())
    with pytest.raises(ValueError, match=r"x\[0, 0\] is nan"):
        posterior(torch.full_like(case.x[:1], torch.nan))
    with pytest.raises(ValueError, match="num_paths"):
        posterior.sample_paths(0)
    with pytest.raises(UnsupportedLikelihoodError, match=r"BernoulliLikelihood.*IterativeLaplaceGP"):
        WeightSpacePosterior(case.model, gpytorch.likelihoods.BernoulliLikelihood())
    x, y = data(10)
    model = Regression(None, None, case.likelihood, KERNELS["linear"]()).double()
    with pytest.raises(ValueError, match="training data"):
        WeightSpacePosterior(model, case.likelihood)
    model.set_train_data(x, torch.full_like(y, torch.nan), strict=False)
    with pytest.raises(ValueError, match=r"target\[0\] is nan"):
        WeightSpacePosterior(model, case.likelihood)

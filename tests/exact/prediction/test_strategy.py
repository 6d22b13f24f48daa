"""The strategy inside GPyTorch's and BoTorch's own machinery."""

import copy
import warnings

import gpytorch
import pytest
import torch
from torch import Tensor

from gpy_iterative.prediction import PathwisePosterior, PathwisePredictionStrategy
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.botorch_apart import acquisition, models, sampling, transforms
from tests.exact.gaussian_models import CASES, Regression, data
from tests.exact.prediction.test_posterior import held_out_points

SOLVERS = [Cholesky(), ConjugateGradients(tolerance=1e-10)]


def botorch_model(outputs: int = 1) -> gpytorch.models.ExactGP:
    x, y = data()
    y = torch.stack([y, y.flip(0)], dim=-1)[:, :outputs]
    model = models.SingleTaskGP(
        x * 10 + 3,
        y * 7 + 2,
        input_transform=transforms.Normalize(3),
        outcome_transform=transforms.Standardize(outputs),
    )
    model.eval()
    return model


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("noise", [False, True])
def test_botorch_posterior(outputs: int, solver: Cholesky | ConjugateGradients, noise: bool) -> None:
    model = botorch_model(outputs)
    x = (held_out_points(6) * 10 + 3).reshape(3, 2, 3)
    stock_x = x.clone().requires_grad_()
    stock = model.posterior(stock_x, observation_noise=noise)
    (stock_gradient,) = torch.autograd.grad(stock.mean.sum() + stock.variance.sum(), stock_x)

    posterior = PathwisePosterior(model, model.likelihood, solver=solver, exact_below=0)
    posterior.install()
    ours_x = x.clone().requires_grad_()
    ours = model.posterior(ours_x, observation_noise=noise)
    assert isinstance(model.prediction_strategy, PathwisePredictionStrategy)
    torch.testing.assert_close(ours.mean, stock.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.variance, stock.variance, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(ours.mean.sum() + ours.variance.sum(), ours_x)
    torch.testing.assert_close(gradient, stock_gradient, rtol=1e-5, atol=1e-6)
    assert ours.rsample(torch.Size([4])).shape == (4, 3, 2, outputs)


def _acquisitions(model: gpytorch.models.ExactGP, x: Tensor) -> list[Tensor]:
    sampler = sampling.SobolQMCNormalSampler(torch.Size([32]), seed=0)
    functions = (
        (acquisition.LogExpectedImprovement(model, best_f=3.0), x[:, :1]),
        (
            acquisition.qLogNoisyExpectedImprovement(
                model, model.train_inputs[0][:5] * 40, sampler, cache_root=False, prune_baseline=False
            ),
            x,
        ),
    )
    return [
        torch.cat([f(p.requires_grad_()).detach(), torch.autograd.grad(f(p).sum(), p)[0].flatten()])
        for f, p in functions
    ]


@pytest.mark.parametrize("solver", SOLVERS)
def test_acquisition_functions(solver: Cholesky | ConjugateGradients) -> None:
    model = botorch_model()
    x = (held_out_points(6) * 10 + 3).reshape(3, 2, 3)
    wanted = _acquisitions(model, x.clone())
    PathwisePosterior(model, model.likelihood, solver=solver, exact_below=0).install()
    for ours, stock in zip(_acquisitions(model, x.clone()), wanted, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exact_below", [6000, 0])
@pytest.mark.parametrize("batch", [(), (3, 1)])
def test_a_batch_of_means_and_one_kernel(batch: tuple[int, ...], exact_below: int) -> None:
    """GPyTorch's strategy fails for one list of points."""
    x, y = data()
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), gpytorch.kernels.RBFKernel(), (2,)).double()
    model.mean_module.constant.data = torch.tensor([0.0, 3.0], dtype=torch.float64)
    posterior = PathwisePosterior(model, model.likelihood, exact_below=exact_below, rank=39, num_neighbours=1)
    points = held_out_points(6).expand(*batch, 6, 3)
    wanted = posterior(points)
    posterior.install()
    prediction = model(points)
    assert prediction.mean.shape == prediction.variance.shape == (*batch[:1], 2, 6)
    torch.testing.assert_close(prediction.mean, wanted.mean)
    torch.testing.assert_close(prediction.variance, wanted.variance)


def test_samples_of_a_distribution() -> None:
    """`rsample` goes through the lazy covariance's root."""
    case = CASES["matern-3/2"]()
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=SOLVERS[1], exact_below=0, rank=5, num_neighbours=10
    )
    prediction = posterior(held_out_points(4))
    base = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samples = prediction.rsample(torch.Size([4000]), base_samples=base)
    torch.testing.assert_close(samples.mT.cov(), prediction.covariance_matrix, rtol=0.2, atol=0.03)
    assert torch.isfinite(prediction.log_prob(prediction.mean))


def test_prediction_at_the_training_inputs_warns_as_ever() -> None:
    case = CASES["matern-3/2"]()
    PathwisePosterior(case.model, case.likelihood).install()
    with pytest.warns(gpytorch.utils.warnings.GPInputWarning):
        case.model(case.x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PathwisePosterior(case.model, case.likelihood)(case.x)


def test_a_model_that_reads_gpytorchs_caches_is_told_what_to_do() -> None:
    """BoTorch's HigherOrderGP does."""
    case = CASES["matern-3/2"]()
    PathwisePosterior(case.model, case.likelihood).install()
    with pytest.raises(AttributeError, match=r"'lik_train_train_covar'.*model\.train\(\); model\.eval\(\) restores"):
        _ = case.model.prediction_strategy.lik_train_train_covar
    assert not hasattr(copy.copy(case.model.prediction_strategy), "mean_cache")


@pytest.mark.parametrize("name", ["matern-3/2", "deep", "multitask", "linear"])
def test_a_prediction_holds_a_graph_only_for_test_inputs(name: str) -> None:
    """A graph of hyperparameters would hold several matrices of all test and training points."""
    case = CASES[name]()
    PathwisePosterior(case.model, case.likelihood).install()
    x = case.x[:4] + 0.01
    without = case.model(x)
    assert not without.mean.requires_grad
    assert not without.variance.requires_grad
    for shift in (x.clone().requires_grad_(), torch.zeros(3, dtype=x.dtype).requires_grad_()):
        points = shift if shift.dim() == 2 else x + 2 * shift
        found = case.model(points)
        torch.testing.assert_close(found.variance, without.variance)
        for part in (found.mean, found.variance):
            (gradient,) = torch.autograd.grad(part.sum(), shift, retain_graph=True)
            assert gradient.abs().max() > 1e-6

"""A posterior notices, by value, that what it was computed from has moved."""

import copy
import pickle
from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.exact.gaussian_models import CASES, Case, Regression, data, regression
from tests.exact.prediction.test_posterior import dense, held_out_points

SOLVERS = [Cholesky(), ConjugateGradients(tolerance=1e-10)]


def _initialize(case: Case) -> None:
    case.model.covar_module.initialize(outputscale=2.5)


def _write_data(case: Case) -> None:
    case.model.covar_module.base_kernel.raw_lengthscale.data -= 0.7


def _step_in_evaluation_mode(case: Case) -> None:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.3)
    for parameter in case.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _noise(case: Case) -> None:
    case.likelihood.initialize(noise=0.9)


def _targets(case: Case) -> None:
    case.model.train_targets[4] += 1.0


def _train_data(case: Case) -> None:
    # Removes the strategy, as with GPyTorch's own: install again.
    strategy = case.model.prediction_strategy
    case.model.set_train_data(case.x[:30] + 0.1, case.y[:30] * 2, strict=False)
    case.model.prediction_strategy = strategy


MOVES = [_initialize, _write_data, _step_in_evaluation_mode, _noise, _targets, _train_data]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("move", MOVES)
def test_moved_numbers_are_refreshed(move: Callable[[Case], None], solver: Cholesky | ConjugateGradients) -> None:
    case, x = CASES["matern-3/2"](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=solver, exact_below=0, rank=100)
    posterior.install()
    before = posterior(x)
    _ = before.variance
    move(case)
    mean, covariance = dense(case, x)
    assert (mean - before.mean).abs().max() > 1e-3
    for prediction in (posterior(x), case.model(x)):
        torch.testing.assert_close(prediction.mean.detach(), mean, rtol=0, atol=1e-7)
        torch.testing.assert_close(prediction.covariance_matrix.detach(), covariance, rtol=0, atol=1e-8)


def interpolated() -> kernels.Kernel:
    base = kernels.ScaleKernel(kernels.RBFKernel())
    return kernels.GridInterpolationKernel(base, grid_size=8, grid_bounds=[(-2.5, 2.5)] * 3)


def induced() -> kernels.Kernel:
    base = kernels.ScaleKernel(kernels.RBFKernel())
    return kernels.InducingPointKernel(base, data(8)[0], gpytorch.likelihoods.GaussianLikelihood())


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
@pytest.mark.parametrize("make", [interpolated, induced])
@pytest.mark.parametrize("calls_the_model", [False, True])
def test_caches_of_kernels_do_not_outlive_hyperparameters(
    make: Callable[[], kernels.Kernel], calls_the_model: bool
) -> None:
    """GPyTorch's kernels on grids and inducing points keep matrices in evaluation mode, until `train()`."""
    case, x = regression(make()), held_out_points()
    first = PathwisePosterior(case.model, case.likelihood)
    first.install()
    posteriors = first, PathwisePosterior(case.model, case.likelihood)
    for posterior, lengthscale in zip(posteriors, (1.3, 1.7), strict=True):
        with torch.no_grad():
            before = case.model(x).mean
        case.model.covar_module.base_kernel.base_kernel.lengthscale = lengthscale
        with torch.no_grad():
            prediction = case.model(x) if calls_the_model else posterior(x)
        mean, covariance = dense(Case(copy.deepcopy(case.model).train().eval(), case.likelihood, case.x, case.y), x)
        assert (mean - before).abs().max() > 1e-3
        torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(prediction.covariance_matrix, covariance, rtol=0, atol=1e-6)
        posterior.install()


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_copies_of_inducing_points_predict() -> None:
    """GPyTorch's copy of an InducingPointKernel is in training mode, also in a model in evaluation mode."""
    case, x = regression(induced()), held_out_points()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    mean = mll.posterior()(x).mean
    copied = copy.deepcopy(mll)
    assert not copied.model.training
    torch.testing.assert_close(copied.posterior()(x).mean, mean)


def test_attributes_are_compared_too() -> None:
    """A kernel's smoothness is a number like any other, though no parameter."""
    case, x = CASES["matern-3/2"](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())
    case.model.covar_module.base_kernel.nu = 0.5
    mean, covariance = dense(case, x)
    torch.testing.assert_close(posterior(x).mean, mean)
    torch.testing.assert_close(posterior(x).covariance_matrix, covariance)


def test_what_a_model_notes_when_it_is_called_is_no_change() -> None:
    class Noting(Regression):
        calls, last = 0, torch.zeros(())

        def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
            self.calls, self.last = self.calls + 1, x
            return super().forward(x)

    x, y = data()
    model = Noting(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).double()
    model(x)
    posterior = PathwisePosterior(model, model.likelihood)
    posterior.install()
    solves, calls = posterior.solves, model.calls
    posterior(held_out_points())
    assert model.calls == calls
    model(held_out_points())
    assert model.calls > calls
    assert posterior.solves is solves


def test_fixed_noise_is_compared_too() -> None:
    case, x = CASES["fixed-noise"](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())
    case.likelihood.noise_covar.noise = case.likelihood.noise_covar.noise * 3
    mean, _ = dense(case, x)
    torch.testing.assert_close(posterior(x).mean, mean)


def test_unmoved_numbers_are_solved_for_once() -> None:
    case = CASES["matern-3/2"]()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=SOLVERS[1])
    solves = posterior.solves
    posterior(held_out_points())
    posterior.refresh()
    assert posterior.solves is solves


def test_predictions_keep_the_hyperparameters_they_were_made_at() -> None:
    """A lazy variance that is looked at later belongs to the time of its mean."""
    for name in ("matern-3/2", "product"):
        case, x = CASES[name](), held_out_points()
        _, covariance = dense(case, x)
        posterior = PathwisePosterior(case.model, case.likelihood, solver=SOLVERS[1], exact_below=0, rank=100)
        prediction = posterior(x)
        for parameter in case.model.parameters():
            parameter.data += 0.3
        torch.testing.assert_close(prediction.variance, covariance.diagonal())


def test_dtype_change() -> None:
    case, x = CASES["matern-3/2"](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=ConjugateGradients(tolerance=1e-5))
    case.model.float()
    assert posterior(x.float()).mean.dtype == torch.float32
    case.model.double()
    mean, _ = dense(case, x)
    torch.testing.assert_close(posterior(x).mean, mean, rtol=0, atol=1e-3)


def test_train_and_eval_cycle() -> None:
    case, x = CASES["matern-3/2"](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())
    posterior.install()
    case.model.train()
    assert case.model.prediction_strategy is None
    _initialize(case)
    mean, _ = dense(case, x)
    posterior.install()
    torch.testing.assert_close(case.model(x).mean.detach(), mean)


def test_copies_and_pickles() -> None:
    case, x = CASES["matern-3/2"](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=SOLVERS[1], exact_below=0, rank=10)
    posterior.install()
    prediction = posterior(x)
    assert copy.deepcopy(case.model).prediction_strategy is None
    for copied in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert copied.model.prediction_strategy._posterior is copied
        for again in (copied(x), copied.model(x)):
            torch.testing.assert_close(again.mean, prediction.mean)
            torch.testing.assert_close(again.variance, prediction.variance)
    torch.testing.assert_close(pickle.loads(pickle.dumps(prediction)).variance, prediction.variance)
    assert "prediction_strategy" not in " ".join(case.model.state_dict())

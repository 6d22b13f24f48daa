"""What is solved for one system and carried over to a larger one."""

import gc
import weakref

import pytest
import torch
from gpytorch import kernels

from gpy_iterative.exact.prediction.projection import GalerkinProjection
from gpy_iterative.prediction import PathwisePosterior, PathwisePredictionStrategy
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.exact.gaussian_models import CASES, regression
from tests.exact.prediction.test_posterior import held_out_points


@pytest.mark.slow
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_paths_know_new_data_after_a_refresh(updates: int, moved: bool) -> None:
    """Solves with zeros for the new data have almost no residual: their other rows must be solved for, now or later."""
    wide = kernels.ScaleKernel(kernels.RBFKernel())
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)) + wide, n=200)
    case.likelihood.initialize(noise=0.01)
    wide.outputscale, wide.base_kernel.lengthscale = 100.0, 8.0
    case.model.covar_module.kernels[0].base_kernel.lengthscale = 0.3
    # The usual tolerance: a residual in one row of 200 is below it.
    posterior = PathwisePosterior(case.model, case.likelihood, solver=ConjugateGradients(), exact_below=0)
    posterior.sample_paths(4)
    x = torch.full((updates, 3), 2.3, dtype=torch.float64) * torch.tensor([[1.0], [-1.0]][:updates])
    y = posterior(x).mean + 2
    for row in torch.arange(updates).split(1):
        posterior = posterior.condition_on_observations(x[row], y[row])
    if moved:
        posterior.model.covar_module.kernels[0].outputscale *= 1.0001
    # The noise has a deviation of 0.1.
    assert (posterior.sample_paths(4)(x) - y).abs().max() < 0.5


@pytest.mark.parametrize("asked", [False, True])
def test_exact_projections_do_not_outlive_their_bound(asked: bool) -> None:
    case, x = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=40), held_out_points(30)
    options = {"exact_below": 50, "rank": 16, "num_neighbours": 8}
    posterior = PathwisePosterior(case.model, case.likelihood, solver=ConjugateGradients(), **options)
    y = torch.zeros(30, dtype=torch.float64)
    for rows, is_exact in ((range(5), True), (range(5, 30), False)):
        if asked:
            _ = posterior(x).variance
        posterior = posterior.condition_on_observations(x[rows], y[rows])
        assert isinstance(posterior.solves.projection(), GalerkinProjection) is not is_exact


def test_exact_projections_grow_exactly() -> None:
    """Also in float32 with hardly any noise, where products with the inverse would lose all figures."""
    case, x = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=150, dtype=torch.float32), held_out_points(6)
    case.model.covar_module.outputscale, case.model.covar_module.base_kernel.lengthscale = 100.0, 3.0
    case.likelihood.initialize(noise=1.01e-4)
    posterior, x = PathwisePosterior(case.model, case.likelihood), x.float()
    for row in torch.arange(4).split(2):
        posterior.solves.projection()
        posterior = posterior.condition_on_observations(x[row], torch.zeros(2))
    solves = posterior.solves
    wanted = Cholesky().factorize(solves.system.operator).lower
    torch.testing.assert_close(solves.projection().factor.lower, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", [Cholesky(), ConjugateGradients()])
def test_a_sequence_of_updates_keeps_nothing_alive(solver: Cholesky | ConjugateGradients) -> None:
    case, x = CASES["matern-3/2"](), held_out_points(6)
    posterior = PathwisePosterior(case.model, case.likelihood, solver=solver, rank=20)
    before = []
    gc.disable()
    try:
        for row in torch.arange(6).split(1):
            _ = posterior(x).variance
            before.append(weakref.ref(posterior.solves))
            posterior = posterior.condition_on_observations(x[row], torch.zeros(1, dtype=torch.float64))
            assert all(solves() is None for solves in before)
    finally:
        gc.enable()
    with torch.no_grad():
        torch.testing.assert_close(posterior.model(x).mean, posterior(x).mean)
    assert isinstance(posterior.model.prediction_strategy, PathwisePredictionStrategy)
    posterior.model.train()
    assert posterior.model.prediction_strategy is None

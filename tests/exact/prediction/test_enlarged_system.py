"""First guesses for systems with new rows."""

import pytest
import torch
from gpytorch import kernels

from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import ConjugateGradients
from tests.exact.gaussian_models import regression
from tests.exact.prediction.test_posterior import held_out_points


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.ConvergenceWarning")
@pytest.mark.parametrize("asked", [False, True])
def test_rounding_may_leave_no_factor(asked: bool) -> None:
    """In float32 the new rows' neighbourhood, and what a projection leaves of them, may be far from positive definite."""
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=300, dtype=torch.float32)
    case.model.covar_module.outputscale, case.model.covar_module.base_kernel.lengthscale = 100.0, 5.0
    case.likelihood.initialize(noise=1.01e-4)
    options = {"solver": ConjugateGradients(), "exact_below": 0, "rank": 40}
    posterior = PathwisePosterior(case.model, case.likelihood, **options)
    if asked:
        posterior.solves.projection()
    posterior = posterior.condition_on_observations(held_out_points(2).float(), torch.ones(2))
    for tensor in (posterior.solves.weights, posterior.solves.projection().basis):
        assert torch.isfinite(tensor).all()

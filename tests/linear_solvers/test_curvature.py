"""Negative curvature is reported, and rounding is not taken for it."""

from collections.abc import Callable
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import DenseLinearOperator

import gpy_iterative as gpi
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.solvers import (
    AcceleratedSketchAndProject,
    AlternatingProjections,
    ConjugateGradients,
    SolveStatus,
    StochasticDualDescent,
    StochasticGradientDescent,
)
from tests.exact.gaussian_models import Regression

SOLVERS = [
    ConjugateGradients(tolerance=1e-6),
    ConjugateGradients(tolerance=1e-6, preconditioner=None),
    AlternatingProjections(tolerance=1e-6, block_size=30, max_epochs=50),
    AcceleratedSketchAndProject(tolerance=1e-6, block_size=30, max_epochs=50),
    AcceleratedSketchAndProject(tolerance=1e-6, block_size=30, rank=5, max_epochs=200),
    StochasticGradientDescent(tolerance=1e-6, batch_size=30, max_epochs=200),
    StochasticDualDescent(tolerance=1e-6, batch_size=30, max_epochs=200),
]


def system(shift: float, dtype: torch.dtype) -> NoisyLinearOperator:
    """A smooth kernel less a multiple of the identity, and noise: eigenvalues from .1 - shift."""
    x = torch.linspace(0, 5, 60).double()
    kernel = torch.exp(-(x[:, None] - x).square() / 2) - shift * torch.eye(60).double()
    return NoisyLinearOperator(DenseLinearOperator(kernel.to(dtype)), torch.full((60,), 0.1, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers(solver: gpi.solvers.IterativeSolver, dtype: torch.dtype) -> None:
    rhs = torch.cos(torch.arange(120).to(dtype)).view(60, 2)
    assert solver.solve(system(0.0, dtype), rhs).status is not SolveStatus.INDEFINITE
    solution = solver.solve(system(0.3, dtype), rhs)
    assert solution.status is SolveStatus.INDEFINITE
    assert "not positive definite" in solution.status.advice
    assert torch.isfinite(solution.value).all()


def test_data_of_huge_noise_do_not_hide_it() -> None:
    """Rounding errors are those of K: a diagonal has none."""
    operator = system(0.3, torch.float32)
    operator.noise[:3] = 1e6
    rhs = torch.cos(torch.arange(120.0)).view(60, 2)
    assert ConjugateGradients(tolerance=1e-6).solve(operator, rhs).status is SolveStatus.INDEFINITE


def cosines(noise: float) -> Regression:
    """Cosines of distances in two dimensions: eigenvalues far below zero."""
    x = 4 * torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = noise
    return Regression(x, torch.sin(x[:, 0]), likelihood, kernels.ScaleKernel(kernels.CosineKernel()))


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.BiasWarning", "ignore::gpy_iterative.errors.VarianceWarning")
@pytest.mark.parametrize(
    "mll_class",
    [
        partial(gpi.mlls.HutchinsonMarginalLogLikelihood, solver=ConjugateGradients()),
        partial(gpi.mlls.HutchinsonMarginalLogLikelihood, solver=AlternatingProjections()),
        gpi.mlls.RussianRouletteMarginalLogLikelihood,
        gpi.mlls.TruncatedCGMarginalLogLikelihood,
    ],
)
def test_a_kernel_that_is_none_in_two_dimensions(mll_class: Callable) -> None:
    model = cosines(0.1)
    mll = mll_class(model.likelihood, model, generator=0)
    with pytest.warns(ConvergenceWarning, match="indefinite"):
        mll(model(*model.train_inputs), model.train_targets).backward()
    assert mll.report.status is SolveStatus.INDEFINITE
    assert "indefinite" in str(mll.report)


def test_another_status_does_not_hide_it() -> None:
    """Each status warns once."""
    model = cosines(100.0)
    solver = ConjugateGradients(tolerance=1e-6, max_epochs=1)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver, generator=0)
    with pytest.warns(ConvergenceWarning, match="budget_exhausted"):
        mll(model(*model.train_inputs), model.train_targets)
    mll(model(*model.train_inputs), model.train_targets)
    model.likelihood.noise, mll.solver = 0.1, ConjugateGradients()
    with pytest.warns(ConvergenceWarning, match="indefinite"):
        mll(model(*model.train_inputs), model.train_targets)

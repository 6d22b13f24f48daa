"""Which method fits a model."""

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.fitting.choice import choose
from gpy_iterative.fitting.steps.adam import AdamSteps
from tests.exact.gaussian_models import CASES, Regression
from tests.fitting.problems import data, regression


def test_auto_chooses_by_mll_and_parameters() -> None:
    case = CASES["deep"]()
    deep = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    many = regression(20, covariance=gpytorch.kernels.RBFKernel(ard_num_dims=3))
    many.model.mean_module.register_parameter("more", torch.nn.Parameter(torch.zeros(70)))
    roulette = gpi.mlls.RussianRouletteMarginalLogLikelihood(case.likelihood, case.model)
    pathwise = gpi.mlls.PathwiseMarginalLogLikelihood(*(lambda m: (m.likelihood, m.model))(regression(20)))
    chosen = [choose(mll, "auto", None).method for mll in (regression(20), pathwise, deep, many, roulette)]
    assert chosen == ["average_information"] * 2 + ["adam"] * 3


class Borrowing(kernels.RBFKernel):
    """Uses a parameter of the model, which is none of its own."""

    def __init__(self, factor: torch.nn.Parameter) -> None:
        super().__init__()
        self.borrowed = [factor]

    def forward(self, x1: torch.Tensor, x2: torch.Tensor, **params: Any) -> torch.Tensor:
        return super().forward(x1 * self.borrowed[0], x2 * self.borrowed[0], **params)


def test_a_kernel_without_curvature_is_fitted_by_adam_and_the_result_says_why() -> None:
    factor = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    mll = regression(40, covariance=kernels.ScaleKernel(Borrowing(factor)))
    mll.model.register_parameter("factor", factor)
    with pytest.raises(ValueError, match=r"Borrowing that uses tensors.*Use method='adam'"):
        gpi.fit(mll, method="average_information", progress=False)
    result = gpi.fit(mll, progress=False, max_steps=3)
    assert result.method == "adam"
    assert "Borrowing that uses tensors" in result.reason
    assert "Borrowing that uses tensors" in str(result)


def inducing(is_trained: bool) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    x, y = data(40)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    base = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3))
    kernel = kernels.InducingPointKernel(base, inducing_points=x[:10].clone(), likelihood=likelihood)
    model = Regression(x, y, likelihood, kernel).double()
    kernel.inducing_points.requires_grad_(is_trained)
    return gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)


def test_inducing_points_are_trained_by_adam() -> None:
    """Ten inducing points are 30 coordinates, for which the average information is no curvature."""
    with pytest.raises(ValueError, match=r"inducing points of covar_module, which are trained. Use method='adam'"):
        gpi.fit(inducing(True), method="average_information", progress=False)
    result = gpi.fit(inducing(True), progress=False)
    assert result.method == "adam"
    assert "inducing points of covar_module" in result.reason
    assert result.history[-1].value > result.history[0].value + 0.5


def test_fixed_inducing_points_leave_average_information() -> None:
    result = gpi.fit(inducing(False), progress=False)
    assert (result.method, result.status.name) == ("average_information", "CONVERGED")


def test_adam_moves_hyperparameters_faster_than_a_network() -> None:
    """Its first step moves every parameter by its rate."""
    case = CASES["deep"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    before = {name: parameter.detach().clone() for name, parameter in mll.named_parameters()}
    AdamSteps(mll, num_steps=10).step()
    moves = {name: float((parameter.detach() - before[name]).abs().max()) for name, parameter in mll.named_parameters()}
    for of_network, rate in ((True, 0.01), (False, 0.1)):
        found = [move for name, move in moves.items() if ("network" in name) is of_network]
        assert max(found) == pytest.approx(rate, rel=1e-3)

"""Small problems: value and every gradient equal GPyTorch's exact marginal log likelihood."""

import gpytorch
import pytest
import torch

import gpy_iterative as gpi
from tests.mlls.gaussian_models import CASES, Case


def value_and_gradients(mll: gpytorch.mlls.MarginalLogLikelihood, case: Case) -> tuple[torch.Tensor, dict]:
    case.model.train()
    case.likelihood.train()
    case.model.zero_grad()
    value = mll(case.model(case.x), case.y, *case.params)
    value.sum().backward()
    return value.detach(), {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]
)
def test_equals_gpytorch(name: str, mll_class: type) -> None:
    case = CASES[name]()
    with gpytorch.settings.fast_computations(False, False, False):
        expected, expected_gradients = value_and_gradients(
            gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), case
        )
    mll = mll_class(case.likelihood, case.model)
    value, gradients = value_and_gradients(mll, case)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[parameter], rtol=1e-7, atol=1e-8, msg=lambda m, p=parameter: f"{p}: {m}"
        )
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert mll.report.value_sem.abs().max() == 0
    torch.testing.assert_close(mll.report.value, value)


def test_masked_targets_are_dropped() -> None:
    case = CASES["matern-3/2"]()
    y = case.y.clone()
    y[[3, 17]] = torch.nan
    masked = Case(case.model, case.likelihood, case.x, y)
    with gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.fast_computations(False, False, False):
        expected, expected_gradients = value_and_gradients(
            gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), masked
        )
        value, gradients = value_and_gradients(
            gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model), masked
        )
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-7, atol=1e-8)


def test_second_derivatives_are_refused() -> None:
    case = CASES["rbf"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    value = mll(case.model(case.x), case.y)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(value, list(case.model.parameters()), create_graph=True)


@pytest.mark.parametrize("mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.RFFMarginalLogLikelihood])
def test_second_derivatives_in_the_mean_alone_are_refused(mll_class: type) -> None:
    case = CASES["rbf"]()
    case.model.requires_grad_(False)
    constant = case.model.mean_module.raw_constant.requires_grad_()
    value = mll_class(case.likelihood, case.model)(case.model(case.x), case.y)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(value, constant, create_graph=True)


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    case = CASES["rbf"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    value = mll(case.model(case.x), case.y)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter += 0.1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()

"""A gradient that is not finite ends the backward pass, of every marginal log likelihood, and changes nothing."""

from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.training.surrogate import with_checked_gradient
from tests.exact.gaussian_models import Regression, data
from tests.features.feature_models import KERNELS, feature_case
from tests.features.test_exact import METHODS
from tests.laplace.cases import case as laplace_case
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood

CG = gpi.solvers.ConjugateGradients()


class RootOfDistance(gpytorch.kernels.Kernel):
    """Finite, but at a distance of zero its derivative is not."""

    has_lengthscale = True

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params) -> Tensor:
        difference = (x1.unsqueeze(-2) - x2.unsqueeze(-3)) / self.lengthscale
        value = difference.square().sum(-1).sqrt().neg().exp()
        return value.diagonal(dim1=-1, dim2=-2) if diag else value


GAUSSIAN = {
    "exact": lambda model: gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0),
    "Hutchinson": lambda model: gpi.mlls.HutchinsonMarginalLogLikelihood(
        model.likelihood, model, solver=CG, generator=0
    ),
    "truncated series": lambda model: gpi.mlls.RussianRouletteMarginalLogLikelihood(
        model.likelihood, model, generator=0
    ),
}


@pytest.mark.parametrize("name", GAUSSIAN)
def test_a_derivative_that_is_not_finite_changes_nothing(name: str) -> None:
    x, y = data(30, dtype=torch.float32)
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), RootOfDistance())
    mll = GAUSSIAN[name](model)
    # Gradients are added to what is there, or put where nothing is.
    model.likelihood.noise_covar.raw_noise.grad = torch.full((1,), 3.0)
    parameters = {key: value.clone() for key, value in model.state_dict().items()}
    value = mll(model(x), y)
    state = mll.training_state()
    with pytest.raises(gpi.errors.NonFiniteError, match="raw_lengthscale is not finite"):
        value.backward()
    assert torch.isfinite(value)
    assert all(torch.equal(parameters[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(state[key], value) for key, value in mll.training_state().items())
    assert model.likelihood.noise_covar.raw_noise.grad.tolist() == [3.0]
    assert model.mean_module.raw_constant.grad is None
    assert model.covar_module.raw_lengthscale.grad is None


@pytest.mark.parametrize("solver", [None, CG])
def test_targets_too_large_for_a_gradient(solver: gpi.solvers.Solver | None) -> None:
    x, y = data(30, dtype=torch.float32)
    # What no lengthscale explains: y^T H^-1 y is |y|^2 / noise, and the noise's derivative |y|^2 / noise^2.
    x, y = 0.01 * x, 1e16 * (-1.0) ** torch.arange(30)
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), gpytorch.kernels.RBFKernel())
    model.likelihood.noise = 2e-4
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver, generator=0)
    with pytest.raises(gpi.errors.NonFiniteError, match=r"is not finite.*float64"):
        mll(model(x), y).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def _laplace() -> tuple[Any, Callable[[], Tensor]]:
    problem = laplace_case("logit")
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, generator=0)
    return mll, lambda: mll(problem.model(problem.x), problem.y)


def _features() -> tuple[Any, Callable[[], Tensor]]:
    case = feature_case(KERNELS["deep-fourier"](), n=40)
    mll = next(iter(METHODS.values()))(case.likelihood, case.model, batch_size=8, generator=0)
    return mll, lambda: mll(case.model(case.x), case.y)


def _quadruply() -> tuple[Any, Callable[[], Tensor]]:
    model, x, y = fourier_problem(m=80)
    mll = gpi.mlls.QuadruplyStochasticELBO(gaussian_likelihood(0.1), model, num_data=len(y), generator=0)
    return mll, lambda: mll(model(x), y)


@pytest.mark.parametrize("make", [_laplace, _features, _quadruply])
def test_every_method_checks(make: Callable[[], tuple[Any, Callable[[], Tensor]]]) -> None:
    mll, evaluate = make()
    name, parameter = next(iter(mll.named_parameters()))
    evaluate().backward()
    for other in mll.parameters():
        other.grad = None
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
    with pytest.raises(gpi.errors.NonFiniteError, match=name):
        evaluate().backward()
    assert all(other.grad is None for other in mll.parameters())
    handle.remove()
    evaluate().backward()
    assert parameter.grad is not None


@pytest.mark.parametrize("make", [_laplace, _features, _quadruply])
def test_parameters_that_were_made_without_gradients(make: Callable[[], tuple[Any, Callable[[], Tensor]]]) -> None:
    with torch.inference_mode():
        mll, evaluate = make()
    for ask in (evaluate, lambda: gpi.fit(mll, progress=False)):
        with pytest.raises(ValueError, match=r"was made under torch.inference_mode.* outside of it"):
            ask()


def test_watch_ends_with_its_backward_pass() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    value = with_checked_gradient(module.weight.sum(), module)
    value.backward(retain_graph=True)
    (module.weight.sum() * torch.nan).backward()  # no business of ours
    assert module.weight.grad.isnan().all()
    module.weight.grad = None
    value.backward()
    assert module.weight.grad.tolist() == [[1.0, 1.0]]


def test_watch_survives_a_pass_that_something_else_ended() -> None:
    module = torch.nn.Linear(2, 1, bias=False)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    inner = module.weight * 1
    handle = inner.register_hook(fail)
    value = with_checked_gradient(inner.sum(), module)
    with pytest.raises(ArithmeticError):
        value.backward(retain_graph=True)
    handle.remove()
    (module.weight.sum() * torch.nan).backward()
    assert module.weight.grad.isnan().all()
    module.weight.grad = None
    value.backward()
    assert module.weight.grad.tolist() == [[1.0, 1.0]]

"""Warnings: where they point and what they advise; options that are refused."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.utils.warnings import NumericalWarning

import gpy_iterative as gpi
from gpy_iterative.errors import warn
from gpy_iterative.linear_solvers.cholesky import warned_cholesky
from gpy_iterative.solvers import ConjugateGradients, LaplaceCholesky, LaplaceNewton, SolveStatus
from tests.exact.gaussian_models import Regression, data
from tests.laplace.cases import LaplaceModel, case


def short_of_a_mode() -> LaplaceModel:
    problem = case("logit", n=20)
    return LaplaceModel(problem.x, problem.y, problem.likelihood, solver=LaplaceNewton(max_outer=1))


def training_by_laplace() -> None:
    model = short_of_a_mode()
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, solver=model.solver)
    mll(model(*model.train_inputs), model.train_targets)


def prediction_by_laplace() -> None:
    model = short_of_a_mode().eval()
    model.predict_proba(model.train_inputs[0])


def refined_prediction() -> None:
    model = case("logit", n=20).model.eval()
    model.num_refinements, model.solver = 1, LaplaceNewton(max_outer=1, tolerance=1e-12)
    model(model.train_inputs[0])


def exact_model() -> Regression:
    x, y = data(40)
    return Regression(
        x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.ScaleKernel(kernels.RBFKernel())
    ).double()


def training() -> None:
    model = exact_model()
    solver = ConjugateGradients(max_epochs=1, preconditioner=None)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver)
    mll(model(*model.train_inputs), model.train_targets)


def prediction() -> None:
    model = exact_model()
    solver = ConjugateGradients(max_epochs=1, preconditioner=None)
    posterior = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver).posterior()
    posterior(model.train_inputs[0][:3]).variance  # noqa: B018


def roulette() -> None:
    model = exact_model()
    truncation = gpi.truncation.FixedTruncation(2)
    mll = gpi.mlls.RussianRouletteMarginalLogLikelihood(model.likelihood, model, truncation=truncation)
    mll(model(*model.train_inputs), model.train_targets)


def short_of_a_solution() -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    model = exact_model()
    solver = ConjugateGradients(max_epochs=1, preconditioner=None)
    return gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver)


def training_loop() -> None:
    mll = short_of_a_solution()
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    optimizer = torch.optim.Adam(mll.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = -mll(mll.model(x), y)
        loss.backward()
        optimizer.step()


def fit() -> None:
    gpi.fit(short_of_a_solution(), max_steps=2, progress=False)


def fit_by_adam() -> None:
    gpi.fit(short_of_a_solution(), method="adam", max_steps=2, progress=False)


def fit_of_unscaled_data() -> None:
    model = exact_model()
    model.set_train_data(*model.train_inputs, 1e4 * model.train_targets, strict=False)
    gpi.fit(gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model), max_steps=1, progress=False)


def fit_by_laplace() -> None:
    model = short_of_a_mode()
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, solver=model.solver)
    gpi.fit(mll, max_steps=1, progress=False)


def posterior_as_a_gpytorch_model() -> None:
    mll = short_of_a_solution()
    mll.posterior()
    mll.likelihood(mll.model(mll.model.train_inputs[0][:3])).variance  # noqa: B018


def sample_paths() -> None:
    mll = short_of_a_solution()
    mll.posterior().sample_paths(2)(mll.model.train_inputs[0][:3])


def from_within_torch() -> None:
    """A decorator of PyTorch's between the user and what warns."""
    torch.no_grad()(warn)("here", gpi.errors.BiasWarning)


@pytest.mark.parametrize(
    "call",
    [
        training_by_laplace,
        prediction_by_laplace,
        refined_prediction,
        training,
        training_loop,
        fit,
        fit_by_adam,
        fit_of_unscaled_data,
        fit_by_laplace,
        prediction,
        posterior_as_a_gpytorch_model,
        sample_paths,
        roulette,
        from_within_torch,
    ],
)
def test_warnings_point_at_the_line_of_the_user(call: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    ours = [warning for warning in found if warning.category.__module__ == "gpy_iterative.errors"]
    assert ours
    first = call.__code__.co_firstlineno
    for warning in ours:
        assert warning.filename == __file__
        assert first < warning.lineno <= max(line for *_, line in call.__code__.co_lines() if line)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advice_is_of_the_solver_and_dtype_in_use(dtype: torch.dtype) -> None:
    """No option that this solver does not have, and no word of float64 in float64."""
    prior, likelihood = case("logit", n=20, dtype=dtype).prior(), case("logit", n=20, dtype=dtype).pointwise()
    for solver, own in (
        (LaplaceCholesky(max_outer=1), "of LaplaceCholesky"),
        (LaplaceNewton(max_outer=1), "max_inner"),
    ):
        found = solver.solve(prior, likelihood)
        texts = [
            solver.advice(replace(found, status=status), dtype)
            for status in (SolveStatus.BUDGET_EXHAUSTED, SolveStatus.STAGNATED)
        ]
        assert own in texts[0]
        assert ("max_inner" in texts[0]) == ("max_rank" in texts[1]) == isinstance(solver, LaplaceNewton)
        assert all(("float64" in text) == (dtype == torch.float32) for text in texts)
    for status in SolveStatus:
        assert "float64" not in status.advice_for(torch.float64)
        assert "native" not in status.advice_for(torch.float32)
    assert "precision='float32'" in SolveStatus.STAGNATED.advice_for(torch.float64)


def test_a_jitter_is_advised_float64_where_there_is_less() -> None:
    singular = torch.ones(3, 3, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match=r"factor x. To avoid it use float64, keep the noise") as found:
        warned_cholesky(singular, "X", torch.float32)
    assert found[0].filename == __file__
    with pytest.warns(NumericalWarning, match=r"factor x. To avoid it keep the noise"):
        warned_cholesky(singular, "X", torch.float64)

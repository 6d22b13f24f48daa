"""`gpi.fit` from start to end."""

import logging
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from linear_operator.operators import DenseLinearOperator

import gpy_iterative as gpi
from gpy_iterative.errors import DataWarning
from gpy_iterative.fitting import FitStatus
from gpy_iterative.fitting.loops import CurvatureLoop, _is_visible
from gpy_iterative.fitting.steps import levenberg_marquardt
from gpy_iterative.fitting.steps.adam import AdamSteps
from gpy_iterative.fitting.steps.points import Step
from gpy_iterative.fitting.steps.quasi_newton import QuasiNewton
from tests.exact.gaussian_models import CASES, Regression
from tests.fitting.problems import ITERATIVE, LOW_RANK, data, dense_optimum, dense_value, features, quiet, regression
from tests.laplace.cases import Exposed, LaplaceModel
from tests.laplace.cases import case as poisson_case

# The optimum


def smooth(x: torch.Tensor) -> torch.Tensor:
    return torch.cos(4 * x[:, 0]) * x[:, 1]


def rough(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(torch.sin(7 * x[:, 0])) + x[:, 2]


@pytest.mark.parametrize("function", [None, smooth, rough], ids=["default", "smooth", "rough"])
def test_the_optimum_is_that_of_l_bfgs(function: Any) -> None:
    mll = regression(200)
    if function is not None:
        x = mll.model.train_inputs[0]
        noise = 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        mll.model.set_train_data(x, function(x) + noise, strict=False)
    result = quiet(mll)
    assert result.status is FitStatus.CONVERGED
    assert result.steps <= 20
    reached = dense_value(mll)
    assert dense_optimum(mll) - reached < 0.05
    assert result.history[-1].value * 200 == pytest.approx(reached, abs=1e-6)


def test_iterative_solves_reach_it_too() -> None:
    mll = regression(solver=ITERATIVE)
    result = quiet(mll)
    assert result.status is FitStatus.CONVERGED
    reached = dense_value(mll)
    assert dense_optimum(mll) - reached < 0.3
    assert all(row.noise is not None and row.noise > 0 for row in result.history)


@pytest.mark.parametrize("name", ["fixed-noise", "priors", "product", "user's own", "multitask", "batch", "additive"])
def test_every_kind_of_model_is_trained(name: str) -> None:
    case = CASES[name]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    result = quiet(mll)
    assert result.status in (FitStatus.CONVERGED, FitStatus.BOUND)
    assert result.history[-1].value > result.history[0].value
    assert result.method == "average_information"


def test_standard_errors_are_those_of_the_exact_information() -> None:
    mll = regression(250)
    mll.model.covar_module.base_kernel.requires_grad_(False)
    mll.model.mean_module.requires_grad_(False)
    mll.model.covar_module.base_kernel.lengthscale = 0.5
    result = quiet(mll)
    coordinates = gpi.fitting.AverageInformation(mll).coordinates
    start, step, size = coordinates.read(), 1e-3, len(coordinates)

    def value(move: torch.Tensor) -> float:
        coordinates.write(start + move)
        return dense_value(mll)

    unit = step * torch.eye(size, dtype=torch.float64)
    observed = torch.tensor(
        [[(value(a - b) + value(b - a) - value(a + b) - value(-a - b)) / (4 * step**2) for a in unit] for b in unit]
    )
    exact = torch.linalg.inv(observed).diagonal().sqrt()
    assert torch.tensor(list(result.standard_errors.values())) == pytest.approx(exact, rel=0.2)


# How it ends


def test_irrelevant_inputs_are_named_and_linear_ones_are_not() -> None:
    mll = regression(200)
    x = mll.model.train_inputs[0]
    noise = 0.2 * torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mll.model.set_train_data(x, rough(x) + noise, strict=False)
    result = quiet(mll)
    assert result.irrelevant == ("covar_module.base_kernel.lengthscale[1]",)
    shown = str(result)
    assert "CONVERGED after" in shown
    assert "lengthscale[1]" in shown.splitlines()[-1]
    assert "not determined" in shown
    assert result.standard_errors["covar_module.base_kernel.lengthscale[1]"] is None
    (found,) = (each for each in result.hyperparameters if each.name == "noise_covar.noise")
    assert found.low < found.value < found.high


def test_a_kernel_that_explains_nothing_is_not_called_useless_inputs() -> None:
    mll = regression(60)
    targets = torch.randn(60, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mll.model.set_train_data(targets=targets, strict=False)
    mll.model.covar_module.outputscale = 1e-6
    mll.model.covar_module.base_kernel.lengthscale = 1e3
    result = quiet(mll)
    assert len(result.irrelevant) == 3
    shown = str(result)
    assert "may do without" not in shown
    assert (
        "The kernel of covar_module.base_kernel.lengthscale changes nothing: leave it out, or start"
        in shown.splitlines()[-1]
    )


def test_a_fit_that_ended_without_curvature_does_not_say_that_nothing_is_determined() -> None:
    result = quiet(regression(60), max_steps=1)
    unknown = tuple(replace(each, standard_error=None, low=None, high=None) for each in result.hyperparameters)
    interrupted = replace(result, hyperparameters=unknown)
    assert result.has_standard_errors
    assert not interrupted.has_standard_errors
    assert "not determined" not in str(interrupted)


def test_noise_that_is_a_model_itself() -> None:
    case = CASES["heteroskedastic"]()
    result = quiet(gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0), max_steps=3)
    values = [row.value for row in result.history]
    assert values == sorted(values)


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_exact_fits_along_a_curved_valley_reach_the_optimum(seed: int) -> None:
    # Forty steps by average information do not, and say that .3 to 1.6 nats are left.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 1, generator=generator).double()
    y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(60, generator=generator).double()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.PeriodicKernel())
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    model.mean_module = gpytorch.means.ZeroMean()
    result = quiet(gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model))
    assert result.status is FitStatus.CONVERGED
    assert result.steps < 40


def test_the_optimum_by_measured_curvatures_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.loops.FOLLOWED_AFTER", 2)
    mll = regression(80)
    result = quiet(mll)
    assert result.status is FitStatus.CONVERGED
    assert result.steps > 2
    assert f"{result.steps} steps of average information, then quasi newton" in str(result)
    reached = dense_value(mll)
    assert dense_optimum(mll) - reached < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_of_any_scale_are_fitted(dtype: torch.dtype) -> None:
    """Variances had still to grow by 1e3 when the other optimiser followed: BUDGET, and 14 nats left."""
    (x, y), mll = data(100), regression(100)
    mll.model.to(dtype).set_train_data(x.to(dtype), 1e6 * y.to(dtype), strict=False)
    with pytest.warns(DataWarning):
        assert quiet(mll).status is FitStatus.CONVERGED
    mll.model.double().set_train_data(x, 1e6 * y, strict=False)
    reached = dense_value(mll)
    assert dense_optimum(mll) - reached < 0.1


def test_budget() -> None:
    result = quiet(regression(100), max_steps=2)
    assert result.status is FitStatus.BUDGET
    assert result.steps == 2
    assert [row.step for row in result.history] == [0, 1, 2]
    assert "max_steps" in result.status.advice


def test_the_last_point_of_a_budget_far_from_the_end_needs_no_curvature_of_its_own() -> None:
    mll, other = (regression(100, solver=ITERATIVE) for _ in range(2))
    result = quiet(mll, max_steps=1)
    optimiser = gpi.fitting.AverageInformation(other)
    before = optimiser.assess().curvature.matrix
    optimiser.step()
    gradient = optimiser.point.gradient
    left = float(0.5 * gradient @ torch.linalg.solve(before, gradient))
    last = result.history[-1]
    assert last.noise > 0
    assert result.status is FitStatus.BUDGET
    assert left == pytest.approx(last.left_to_gain, abs=2 * last.noise)  # which counts what probes hide
    assert 5 < left != pytest.approx(optimiser.assess().left, abs=4 * last.noise)
    errors = torch.tensor([each.standard_error for each in result.hyperparameters])
    assert torch.isfinite(errors).all()
    # Predictions begin with the last solve.
    states = [each.training_state() for each in (mll, optimiser.mll)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_last_point_of_a_budget_near_the_end_has_a_curvature_of_its_own() -> None:
    whole = quiet(regression(100, solver=ITERATIVE))
    assert whole.status is FitStatus.CONVERGED
    result = quiet(regression(100, solver=ITERATIVE), max_steps=whole.steps)
    assert result.status is FitStatus.CONVERGED
    assert result.history[-1] == replace(whole.history[-1], seconds=result.history[-1].seconds)


def test_bound() -> None:
    x, _ = data(60)
    mll = regression(60)
    mll.model.set_train_data(x, torch.sin(3 * x[:, 0]), strict=False)  # no noise
    result = quiet(mll)
    assert result.status is FitStatus.BOUND
    assert "noise_covar.noise" in {each.name for each in result.hyperparameters if each.at_bound}
    assert "at its bound" in str(result)


def test_noise() -> None:
    mll = regression(200, solver=LOW_RANK, num_probes=1, probes="rademacher")
    result = quiet(mll)
    assert result.status is FitStatus.NOISE
    assert "num_probes" in result.status.advice
    assert mll.probes.num_probes == 1


@pytest.mark.slow
def test_the_nats_left_are_those_of_the_function_without_probes() -> None:
    """The same probes in all steps hide as much as their noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 2, generator=generator, dtype=torch.float64)
    noise = 0.3 * torch.randn(200, generator=generator, dtype=torch.float64)
    y = torch.sin(9 * x[:, 0]) * torch.cos(9 * x[:, 1]) + noise
    told, errors, true = [], [], []
    for seed in range(12):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=2))
        model = Regression(x, y, likelihood, kernel).double()
        make = gpi.mlls.HutchinsonMarginalLogLikelihood
        last = quiet(make(likelihood, model, solver=LOW_RANK, probes="rademacher", generator=seed)).history[-1]
        told.append(last.left_to_gain)
        errors.append(last.noise)
        true.append(gpi.fitting.AverageInformation(make(likelihood, model)).assess().left)  # exact at this size
    assert sum(told) == pytest.approx(sum(true), rel=0.4)
    assert all(abs(a - b) < 2 * error for a, b, error in zip(told, true, errors, strict=True))


@pytest.mark.parametrize(("most", "probes"), [(200 * 8, 8), (200 * 8 - 1, 2)])
def test_probes_whose_vectors_would_fill_the_memory_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, most: int, probes: int
) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.steps.average_information.MOST_ENTRIES", most)
    mll = regression(200, solver=LOW_RANK, num_probes=2, probes="rademacher")
    loop = CurvatureLoop(gpi.fitting.AverageInformation(mll), [], 10)
    assert loop.run(None, (), False, None).status is FitStatus.NOISE
    assert loop._optimiser.mll.probes.num_probes == probes


def test_stagnated() -> None:
    mll = regression(60)
    forward, calls = mll.model.forward, []

    def fails_later(x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        calls.append(x)
        if len(calls) > 4:  # the choice of the method, the check of the data, the start, a step
            raise gpi.errors.NonFiniteError("no")
        return forward(x)

    mll.model.forward = fails_later
    result = quiet(mll)
    assert result.status is FitStatus.STAGNATED
    assert result.steps == 1
    assert not result.has_standard_errors
    assert "not determined" not in "\n".join(map(str, [result, *result.hyperparameters]))


def test_a_fit_that_cannot_go_on_near_its_optimum_keeps_nats_left_and_standard_errors() -> None:
    mll = regression(100)
    quiet(mll)
    mll.likelihood.noise = 1.2 * mll.likelihood.noise.detach()
    optimiser = gpi.fitting.AverageInformation(mll)
    optimiser.step = lambda: None
    result = CurvatureLoop(optimiser, [], 30).run(None, (), False, None)
    assert 0.1 < result.history[-1].left_to_gain < 2
    assert result.status is FitStatus.NOISE
    assert result.has_standard_errors


def test_a_laplace_fit_that_cannot_go_on_tells_what_central_differences_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model = poisson_case("poisson-log", n=60).model
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model)
    quiet(mll)
    model.covar_module.outputscale = 1.6 * model.covar_module.outputscale.detach()
    left, _ = QuasiNewton(mll).settle().expected()
    monkeypatch.setattr(levenberg_marquardt.LevenbergMarquardt, "step", lambda self: None)
    result = quiet(mll)
    assert result.status is FitStatus.NOISE
    assert result.has_standard_errors
    assert result.history[-1].left_to_gain == pytest.approx(left)


def test_a_fit_that_blind_steps_do_not_help_ends_at_its_best_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mll = regression(80)
    loop = CurvatureLoop(gpi.fitting.AverageInformation(mll), [], 10)
    assert loop.advance() is None
    best = [parameter.detach().clone() for parameter in mll.parameters()]
    loop._best = (0.0, math.inf, 0.0, gpi.fitting.AverageInformation(mll).coordinates.read())
    assert loop.advance() is None
    monkeypatch.setattr("gpy_iterative.fitting.loops.is_drowned", lambda *told: True)
    assert loop.advance() is FitStatus.STAGNATED  # after one step much is left, and no noise hides it
    assert all(map(torch.allclose, mll.parameters(), best))
    assert loop.history[-1].left_to_gain == pytest.approx(loop.history[1].left_to_gain)


def test_a_plateau_where_little_seems_left_to_gain_is_not_the_best_point(monkeypatch: pytest.MonkeyPatch) -> None:
    mll = regression(80)
    mll.likelihood.noise, mll.model.covar_module.base_kernel.lengthscale = 3.0, 5.0
    loop = CurvatureLoop(gpi.fitting.AverageInformation(mll), [], 10)
    for _ in range(3):
        assert loop.advance() is None
        if loop._best is not None and len(loop.history) == 1:
            loop._best = (0.0, *loop._best[1:])
    monkeypatch.setattr("gpy_iterative.fitting.loops.is_drowned", lambda *told: True)
    assert loop.advance() is not None
    assert dense_value(mll) / 80 > loop.history[0].value + 0.1


def test_steps_that_noise_hides_go_on_with_new_probes_from_the_best_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and preconditioner of the start left 8 nats of noise in the value; new ones .1."""
    monkeypatch.setattr("gpy_iterative.fitting.steps.average_information.LESS_NOISE", math.inf)
    mll = regression(80, solver=LOW_RANK)
    not_drawn, optimiser = set(mll.training_state()), gpi.fitting.AverageInformation(mll)
    loop = CurvatureLoop(optimiser, [], 10)
    for _ in range(2):
        assert loop.advance() is None
    assert loop._best is not None
    best = optimiser.coordinates.read()
    loop._best = (*loop._best[:1], math.inf, 0.0, best)
    assert set(optimiser.point.before) > not_drawn
    drowned = "gpy_iterative.fitting.loops.is_drowned"
    assert loop.advance() is None
    monkeypatch.setattr(drowned, lambda *told: True)
    assert loop.advance() is None
    assert torch.equal(optimiser.coordinates.read(), best)
    assert set(optimiser.point.before) == not_drawn
    monkeypatch.setattr(drowned, lambda *told: False)
    assert loop.advance() is None
    assert [row.step for row in loop.history] == [0, 1, 2, 3, 3, 3]  # the last one, the best, with new probes
    monkeypatch.setattr(drowned, lambda *told: True)
    assert loop.advance() is not None  # only once


@pytest.mark.parametrize(("error", "is_better"), [(0.1, True), (1.0, False)])
def test_a_value_of_one_nat_more_counts_beyond_its_error(error: float, is_better: bool) -> None:
    optimiser = gpi.fitting.AverageInformation(regression(80))
    loop, found = CurvatureLoop(optimiser, [], 10), optimiser.assess()
    point = replace(optimiser.point, error=error)
    loop._best = (found.left / 2, point.value - 1, error, point.position)
    assert loop._is_best(point, found) is is_better


@pytest.mark.parametrize(("gained", "noise", "is_visible"), [(1.0, 0.1, True), (1.0, 0.5, False), (0.04, 0.01, False)])
def test_gradients_show_gains_that_noise_hides_in_values(gained: float, noise: float, is_visible: bool) -> None:
    found = replace(gpi.fitting.AverageInformation(regression(80)).assess(), noise=noise)
    step = Step(length=1.0, predicted=2.0, gained=gained, seen=False, trials=1, epochs=1.0, seconds=1.0)
    assert _is_visible(step, found) is is_visible


def test_ctrl_c_keeps_what_the_last_step_has_reached() -> None:
    mll, other = regression(80), regression(80)

    def interrupt(row: gpi.fitting.HistoryRow) -> None:
        if row.step == 2:
            mll.model.forward = interrupting

    forward = mll.model.forward

    def interrupting(x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        mll.model.forward = forward
        raise KeyboardInterrupt

    result = quiet(mll, callback=interrupt)
    expected = quiet(other, max_steps=result.steps)
    assert result.status is expected.status is FitStatus.BUDGET
    assert result.is_interrupted
    assert not expected.is_interrupted
    assert 2 <= result.steps <= 3
    assert all(map(torch.equal, mll.parameters(), other.parameters()))
    assert [row.value for row in result.history] == [row.value for row in expected.history]


# What it tells


def test_the_history_counts_the_epochs_of_trials_that_were_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    optimiser = gpi.fitting.AverageInformation(regression(100, solver=LOW_RANK))
    evaluated, judged = [], []
    evaluate, gain = optimiser.mll.evaluate, levenberg_marquardt._gain

    def counting(*args: Any) -> Any:
        evaluated.append(evaluate(*args))
        return evaluated[-1]

    def refusing_the_second(*args: Any) -> tuple[float, float, bool]:
        judged.append(gain(*args))
        return (-1.0, 0.0, True) if len(judged) == 2 else judged[-1]

    optimiser.mll.evaluate = counting
    monkeypatch.setattr(levenberg_marquardt, "_gain", refusing_the_second)
    loop = CurvatureLoop(optimiser, [], 2)
    while loop.advance() is None:
        pass
    assert (len(loop.history), len(evaluated)) == (3, 4)
    counted = [each.estimate.stats.epochs for each in evaluated]
    found = [row.epochs or 0.0 for row in loop.history]
    curvature = 1.0  # one block solve at each point but the last, at this size in one epoch
    assert found == [counted[0] + curvature, counted[1] + curvature, sum(counted[2:])]
    assert f"{found[2]:.1f} epochs" in str(loop.history[2])


def test_progress_callback_and_log(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[gpi.progress.ProgressReport] = []
    rows: list[gpi.fitting.HistoryRow] = []
    with caplog.at_level(logging.INFO, logger="gpy_iterative.fitting"):
        result = gpi.fit(regression(60), progress=reports.append, callback=rows.append, max_steps=3)
    assert tuple(rows) == result.history
    assert [(report.operation, report.done, report.unit, report.total) for report in reports] == [
        ("fit", row.step, "steps", 3) for row in rows
    ]
    assert {*reports[0].figures} == {"value", "left to gain"}
    assert sum(record.name.startswith("gpy_iterative.fitting") for record in caplog.records) == 1 + len(rows)
    assert "fit by average_information" in caplog.records[0].message


def test_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    gpi.fit(regression(40), max_steps=1)
    assert "steps" in capsys.readouterr().err


def test_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    case = regression()
    result = gpi.fit(gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model), progress=False, max_steps=2)
    value, left = result.plot().axes
    assert len(value.containers) == 1
    (line,) = left.lines
    assert list(line.get_ydata()) == [row.left_to_gain for row in result.history]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        result.plot()


def test_predictions_continue_from_the_fit() -> None:
    mll = regression(200, solver=ITERATIVE)
    quiet(mll)
    assert mll.report is not None
    posterior = mll.posterior()
    x = mll.model.train_inputs[0]
    with torch.no_grad():
        mean = posterior(x).mean
    assert (mean - mll.model.train_targets).std() < 0.25
    assert posterior.report.epochs <= 3


# Methods


def test_adam_with_exact_values_stops_where_twenty_steps_gain_little() -> None:
    mll = regression(60)
    mll.model.covar_module.base_kernel.requires_grad_(False)
    result = quiet(mll, method="adam", max_steps=400)
    assert result.status is FitStatus.CONVERGED
    assert result.steps < 400
    assert 60 * (result.history[-1].value - result.history[-20].value) < 0.05
    assert set(result.standard_errors.values()) == {None}
    reached = dense_value(mll)
    assert dense_optimum(mll) - reached < 0.05
    assert [row.step for row in result.history] == list(range(result.steps + 1))
    assert 60 * result.history[-1].value == pytest.approx(reached, abs=1e-6)  # of the hyperparameters that are returned
    assert result.history[0].step_length == 0
    printed = str(result)
    assert "Adam: method='adam'." in printed
    assert f"({result.steps - 39} more)" in printed
    assert str(result.history[19]) in printed
    assert str(result.history[20]) not in printed


def test_adam_with_values_of_unknown_error_says_so_and_does_not_claim_an_optimum() -> None:
    """Random features draw a new value in every step, which was shown as if it were exact."""
    like = regression(20)
    like.model.covar_module.requires_grad_(False)
    mll = gpi.mlls.SingleSampleRFFMarginalLogLikelihood(
        like.likelihood, like.model, min_frequencies=3, frequency_step=1, max_frequencies=5, generator=0
    )
    result = quiet(mll, method="adam", max_steps=100)
    assert result.status is FitStatus.NOISE
    assert all(math.isnan(row.value_sem) for row in result.history)
    assert f"{result.history[-1].value:.4f} error unknown  moved" in str(result)


def test_adam_with_fixed_random_features_ends_at_their_optimum() -> None:
    like = regression(40)
    mll = gpi.mlls.RFFMarginalLogLikelihood(
        like.likelihood, like.model, num_frequencies=20, resample=False, generator=0
    )
    result = quiet(mll, method="adam")
    assert result.status in (FitStatus.CONVERGED, FitStatus.BOUND)
    assert "error unknown" in str(result)


def test_adam_moves_large_values_relatively() -> None:
    mll = regression(60)
    best = dense_optimum(regression(60))
    mll.model.covar_module.base_kernel.lengthscale = 300.0
    assert quiet(mll, method="adam").steps > 40
    assert best - dense_value(mll) < 1.0


@pytest.mark.parametrize(
    ("constraint", "start"),
    [(Interval(1e-3, 1e3), 999.0), (GreaterThan(300.0), 310.0), (Positive(), 3e7)],
    ids=["interval", "floor", "float32"],
)
def test_a_step_of_adam_neither_jumps_to_a_bound_nor_drowns_in_rounding(constraint: Interval, start: float) -> None:
    mll = regression(20, covariance=gpytorch.kernels.RBFKernel(lengthscale_constraint=constraint)).float()
    kernel: Any = mll.model.covar_module
    mll.model.set_train_data(mll.model.train_inputs[0].float() * start, mll.model.train_targets.float(), strict=False)
    kernel.lengthscale = start
    AdamSteps(mll, num_steps=10).step()
    low = constraint.lower_bound.item()
    assert 0.8 * (start - low) < kernel.lengthscale.item() - low < start - low


def test_laplace_by_adam() -> None:
    x, y = data(80)
    model = LaplaceModel(x, (y > 0.5).double(), gpytorch.likelihoods.BernoulliLikelihood()).double()
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)
    result = quiet(mll, max_steps=15, method="adam")
    assert result.method == "adam"
    assert result.history[-1].value > result.history[0].value


def test_a_laplace_model_without_data_is_refused() -> None:
    x, y = data(20)
    model = LaplaceModel(x, (y > 0.5).double(), gpytorch.likelihoods.BernoulliLikelihood()).double()
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)
    model.train_inputs = model.train_targets = None
    with pytest.raises(ValueError, match="has no training data: pass batches"):
        quiet(mll)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_fit_whose_modes_are_not_found_is_no_optimum() -> None:
    """Counts of nine million and a matrix evaluated in float32: the values stall where the modes fail."""

    class Evaluated(LaplaceModel):
        def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
            kernel = DenseLinearOperator(self.covar_module(x).to_dense())
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), kernel)

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=generator)
    y = torch.poisson((16 + torch.sin(6 * x[:, 0])).exp().double(), generator=generator).float()
    model = Evaluated(x, y, gpi.likelihoods.PoissonLogLikelihood())
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)
    result = quiet(mll)
    assert mll.report.status is not gpi.solvers.SolveStatus.CONVERGED
    assert result.status is FitStatus.STAGNATED


def test_mini_batches_of_the_method_and_of_the_user() -> None:
    for batches in (None, list(torch.arange(200).split(50))):
        result = quiet(features(), max_steps=40, batches=batches)
        assert result.method == "adam"
        assert sum(row.value for row in result.history[-10:]) > sum(row.value for row in result.history[:10])


def test_quadruply_stochastic_models_have_their_own_optimiser() -> None:
    x, y = data(200)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double().requires_grad_(False)
    model = gpi.models.QuadruplyStochasticGP(gpi.models.NystromBasis(kernel, x[:30])).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    mll = gpi.mlls.QuadruplyStochasticELBO(likelihood, model, generator=0)
    with pytest.raises(ValueError, match="batches="):
        quiet(mll)
    result = quiet(mll, batches=[(x, y)], max_steps=60)
    assert result.history[-1].value > result.history[0].value + 0.1
    assert "60 steps of own optimizer" in str(result)


@pytest.mark.slow
def test_quadruply_stochastic_models_learn_hyperparameters(tmp_path: Path) -> None:
    """With a head alone they come near to the optimum; a longer fit goes on from the checkpoint of a shorter one."""
    x, y = data(200)
    exact = regression(200, covariance=gpytorch.kernels.RBFKernel(ard_num_dims=3).double())
    quiet(exact)

    def fit(steps: int | None) -> tuple[gpi.fitting.FitResult, torch.Tensor]:
        kernel = gpytorch.kernels.RBFKernel(ard_num_dims=3).double()
        model = gpi.models.QuadruplyStochasticGP(
            gpi.models.NystromBasis(kernel, x[:100]), gpytorch.means.ConstantMean()
        )
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        mll = gpi.mlls.QuadruplyStochasticELBO(likelihood, model.double(), generator=0)
        return quiet(mll, batches=[(x, y)], max_steps=steps, checkpoint=tmp_path / "run.pt"), kernel.lengthscale[0]

    fit(20)
    result, lengthscales = fit(None)
    assert (result.status, result.steps) == (FitStatus.BUDGET, 300)
    optimum = exact.model.covar_module.lengthscale[0]
    assert (lengthscales / optimum).log().abs()[0] < 0.25  # that of the best determined input began .54 away


def test_a_start_on_subsets() -> None:
    plain, begun = quiet(regression(150), max_steps=1), quiet(regression(150), start="subsets", max_steps=1)
    assert begun.history[0].value > plain.history[0].value


def test_the_first_row_counts_the_time_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.fit.initialize_from_subsets", lambda *_, **__: time.sleep(0.3))
    result = quiet(regression(60), start="subsets", max_steps=1)
    assert result.history[0].seconds >= 0.3
    assert result.seconds == sum(row.seconds for row in result.history)


def test_subsets_of_a_model_that_is_no_exact_process_are_refused_before_work() -> None:
    x, y = data(80)
    model = LaplaceModel(x, (y > 0.5).long(), gpytorch.likelihoods.BernoulliLikelihood()).double()
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)
    with pytest.raises(ValueError, match=r"LaplaceModel with BernoulliLikelihood: train from"):
        quiet(mll, start="subsets")


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "newton"}, ValueError, "method must be one of"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
        ({"start": "ones"}, ValueError, "start must be"),
        ({"progress": "yes"}, TypeError, "progress must be"),
        ({"generator": "seed"}, TypeError, "generator must be"),
        ({"method": "average_information", "batches": [1]}, ValueError, "batches=None"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gpi.fit(regression(20), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [None, ITERATIVE])
def test_targets_far_from_zero(dtype: torch.dtype, solver: gpi.solvers.Solver | None) -> None:
    """The mean's constant is in their units: its step is not clipped, and it is determined."""
    x, y = data(200)
    generator = torch.Generator().manual_seed(1)
    noisy = y + 0.3 * torch.randn(200, generator=generator, dtype=torch.float64)
    ends = []
    for shift in (0.0, 300.0):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
        model = Regression(x, noisy + shift, likelihood, kernel).to(dtype)
        model.set_train_data(x.to(dtype), (noisy + shift).to(dtype), strict=False)
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver, generator=0)
        with pytest.warns(DataWarning, match="away from the prior's mean") if shift else nullcontext():
            result = quiet(mll)
        assert result.status in (FitStatus.CONVERGED, FitStatus.NOISE)
        constant = next(part for part in result.hyperparameters if part.name == "mean_module.constant")
        assert constant.standard_error is not None
        ends.append((result.history[-1].value, constant.value - shift, constant.standard_error))
    (value, constant, error), (shifted_value, shifted_constant, _) = ends
    assert shifted_value == pytest.approx(value, abs=0.01)
    assert abs(shifted_constant - constant) < 0.5 * error


def test_equal_inputs_are_named() -> None:
    """Their nearest others are nowhere: a warning called the kernel matrix diagonal."""
    mll = regression(20, covariance=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
    mll.model.set_train_data(torch.full((20, 3), 0.7, dtype=torch.float64), strict=False)
    with pytest.warns(DataWarning) as warned:
        quiet(mll, max_steps=1)
    sentences = [str(each.message) for each in warned if each.category is DataWarning]
    assert any("All training inputs are equal" in sentence for sentence in sentences)
    assert not any("lengthscales apart" in sentence for sentence in sentences)


def test_a_callback_may_predict() -> None:
    mll = regression(60)
    x = mll.model.train_inputs[0][:3]
    predicted: list[torch.Tensor] = []
    gpi.fit(mll, progress=False, max_steps=2, callback=lambda _: predicted.append(mll.posterior()(x).mean.detach()))
    assert len(predicted) == 3


def test_ctrl_c_in_a_callback_ends_the_fit() -> None:
    def interrupt(_: gpi.fitting.HistoryRow) -> None:
        raise KeyboardInterrupt

    result = gpi.fit(regression(60), progress=False, callback=interrupt)
    assert (result.status, len(result.history)) == (FitStatus.BUDGET, 1)


def test_paths_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist: make it first"):
        quiet(regression(20), checkpoint=tmp_path / "nowhere" / "run.pt")
    with pytest.raises(ValueError, match="is a folder: give the name of a file"):
        quiet(regression(20), checkpoint=tmp_path)
    with pytest.raises(TypeError, match="checkpoint must be None or the name of a file, got 3"):
        quiet(regression(20), checkpoint=3)


def test_batches_that_can_be_read_once() -> None:
    with pytest.raises(ValueError, match="read only once"):
        gpi.fit(regression(20), method="adam", batches=iter([torch.arange(5)]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batches": 3}, TypeError, "batches must be a list or a DataLoader, got 3"),
        ({"batches": []}, ValueError, "batches= is empty"),
        ({"batches": [3]}, ValueError, "pair .* or a tensor of row numbers, got int"),
        ({"batches": [torch.ones(5)]}, ValueError, r"pair .*, got a tensor of torch\.float32"),
        (
            {"batches": [(torch.ones(5, 3), torch.ones(5))]},
            ValueError,
            r"pair \(x, y\) of 5: pass batches=None, or row",
        ),
        ({"callback": 3}, TypeError, "callback must be None or callable, got 3"),
    ],
)
def test_options_of_another_type(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quiet(features(), **options)


def test_row_numbers_for_a_method_that_takes_all_rows() -> None:
    mll = regression(20)
    with pytest.raises(
        ValueError, match="HutchinsonMarginalLogLikelihood takes all 20 rows in every step: pass batches=N"
    ):
        quiet(mll, batches=[torch.arange(5)])


def test_row_numbers_for_a_model_without_training_data() -> None:
    x, _ = data(40)
    kernel = gpytorch.kernels.RBFKernel().double().requires_grad_(False)
    model = gpi.models.QuadruplyStochasticGP(gpi.models.NystromBasis(kernel, x[:10]))
    mll = gpi.mlls.QuadruplyStochasticELBO(gpytorch.likelihoods.GaussianLikelihood().double(), model)
    with pytest.raises(ValueError, match=r"row numbers, and the model has no training data of its own: pass pairs"):
        quiet(mll, batches=[torch.arange(5)])


def test_a_pair_of_other_rows() -> None:
    mll = regression(20)
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    with pytest.raises(ValueError, match=r"own 20 rows, .* pair \(x, y\) of 20 others: pass batches=None"):
        quiet(mll, batches=[(x + 1, y)])
    quiet(mll, batches=[(x, y)], max_steps=1)


def test_a_model_without_training_data_is_told_a_call_that_works() -> None:
    mll = regression(20)
    x, y = mll.model.train_inputs, mll.model.train_targets
    mll.model.train_inputs = mll.model.train_targets = None
    with pytest.raises(ValueError, match=r"model\.set_train_data\(inputs, targets, strict=False\)"):
        quiet(mll)
    mll.model.set_train_data(x, y, strict=False)
    quiet(mll, max_steps=1)


@pytest.mark.parametrize("method", ["auto", "adam"])
def test_nothing_to_fit(method: str) -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        quiet(regression(20).requires_grad_(False), method=method)


@pytest.mark.parametrize("method", ["auto", "adam"])
def test_only_a_parameter_without_effect_is_free(method: str) -> None:
    mll = regression(20).requires_grad_(False)
    mll.model.unused = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"nothing to fit: .*\(unused\[0\] has no part in it\)"):
        quiet(mll, method=method)


def test_other_marginal_log_likelihoods() -> None:
    mll = regression(20)
    stock = gpytorch.mlls.ExactMarginalLogLikelihood(mll.likelihood, mll.model)
    for other in (stock, mll.model):
        with pytest.raises(TypeError, match=r"of gpy_iterative such as [^,]*, got \w*\.$"):
            gpi.fit(other)  # pyright: ignore[reportArgumentType]
    models = gpytorch.models.IndependentModelList(mll.model)
    with pytest.raises(TypeError, match=r"got SumMarginalLogLikelihood\. Fit the members of the sum one by one\."):
        gpi.fit(gpytorch.mlls.SumMarginalLogLikelihood(models.likelihood, models))


class LateFrequencies(gpytorch.kernels.RFFKernel):
    """Draws its frequencies at the first evaluation of all data."""

    def forward(self, x1: torch.Tensor, x2: torch.Tensor, **options: Any) -> torch.Tensor:
        if len(x1) > 2 and not hasattr(self, "drawn"):
            self.register_buffer("drawn", torch.ones(1))
        return super().forward(x1, x2, **options)


def test_an_error_after_late_frequencies_is_told() -> None:
    x, y = data(20)
    y[3] = torch.nan
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, LateFrequencies(4)).double()
    with pytest.raises(ValueError, match="must be finite"):
        quiet(gpi.mlls.MinibatchMarginalLogLikelihood(likelihood, model, batch_size=10, generator=0))


@pytest.mark.parametrize("method", ["auto", "adam", "average_information"])
def test_a_fit_that_cannot_begin_changes_nothing(method: str) -> None:
    """The choice of the method evaluates the model, which changes buffers of layers."""
    case = CASES["deep"]()
    case.model.scale = gpytorch.utils.grid.ScaleToBounds(-1.0, 1.0)
    case.model.network.append(case.model.scale)
    case.y[3] = torch.nan
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model.double(), generator=0).eval()
    before = {name: tensor.clone() for name, tensor in mll.state_dict().items()}
    with pytest.raises(ValueError, match="must be finite"):
        quiet(mll, method=method)
    for name, tensor in mll.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert not any(module.training for module in mll.modules())


def test_data_that_are_not_finite() -> None:
    mll = regression(20)
    mll.model.train_targets[3] = torch.nan
    with pytest.raises(ValueError, match="nan"):
        quiet(mll)


def test_arguments_of_a_likelihood_are_those_of_its_training_data() -> None:
    problem = poisson_case("poisson-log", n=15)
    exposure = torch.linspace(1, 9, 15, dtype=torch.float64)
    values = []
    for given in ((exposure,), ()):
        model = LaplaceModel(problem.x, problem.y, Exposed())
        mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model)
        at_start = mll(model(problem.x), problem.y, *given).item()
        result = gpi.fit(mll, params=given, max_steps=2, progress=False)
        assert result.history[0].value == pytest.approx(at_start, rel=1e-9)
        values.append(at_start)
    assert values[0] != values[1]


def test_noise_that_depends_on_inputs_takes_those_that_are_given() -> None:
    fits = []
    for given in ((), "own", "shifted"):
        case = CASES["heteroskedastic"]()
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
        inputs = {"own": (case.x,), "shifted": (case.x + 0.3,)}.get(given, ()) if given else ()
        fits.append(gpi.fit(mll, params=inputs, max_steps=2, progress=False).history[-1].value)
    assert fits[0] == fits[1]
    assert fits[0] != fits[2]


def test_arguments_of_a_likelihood_that_cannot_be_passed_on_are_refused() -> None:
    mll = regression(20)
    x = mll.model.train_inputs[0]
    with pytest.raises(ValueError, match="all training data"):
        gpi.fit(mll, params=(x,), start="subsets")
    with pytest.raises(ValueError, match="all training data"):
        gpi.fit(mll, params=(x,), method="adam", batches=[(x, mll.model.train_targets)])
    with pytest.raises(TypeError, match="tuple"):
        gpi.fit(mll, params=x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="tuple"):
        gpi.fitting.AverageInformation(mll, params=x)  # pyright: ignore[reportArgumentType]


def test_noise_follows_training_inputs_that_were_replaced() -> None:
    mlls = []
    for _ in range(2):
        case = CASES["heteroskedastic"]()
        mlls.append(gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0))
    optimiser = gpi.fitting.AverageInformation(mlls[0])
    for mll in mlls:
        mll.model.set_train_data(case.x + 0.3, case.y, strict=False)
    expected = gpi.fitting.AverageInformation(mlls[1]).point.value
    assert optimiser.point.value == pytest.approx(expected, rel=1e-12)

"""One step of average information, and what undoes it."""

import math
from dataclasses import replace
from typing import Any

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.fitting import AverageInformation
from gpy_iterative.fitting.steps import levenberg_marquardt
from gpy_iterative.fitting.steps.curvature import Curvature
from gpy_iterative.fitting.steps.levenberg_marquardt import FIRST_DAMPING, RADIUS, RIDGE
from gpy_iterative.fitting.steps.points import Assessment, Secant
from tests.exact.gaussian_models import CASES, Case, Regression
from tests.fitting.problems import (
    ITERATIVE,
    data,
    dense_information,
    dense_value,
    failing_evaluations,
    parameters,
    regression,
)


def test_a_step_is_that_of_the_dense_formulas() -> None:
    mll = regression(150)
    optimiser = AverageInformation(mll)
    coordinates, start = optimiser.coordinates, optimiser.coordinates.read()
    before = dense_value(mll)
    case = Case(mll.model, mll.likelihood, *mll.model.train_inputs, mll.model.train_targets)
    matrix, step = dense_information(case, coordinates), 1e-5
    gradient = torch.zeros(len(start), dtype=torch.float64)
    for entry in range(len(start)):
        values = []
        for sign in (1, -1):
            moved = start.clone()
            moved[entry] += sign * step
            coordinates.write(moved)
            values.append(dense_value(mll))
        gradient[entry] = (values[0] - values[1]) / (2 * step)
    coordinates.write(start)
    ridge = RIDGE * 150 * torch.eye(len(start), dtype=torch.float64)
    left = float(gradient @ torch.linalg.solve(matrix + ridge, gradient)) / 2
    radius = torch.where(coordinates.has_units, torch.inf, RADIUS)  # that of the mean
    damping = min(left / 150, FIRST_DAMPING) * matrix.diagonal().maximum(gradient.abs() / radius).diag()
    move = torch.linalg.solve(matrix + damping + ridge, gradient).clamp(-radius, radius)
    made = optimiser.step()
    assert made is not None
    assert made.trials == 1
    assert torch.allclose(coordinates.read() - start, move, atol=1e-4)
    assert made.length == pytest.approx(float(move.abs().max()), abs=1e-4)
    assert made.predicted == pytest.approx(float(gradient @ move - move @ (matrix + ridge) @ move / 2), rel=1e-4)
    assert made.gained == pytest.approx(dense_value(mll) - before, rel=1e-6)


def test_what_is_left_to_gain() -> None:
    optimiser = AverageInformation(regression(150))
    for _ in range(3):
        optimiser.step()
    left = optimiser.assess().left
    value = optimiser.point.value
    for _ in range(6):
        optimiser.step()
    assert optimiser.point.value - value == pytest.approx(left, rel=0.3)
    assert optimiser.assess().left < 0.01


def test_what_the_probes_hide_is_expected_to_be_left() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    factor, gradient, errors = draw(4, 4), draw(4), draw(3, 4)
    held = torch.tensor([False, True, False, False])
    curvature = Curvature(factor @ factor.mT, torch.zeros(4), torch.zeros(4, dtype=torch.bool), None, 0.0)
    found = Assessment(curvature, gradient, held, 0.0, 0.0, errors, torch.full((4,), 0.1), torch.ones(4))
    found = replace(found, left=found.energy(gradient.unsqueeze(0)), noise=found.energy(errors))
    matrix = (factor @ factor.mT + 0.1 * torch.eye(4, dtype=torch.float64))[~held][:, ~held]
    true = lambda error: 0.5 * (gradient - error)[~held] @ torch.linalg.solve(matrix, (gradient - error)[~held])
    # The errors and their negatives have mean zero; half the difference has no quadratic term.
    pairs = torch.stack([torch.stack([true(error), true(-error)]) for error in errors])
    linear = (pairs[:, 0] - pairs[:, 1]) / 2
    left, error = found.expected()
    assert left == pytest.approx(float(pairs.mean()))
    assert error == pytest.approx(math.hypot(found.noise, float(linear.square().mean().sqrt())))


@pytest.mark.parametrize("solver", [None, ITERATIVE], ids=["exact", "iterative"])
def test_a_trial_that_fails_is_undone_and_a_shorter_one_follows(solver: gpi.solvers.Solver | None) -> None:
    mll = regression(100, solver=solver)
    optimiser = AverageInformation(mll)
    with failing_evaluations(mll, NonFiniteError("no"), after=1, times=2):
        step = optimiser.step()
    assert step is not None
    assert step.trials == 3
    assert 0 < step.length <= RADIUS


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=["ctrl-c", "error"])
def test_an_interrupted_step_leaves_everything_as_it_was(error: BaseException) -> None:
    mll, other = regression(100, solver=ITERATIVE), regression(100, solver=ITERATIVE)
    optimiser, untouched = AverageInformation(mll), AverageInformation(other)
    before = parameters(mll)
    with failing_evaluations(mll, error, after=1, times=1), pytest.raises(type(error)):
        optimiser.step()
    assert all(map(torch.equal, parameters(mll), before))
    for each in (optimiser, untouched):
        each.step()
    assert all(map(torch.equal, parameters(mll), parameters(other)))


@pytest.mark.parametrize(("change", "is_seen"), [(-2.5, True), (-1.5, False), (2.5, False)])
def test_a_loss_that_the_values_show_is_a_loss(change: float, is_seen: bool) -> None:
    """Fits of nearly equal tasks lost 90 nats in two steps, as noise of the gradients hid the predictions: STAGNATED."""
    optimiser = AverageInformation(regression(solver=ITERATIVE))
    point, found = optimiser.point, optimiser.assess()
    move = torch.ones_like(point.position)
    noisy = replace(found, samples=100 * point.error * torch.ones_like(found.samples))
    change *= math.hypot(point.error, point.error)
    reached = replace(point, value=point.value + change, gradient=-point.gradient)  # no gain by the gradients
    gained, least, seen = levenberg_marquardt._gain(point, noisy, reached, move, predicted=point.error)
    assert seen == is_seen
    assert gained == pytest.approx(change if is_seen else 0.0)
    assert (gained < least) == is_seen


def test_no_step_where_nothing_gains() -> None:
    mll = regression(100)
    optimiser = AverageInformation(mll)
    before = parameters(mll)
    with failing_evaluations(mll, NonFiniteError("no"), after=1, times=100):
        assert optimiser.step() is None
    assert all(map(torch.equal, parameters(mll), before))


def test_no_step_leaves_the_report_of_its_point(monkeypatch: pytest.MonkeyPatch) -> None:
    optimiser = AverageInformation(regression(100))
    optimiser.assess()
    report = optimiser.mll.report
    monkeypatch.setattr(levenberg_marquardt, "_gain", lambda *_: (-1.0, 0.0, True))
    assert optimiser.step() is None
    assert optimiser.mll.report is report


def test_a_bound_holds_a_parameter_and_not_the_others() -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(0.3))
    mll = regression(100, likelihood=likelihood)
    optimiser = AverageInformation(mll)
    for _ in range(12):
        optimiser.step()
    found = optimiser.assess()
    assert found.held.tolist() == [name == "noise_covar.noise" for name in optimiser.coordinates.names]
    assert likelihood.noise.item() == pytest.approx(0.3, rel=2e-3)
    assert found.left < 0.05


def test_a_start_at_a_bound_is_moved_inside() -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-4))
    mll = regression(60, likelihood=likelihood)
    likelihood.noise_covar.raw_noise.data.fill_(-200.0)  # 1e-4 to rounding
    optimiser = AverageInformation(mll)
    assert optimiser.step() is not None
    assert likelihood.noise.item() > 1e-4


def test_a_batch_of_models_makes_the_steps_of_each() -> None:
    case = CASES["batch"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    optimiser = AverageInformation(mll)
    matrix = optimiser.assess().curvature.matrix
    member = torch.tensor([int(name[name.index("[") + 1]) for name in optimiser.coordinates.names])
    assert not matrix[member == 0][:, member == 1].any()
    assert (matrix.diagonal() > 0).all()
    for _ in range(8):
        optimiser.step()
    assert optimiser.assess().left < 1.0


def test_more_probes_make_less_noise_and_leave_the_users_mll_alone() -> None:
    mll = regression(200, solver=ITERATIVE, num_probes=4)
    optimiser = AverageInformation(mll)
    before = optimiser.assess().noise
    optimiser.raise_probes(16)
    assert optimiser.assess().noise < before / 4
    assert mll.probes.num_probes == 4


def test_other_mlls_are_refused() -> None:
    mll = regression(20)
    other = gpi.mlls.RussianRouletteMarginalLogLikelihood(mll.likelihood, mll.model)
    with pytest.raises(TypeError, match=r"RussianRoulette.*method='adam'"):
        AverageInformation(other)
    with pytest.raises(TypeError, match="generator"):
        AverageInformation(mll, generator="a")


def test_a_generator_may_be_a_seed() -> None:
    states = [
        AverageInformation(regression(20), generator=given).state() for given in (3, torch.Generator().manual_seed(3))
    ]
    assert torch.equal(*(state["generator"] for state in states))


def test_the_solver_of_large_multitask_models_is_conjugate_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their targets [n, T] have as many entries as H has rows."""
    case = CASES["multitask"]()  # 25 rows, two tasks
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    sizes = []

    class Recorded(gpi.solvers.ConjugateGradients):
        def solve(self, operator: LinearOperator, *args: Any, **kwargs: Any) -> gpi.solvers.Solution:
            sizes.append(operator.shape[-1])
            return super().solve(operator, *args, **kwargs)

    monkeypatch.setattr("gpy_iterative.exact.base.ConjugateGradients", Recorded)
    monkeypatch.setattr("gpy_iterative.linear_solvers.exact_factors.kronecker_parts", lambda operator: None)
    monkeypatch.setattr("gpy_iterative.linear_solvers.default.EXACT_BELOW", 50)
    assert len(AverageInformation(mll).assess().samples) == 0
    monkeypatch.setattr("gpy_iterative.linear_solvers.default.EXACT_BELOW", 40)
    assert len(AverageInformation(mll).assess().samples) > 0
    assert sizes == [50]


@pytest.mark.parametrize(("factor", "is_near", "is_poor"), [(0.3, True, False), (1.8, False, True)])
def test_a_secant_shows_the_curvature_along_its_move(factor: float, is_near: bool, is_poor: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    root, move, other = (torch.randn(4, *size, generator=generator, dtype=torch.float64) for size in ((4,), (), ()))
    matrix = root @ root.mT
    true = factor * matrix
    seen = Secant(move, true @ move, is_poor).seen_in(matrix, is_near=is_near)
    torch.testing.assert_close(move @ seen @ move, move @ true @ move)
    # Conjugate directions keep their curvature.
    conjugate = other - (other @ matrix @ move) / (move @ matrix @ move) * move
    torch.testing.assert_close(seen @ conjugate, matrix @ conjugate)


@pytest.mark.parametrize(
    ("part", "is_near", "is_poor"),
    [
        *((part, True, True) for part in (-1.0, 0.01, 5.0, float("nan"))),
        (1.8, False, False),  # A falls along good steps
        (0.3, False, True),
    ],
)
def test_a_secant_out_of_range_shows_nothing(part: float, is_near: bool, is_poor: bool) -> None:
    matrix, move = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert Secant(move, part * move, is_poor).seen_in(matrix, is_near=is_near) is matrix


class Located(gpytorch.kernels.Kernel):
    """Products of amplitudes that rise at a trained location, in the units of the inputs."""

    has_lengthscale = False

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_parameter("location", torch.nn.Parameter(torch.tensor([0.4 * scale])))

    def forward(self, x1: torch.Tensor, x2: torch.Tensor, diag: bool = False, **params: object) -> torch.Tensor:
        amplitude = lambda x: 1 + 3 * torch.sigmoid(10 * (x[..., 0] - self.location) / self.scale)
        if diag:
            return amplitude(x1) * amplitude(x2)
        return amplitude(x1).unsqueeze(-1) * amplitude(x2).unsqueeze(-2)


def test_units_of_the_inputs_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(150, 1, generator=generator, dtype=torch.float64)
    amplitude = 1 + 3 * torch.sigmoid(10 * (x - 0.7))
    covariance = torch.exp(-0.5 * (torch.cdist(x, x) / 0.05) ** 2) * amplitude * amplitude.mT
    root = torch.linalg.cholesky(covariance + 0.01 * torch.eye(150))
    y = root @ torch.randn(150, generator=generator, dtype=torch.float64)
    found = []
    for scale in (1.0, 1e5):
        rbf = gpytorch.kernels.RBFKernel()
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(x * scale, y, likelihood, gpytorch.kernels.ScaleKernel(Located(scale) * rbf)).double()
        rbf.lengthscale = 0.1 * scale
        result = gpi.fit(gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model), progress=False)
        assert result.status is gpi.fitting.FitStatus.CONVERGED
        found.append((result.history[-1].value, model.covar_module.base_kernel.kernels[0].location.item() / scale))
    assert found[1] == pytest.approx(found[0], abs=1e-3)


def test_a_slope_of_a_constant_input_is_not_determined() -> None:
    x, y = data(100)
    x[:, 2] = 0.0
    likelihood, mean = gpytorch.likelihoods.GaussianLikelihood(), gpytorch.means.LinearMean(3)
    model = Regression(x, y, likelihood, gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())).double()
    model.mean_module = mean.double()
    result = gpi.fit(gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model), progress=False)
    assert result.status is gpi.fitting.FitStatus.CONVERGED
    assert result.standard_errors["mean_module.weights[2]"] is None
    assert result.standard_errors["mean_module.weights[0]"] is not None

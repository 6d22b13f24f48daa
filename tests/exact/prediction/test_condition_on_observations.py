"""New observations of a fitted posterior, against posteriors of all data from zero."""

import copy
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

from gpy_iterative.exact.prediction import new_observations, training_solves
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.preconditioners import RandomlyPivotedCholesky
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import AlternatingProjections, Cholesky, ConjugateGradients, IterativeSolver
from tests.botorch_apart import acquisition, models, sampling, transforms
from tests.exact.gaussian_models import CASES, Case, Regression, data, regression
from tests.exact.prediction.test_posterior import dense, held_out_points

TIGHT = ConjugateGradients(tolerance=1e-10)
LOW_RANK = ConjugateGradients(preconditioner=RandomlyPivotedCholesky(rank=100))
SOLVERS = [Cholesky(), TIGHT]


def posterior_of(case: Case, solver: Any = TIGHT, **options: Any) -> PathwisePosterior:
    options = {"exact_below": 0, "rank": 100} | options
    return PathwisePosterior(case.model, case.likelihood, solver=solver, params=case.params, **options)


def new_data(case: Case, m: int = 7, *batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs [m, d], targets as the case's [*batch, ...], and variances where the likelihood wants them."""
    shape = case.y.shape
    in_list = m * max(shape[-1] // len(case.x), 1)
    shape = (m, *shape[1:]) if shape[0] == len(case.x) else (*shape[:-1], in_list)
    y = torch.randn((*batch, *shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    has_fixed_noise = isinstance(case.likelihood, FixedNoiseGaussianLikelihood)
    return held_out_points(m), y, 0.2 + 0.1 * y.sin() if has_fixed_noise else None


def whole(posterior: PathwisePosterior) -> Case:
    """The case of all data, with nothing solved."""
    model, likelihood = copy.deepcopy((posterior.model, posterior.likelihood))
    return Case(model, likelihood, model.train_inputs[0], model.train_targets)


def assert_is_dense(posterior: PathwisePosterior, atol: float = 1e-8) -> None:
    x = held_out_points(9) + 0.1
    mean, covariance = dense(whole(posterior), x)
    prediction = posterior(x)
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=atol)
    torch.testing.assert_close(prediction.covariance_matrix, covariance, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "solver", "asked"),
    [(name, *pair) for name in sorted(CASES) for pair in ((Cholesky(), False), (TIGHT, True))]
    + [(name, *pair) for name in ("matern-3/2", "multitask") for pair in ((Cholesky(), True), (TIGHT, False))],
)
def test_equals_dense_conditioning(name: str, solver: Any, asked: bool) -> None:
    case = CASES[name]()
    x, y, noise = new_data(case)
    posterior = posterior_of(case, solver)
    if asked:
        _ = posterior(x).variance
    new = posterior.condition_on_observations(x, y, noise=noise)
    assert new.model.train_inputs[0].shape[-2] == len(case.x) + len(x)
    assert_is_dense(new)


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("solver", [LOW_RANK, AlternatingProjections(block_size=100)])
def test_costs_less_than_a_new_solve(solver: IterativeSolver, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the usual tolerance, at which a padded start alone would ignore a single datum."""
    monkeypatch.setattr(new_observations, "NEIGHBOURS", 200)
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=1000)
    case.likelihood.initialize(noise=0.01)
    new_x, new_y = (part[1000:] for part in data(1000 + count))
    posterior = PathwisePosterior(case.model, case.likelihood, solver=solver)
    new = posterior.condition_on_observations(new_x, new_y)
    scratch = PathwisePosterior(new.model, new.likelihood, solver=solver)
    assert new.report.epochs + new.report.overhead < 0.5 * (scratch.report.epochs + scratch.report.overhead)
    assert new.report.residual <= solver.tolerance
    wanted = PathwisePosterior(new.model, new.likelihood, solver=Cholesky())(new_x).mean
    error, move = new(new_x).mean - wanted, posterior(new_x).mean - wanted
    assert error.norm() < 0.25 * move.norm()


def test_chunks_one_by_one() -> None:
    case = CASES["matern-3/2"]()
    x, y, _ = new_data(case, 9)
    posterior = at_once = posterior_of(case)
    at_once = posterior.condition_on_observations(x, y)
    _ = posterior(x).variance
    for part in torch.arange(9).split(2):
        posterior = posterior.condition_on_observations(x[part], y[part])
    assert torch.equal(posterior.model.train_inputs[0], at_once.model.train_inputs[0])
    torch.testing.assert_close(posterior(x).mean, at_once(x).mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(posterior(x).variance, at_once(x).variance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_new_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_observations, "NEW_ROWS", rows)
    monkeypatch.setattr(new_observations, "NEIGHBOURS", 4)
    monkeypatch.setattr(new_observations, "ROWS_AT_A_TIME", 2)
    for name in ("matern-3/2", "batch", "multitask"):
        case = CASES[name]()
        x, y, _ = new_data(case)
        assert_is_dense(posterior_of(case).condition_on_observations(x, y))


@pytest.mark.parametrize("solver", SOLVERS)
def test_duplicates_and_nothing(solver: Any) -> None:
    case = CASES["matern-3/2"]()
    posterior = posterior_of(case, solver)
    new = posterior.condition_on_observations(torch.cat([case.x[:3], case.x[:1]]), torch.ones(4, dtype=torch.float64))
    assert_is_dense(new)
    nothing = posterior.condition_on_observations(case.x[:0], case.y[:0])
    torch.testing.assert_close(nothing(held_out_points()).mean, posterior(held_out_points()).mean)


def test_missing_targets() -> None:
    case = CASES["matern-3/2"]()
    x, y, _ = new_data(case)
    case.model.train_targets[3], y[2] = torch.nan, torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        posterior = posterior_of(case)
        _ = posterior(x).variance
        prediction = posterior.condition_on_observations(x, y)(x + 0.1)
    present = torch.tensor([0, 1, 3, 4, 5, 6])
    case.model.set_train_data(*(part[torch.arange(40) != 3] for part in (case.x, case.y)), strict=False)
    wanted = posterior_of(case).condition_on_observations(x[present], y[present])(x + 0.1)
    torch.testing.assert_close(prediction.mean, wanted.mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(prediction.variance, wanted.variance, rtol=0, atol=1e-8)


def test_noise_of_missing_targets_has_no_meaning() -> None:
    case = CASES["fixed-noise"]()
    x, y, noise = new_data(case)
    assert noise is not None
    y[2] = torch.nan
    posterior = posterior_of(case)
    with gpytorch.settings.observation_nan_policy("mask"):
        known, unknown = (
            posterior.condition_on_observations(x, y, noise=noise.where(~y.isnan(), of_missing))
            for of_missing in (0.1, torch.nan)
        )
        torch.testing.assert_close(unknown(x + 0.1).mean, known(x + 0.1).mean, rtol=0, atol=0)
        torch.testing.assert_close(unknown(x + 0.1).variance, known(x + 0.1).variance, rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"noise\[3\] is nan"):
            posterior.condition_on_observations(x, y, noise=noise.where(torch.arange(len(y)) != 3, torch.nan))


def test_projections_grow_and_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never below the exact variance, and nearer to it than before."""
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=150)
    x = held_out_points(20)
    posterior = posterior_of(case, rank=16, num_neighbours=10)
    _ = posterior(x).variance
    y = torch.zeros(20, dtype=torch.float64)
    new = posterior.condition_on_observations(x[:10], y[:10])
    assert new.solves.projection().basis.shape[-1] == 26
    exact = dense(whole(new), x)[1].diagonal()
    ratio = new(x).variance / exact
    assert ratio.min() > 1 - 1e-8
    assert ratio[:10].max() < 1.03  # at the new data
    grown = new.condition_on_observations(x[10:16], y[10:16])
    monkeypatch.setattr(training_solves, "MAX_GROWTH", 1)
    anew = new.condition_on_observations(x[10:16], y[10:16])
    assert grown.solves.projection().basis.shape[-1] == 32
    assert anew.solves.projection().basis.shape[-1] == 16
    assert (anew(x).variance >= dense(whole(anew), x)[1].diagonal() * (1 - 1e-8)).all()


@pytest.mark.parametrize("name", ["matern-3/2", "batch", "fixed-noise"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_paths_are_the_same_functions_of_the_prior(name: str, solver: Any) -> None:
    case = CASES[name]()
    x, y, noise = new_data(case)
    posterior = posterior_of(case, solver, num_frequencies=4000)
    old = posterior.sample_paths(3)
    new = posterior.condition_on_observations(x, y, noise=noise)
    draws = new.solves.draws
    assert draws is not None
    paths = new.sample_paths(3)
    assert paths._draws.keys() == old._draws.keys()
    for key, drawn in old._draws.items():
        assert torch.equal(drawn, paths._draws[key])
    assert torch.equal(draws.draws["noise_base"][..., : len(case.x), :], old_noise(posterior))
    again = copy.deepcopy((new.model, new.likelihood))
    scratch = PathwisePosterior(*again, solver=solver, exact_below=0, num_frequencies=4000, params=())
    scratch.solves.draws = training_solves.PriorDraws(draws.draws, torch.zeros_like(draws.solutions))
    torch.testing.assert_close(paths(x + 0.1), scratch.sample_paths(3)(x + 0.1), rtol=0, atol=1e-7)


def old_noise(posterior: PathwisePosterior) -> Tensor:
    draws = posterior.solves.draws
    assert draws is not None
    return draws.draws["noise_base"]


def test_paths_interpolate_new_data() -> None:
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=2.5)), n=15)
    case.likelihood.initialize(noise=1e-4)
    x, y, _ = new_data(case, 4)
    posterior = posterior_of(case)
    before = posterior.sample_paths(6)
    values = posterior.condition_on_observations(x, y).sample_paths(8)(x)
    assert (before(x) - y).abs().mean() > 0.1
    assert (values - y).abs().max() < 0.1


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", ["matern-3/2", "batch", "multitask", "fixed-noise"])
def test_targets_that_differ_at_the_same_inputs(name: str, solver: Any) -> None:
    """A batch of posteriors from one matrix."""
    case = CASES[name]()
    x, y, noise = new_data(case, 5, 3)
    posterior = posterior_of(case, solver, num_frequencies=50)
    new = posterior.condition_on_observations(x, y, noise=None if noise is None else noise[0])
    if noise is None:
        assert new.solves.system.operator.batch_shape == posterior.solves.system.operator.batch_shape
    assert (new.variance_error(x).largest) < 1e-3
    prediction = new(x + 0.1)
    for index in range(3):
        one = posterior.condition_on_observations(x, y[index], noise=None if noise is None else noise[0])
        expected = one(x + 0.1)
        torch.testing.assert_close(prediction.mean[index], expected.mean, rtol=0, atol=1e-8)
        torch.testing.assert_close(prediction.variance[index], expected.variance, rtol=0, atol=1e-8)
    if name != "multitask":
        assert new.sample_paths(2)(x + 0.1).shape == (2, *prediction.mean.shape)
    again = new.condition_on_observations(x + 0.2, y[0], noise=None if noise is None else noise[0])
    assert again.solves.system.operator.batch_shape == new.solves.system.operator.batch_shape
    with torch.no_grad():
        for one in (new, again):
            answered, wanted = one.model(x + 0.1), one(x + 0.1)
            torch.testing.assert_close(answered.mean, wanted.mean, rtol=0, atol=1e-8)
            torch.testing.assert_close(answered.variance, wanted.variance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_targets_that_differ_beside_missing_ones(solver: Any) -> None:
    case = CASES["multitask"]()
    x, y, _ = new_data(case, 5, 3)
    case.model.train_targets[3, 1] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        posterior = posterior_of(case, solver)
        prediction = posterior.condition_on_observations(x, y)(x + 0.1)
        for index in range(3):
            expected = posterior.condition_on_observations(x, y[index])(x + 0.1)
            torch.testing.assert_close(prediction.mean[index], expected.mean, rtol=0, atol=1e-8)
            torch.testing.assert_close(
                prediction.covariance_matrix[index], expected.covariance_matrix, rtol=0, atol=1e-8
            )


@pytest.mark.parametrize("missing", [0, 4])
def test_variances_of_a_batch_with_a_far_field(missing: int) -> None:
    """Every member takes the nearest data, as a posterior of its own does."""
    x = torch.linspace(-2, 2, 1000, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(5 * x[:, 0])
    y[:missing] = torch.nan
    model = Regression(x, y, GaussianLikelihood(), kernels.MaternKernel(nu=1.5)).double()
    model.covar_module.lengthscale, model.likelihood.noise = 0.2, 1e-3
    products = KernelProducts(far_field=1e-8)
    options = {"solver": TIGHT, "products": products, "exact_below": 0, "rank": 10, "num_neighbours": 20}
    points = 3.9 * torch.rand(30, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1.95
    others = points + torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64).view(3, 1, 1)
    with gpytorch.settings.observation_nan_policy("mask"):
        posterior = PathwisePosterior(model, model.likelihood, **options)
        _ = posterior(points).variance
        new_y = torch.arange(6.0, dtype=torch.float64).view(3, 2)
        new = posterior.condition_on_observations(points[:2] + 0.003, new_y)
        one = posterior.condition_on_observations(points[:2] + 0.003, new_y[1])
        for at, own in ((points, points), (others, others[1])):
            prediction, expected = new(at), one(own)
            torch.testing.assert_close(prediction.variance[1], expected.variance, rtol=1e-6, atol=0)
            torch.testing.assert_close(prediction.covariance_matrix[1], expected.covariance_matrix, rtol=0, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_batches_of_inputs(solver: Any, batch: tuple[int, ...]) -> None:
    case = CASES["matern-3/2"]()
    x, y = held_out_points(8).reshape(2, 4, 3), new_data(case, 8)[1].reshape(2, 4)
    y = y.expand(*batch, 2, 4) + torch.arange(3.0).view(-1, 1, 1) if batch else y
    posterior = posterior_of(case, solver)
    _ = posterior(x[0]).variance
    new = posterior.condition_on_observations(x, y)
    prediction = new(held_out_points(3) + 0.1)
    for member in range(2):
        one = posterior.condition_on_observations(x[member], y[..., member, :])
        expected = one(held_out_points(3) + 0.1)
        torch.testing.assert_close(prediction.mean[..., member, :], expected.mean, rtol=0, atol=1e-8)
        torch.testing.assert_close(prediction.variance[..., member, :], expected.variance, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("name", ["matern-3/2", "fixed-noise"])
def test_fantasy_models_of_gpytorch(name: str, solver: Any, batch: tuple[int, ...]) -> None:
    case = CASES[name]()
    x, y, noise = new_data(case, 5, *batch)
    options = {} if noise is None else {"noise": noise.view(-1, 5)[0]}
    case.model.eval()
    case.likelihood.eval()
    with torch.no_grad():
        _ = case.model(x).mean
        stock = case.model.get_fantasy_model(x, y, **options)
        wanted = stock(x + 0.1)
        posterior_of(case, solver).install()
        fantasy = case.model.get_fantasy_model(x, y, **options)
        prediction = fantasy(x + 0.1)
    torch.testing.assert_close(prediction.mean, wanted.mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(prediction.variance, wanted.variance, rtol=0, atol=1e-6)
    assert case.model.train_inputs[0] is case.x or torch.equal(case.model.train_inputs[0], case.x)


def test_gradients_of_fantasy_models() -> None:
    """Those of GPyTorch, which detaches its caches by default."""
    case = CASES["matern-3/2"]()
    (x, y, _), points = new_data(case), held_out_points(3).requires_grad_()
    y.requires_grad_()

    def gradients() -> list[Tensor | None]:
        fantasy = case.model.get_fantasy_model(x, y)
        prediction = fantasy(points)
        value = prediction.mean.sum() + prediction.variance.sum()
        return list(torch.autograd.grad(value, [points, y, *fantasy.parameters()], allow_unused=True))

    case.model.eval()
    case.likelihood.eval()
    _ = case.model(points).mean
    wanted = gradients()
    posterior_of(case, Cholesky()).install()
    for found, expected in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert wanted[1] is None
    with gpytorch.settings.detach_test_caches(False), pytest.raises(RuntimeError, match="no gradients with respect to"):
        gradients()


def test_the_new_posterior_follows_its_own_model() -> None:
    case = CASES["matern-3/2"]()
    x, y, _ = new_data(case)
    new = posterior_of(case).condition_on_observations(x, y)
    with torch.no_grad():
        torch.testing.assert_close(new.model(x).mean, new(x).mean)
    new.model.covar_module.initialize(outputscale=2.5)
    assert_is_dense(new)
    assert case.model.covar_module.outputscale != 2.5


BAD: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], str]] = {
    "nan-input": (lambda x, y: (x * torch.tensor([1, torch.nan, 1]), y), "must be finite"),
    "nan-target": (lambda x, y: (x, y / torch.tensor([1.0, 0, 1]) * 0), r"targets\[1\] is nan"),
    "inf-target": (lambda x, y: (x, y / 0), "targets must be finite"),
    "columns": (lambda x, y: (x[:, :2], y), "do not fit the training inputs"),
    "rows": (lambda x, y: (x, y[:2]), "must have the shape"),
    "column-of-targets": (lambda x, y: (x, y.unsqueeze(-1)), "must have the shape"),
    "dtype": (lambda x, y: (x.float(), y), "dtype torch.float32"),
    "dtype-of-targets": (lambda x, y: (x, y.float()), "dtype torch.float32"),
    "number-of-inputs": (lambda x, y: ([x, x], y), "takes 1 input tensor"),
    "batches": (lambda x, y: (x.expand(2, 3, 3), y.expand(3, 3)), "must broadcast"),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_changes_nothing(name: str, solver: Any) -> None:
    change, message = BAD[name]
    case = CASES["matern-3/2"]()
    x, y, _ = new_data(case, 3)
    posterior = posterior_of(case, solver)
    posterior.install()
    before, strategy = posterior(held_out_points()).mean, case.model.prediction_strategy
    with pytest.raises(ValueError, match=message):
        posterior.condition_on_observations(*change(x, y))
    assert torch.equal(posterior(held_out_points()).mean, before)
    assert case.model.prediction_strategy is strategy
    assert torch.equal(case.model.train_inputs[0], case.x)


def test_bad_noise() -> None:
    x, y, noise = new_data(CASES["fixed-noise"](), 3)
    assert noise is not None
    fixed = posterior_of(CASES["fixed-noise"]())
    for wrong, message in (
        (None, r"pass noise= of shape \(3,\)"),
        (noise[:2], "must have the shape"),
        (-noise, "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            fixed.condition_on_observations(x, y, noise=wrong)
    with pytest.raises(ValueError, match="FixedNoiseGaussianLikelihood"):
        posterior_of(CASES["rbf"]()).condition_on_observations(x, y, noise=noise)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_gradients_to_observations_are_refused(part: int) -> None:
    case = CASES["fixed-noise"]()
    parts = new_data(case)
    parts[part].requires_grad_()
    with pytest.raises(RuntimeError, match="detach"):
        posterior_of(case).condition_on_observations(*parts[:2], noise=parts[2])
    with torch.no_grad():
        assert_is_dense(posterior_of(case).condition_on_observations(*parts[:2], noise=parts[2]))


def test_inputs_may_come_from_a_generator() -> None:
    case = CASES["rbf"]()
    x, y, _ = new_data(case)
    assert_is_dense(posterior_of(case).condition_on_observations((part for part in (x,)), y))


@pytest.mark.parametrize(
    "change", [lambda x, y: (x.numpy(), y), lambda x, y: (x, y.tolist()), lambda x, y: ([x.tolist()], y)]
)
def test_what_is_no_tensor(change: Callable[[Tensor, Tensor], tuple[Any, Any]]) -> None:
    case = CASES["rbf"]()
    x, y, _ = new_data(case)
    with pytest.raises(TypeError, match=r"torch\.as_tensor"):
        posterior_of(case).condition_on_observations(*change(x, y))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("targets", [(), (3,)])
def test_noises_that_differ_at_the_same_inputs(targets: tuple[int, ...], asked: bool, solver: Any) -> None:
    case = CASES["fixed-noise"]()
    x, y, _ = new_data(case, 5, *targets)
    noise = 0.1 + torch.rand(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    posterior = posterior_of(case, solver, rank=20, num_neighbours=60)
    if asked:
        posterior.solves.projection()
    prediction = posterior.condition_on_observations(x, y, noise=noise)(x + 0.1)
    for index in range(3):
        one = posterior.condition_on_observations(x, y[index] if targets else y, noise=noise[index])
        mean, covariance = dense(whole(one), x + 0.1)
        torch.testing.assert_close(prediction.mean[index], mean, rtol=0, atol=1e-8)
        torch.testing.assert_close(prediction.variance[index], covariance.diagonal(), rtol=0, atol=1e-8)


def test_noises_must_fit_the_targets() -> None:
    case = CASES["fixed-noise"]()
    x, y, noise = new_data(case, 5, 3)
    assert noise is not None
    for wrong, message in ((noise[:2], "must broadcast"), (noise.float(), "float32"), (noise.to("meta"), "meta")):
        with pytest.raises(ValueError, match=message):
            posterior_of(case).condition_on_observations(x, y, noise=wrong)


class ScaledByRange(Regression):
    """Inputs scaled by their range: the prior of old data changes with new ones."""

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return super().forward((x - x.amin(-2, keepdim=True)) / (x.amax(-2, keepdim=True) - x.amin(-2, keepdim=True)))


@pytest.mark.parametrize("far", [1.0, 5.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_priors_that_look_at_all_data_together(solver: Any, far: float) -> None:
    x, y = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = ScaledByRange(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    posterior = PathwisePosterior(model, likelihood.double(), solver=solver, num_frequencies=100)
    posterior.solves.projection()
    posterior.sample_paths(2)
    new = posterior.condition_on_observations(far * held_out_points(4), torch.ones(4, dtype=torch.float64))
    scratch = PathwisePosterior(*copy.deepcopy((new.model, new.likelihood)), solver=solver)
    test = held_out_points(3) + 0.1
    torch.testing.assert_close(new(test).mean, scratch(test).mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(new(test).variance, scratch(test).variance, rtol=0, atol=1e-7)


def botorch_model(outputs: int, has_fixed_noise: bool) -> gpytorch.models.ExactGP:
    x, y = data()
    y = torch.stack([y, y.flip(0)], dim=-1)[:, :outputs]
    options = {"train_Yvar": torch.full_like(y, 0.3)} if has_fixed_noise else {}
    transform, standardize = transforms.Normalize(3), transforms.Standardize(outputs)
    return models.SingleTaskGP(
        x * 10 + 3, y * 7 + 2, input_transform=transform, outcome_transform=standardize, **options
    ).eval()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("has_fixed_noise", [False, True])
@pytest.mark.parametrize("kind", ["condition", "fantasize"])
def test_botorch(kind: str, outputs: int, has_fixed_noise: bool, solver: Any) -> None:
    model = botorch_model(outputs, has_fixed_noise)
    x, test = held_out_points(4) * 10 + 3, held_out_points(6) * 8 + 2
    y = torch.cos(torch.arange(4.0 * outputs, dtype=torch.float64)).view(4, outputs)

    def updated() -> Any:
        if kind == "condition":
            noise = {"noise": torch.full_like(y, 0.2)} if has_fixed_noise else {}
            return model.condition_on_observations(x, y, **noise)
        return model.fantasize(x, sampling.SobolQMCNormalSampler(torch.Size([3]), seed=0))

    with torch.no_grad():
        model.posterior(x)
        stock = updated().posterior(test)
        PathwisePosterior(model, model.likelihood, solver=solver, exact_below=0).install()
        ours = updated().posterior(test)
        assert ours.mean.shape == stock.mean.shape
        torch.testing.assert_close(ours.mean, stock.mean, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.variance, stock.variance, rtol=1e-4, atol=1e-5)


def test_knowledge_gradients_say_why_not() -> None:
    model = botorch_model(1, False)
    PathwisePosterior(model, model.likelihood).install()
    function = acquisition.qKnowledgeGradient(model, num_fantasies=2)
    x = held_out_points(6).reshape(2, 3, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="detach"):
        function(x)


def test_transformed_inputs_go_through_the_model() -> None:
    model = botorch_model(1, False)
    posterior = PathwisePosterior(model, model.likelihood)
    with pytest.raises(ValueError, match=r"model\.condition_on_observations"):
        posterior.condition_on_observations(held_out_points(2), torch.zeros(2, dtype=torch.float64))


def test_fantasies_may_depend_on_the_noise() -> None:
    """As they do outside `torch.no_grad()`; the fantasies are cut off from it."""
    model, x = botorch_model(1, False), held_out_points(4) * 10 + 3
    PathwisePosterior(model, model.likelihood).install()
    fantasies = model.fantasize(x, sampling.SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasies.posterior(x).mean.shape == (3, 4, 1)

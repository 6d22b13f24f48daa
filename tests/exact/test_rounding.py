"""Float32 models that are computed in float64, because float32 would round too much."""

import copy
import weakref
from contextlib import nullcontext
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.from_gpytorch import kernel_operator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import MATERN
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.tiles import cache
from gpy_iterative.training import training_system
from gpy_iterative.training.training_system import TrainingSystem
from tests.exact.gaussian_models import MultitaskRegression, Regression

N = 300
COARSE = gpi.solvers.ConjugateGradients(tolerance=1e-3, probe_tolerance=1e-3)
FINE = gpi.solvers.ConjugateGradients(tolerance=1e-8, probe_tolerance=1e-8)
MLLS = [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]


class OwnKernel(gpytorch.kernels.MaternKernel):
    """Not recognised, so GPyTorch evaluates it."""

    def forward(self, x1: Tensor, x2: Tensor, **options: Any) -> Tensor:
        return super().forward(x1, x2, **options)


KERNELS = {
    "radial": gpytorch.kernels.RBFKernel,
    "periodic": lambda: gpytorch.kernels.RBFKernel() * gpytorch.kernels.PeriodicKernel(),
    "product": lambda: gpytorch.kernels.RBFKernel() * gpytorch.kernels.MaternKernel(),
    "sum": lambda: gpytorch.kernels.RBFKernel() + gpytorch.kernels.RBFKernel(active_dims=(0,)),
    "separable": lambda: gpytorch.kernels.RBFKernel(active_dims=(0,)) * gpytorch.kernels.MaternKernel(active_dims=(1,)),
    "generic": lambda: gpytorch.kernels.RBFKernel() * OwnKernel(),
}


def smooth_function(dtype: torch.dtype, noise: float, kernel: str = "radial") -> Regression:
    """Hyperparameters as a fit of a sine finds them; the data are numbers of float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator).mul(3)
    y = x.sin().sum(-1) + 0.01 * torch.randn(N, generator=generator)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-7))
    model = Regression(x, y, likelihood, gpytorch.kernels.ScaleKernel(KERNELS[kernel]()))
    model.covar_module.outputscale = 20.0
    likelihood.noise = noise
    model.to(dtype).set_train_data(x.to(dtype), y.to(dtype), strict=False)
    return model


def step(
    mll_class: type, model: Regression, solver: gpi.solvers.Solver = COARSE, **options: Any
) -> tuple[Any, Tensor, list[Tensor]]:
    mll = mll_class(model.likelihood, model, solver=solver, generator=0, **options)
    value = mll(model(*model.train_inputs), model.train_targets)
    value.backward()
    return mll, value.detach(), [parameter.grad for parameter in model.parameters()]


def dtype_of(mll: Any) -> torch.dtype:
    return mll.training_state()["system.like"].dtype


@pytest.mark.parametrize("mll_class", MLLS)
def test_little_noise_makes_it_float64(mll_class: type) -> None:
    for noise, dtype in ((0.1, torch.float32), (1e-4, torch.float64)):
        mll, value, gradients = step(mll_class, smooth_function(torch.float32, noise))
        assert dtype_of(mll) == dtype
        assert {each.dtype for each in (value, mll.report.value, mll.report.value_sem, *gradients)} == {torch.float32}


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("lengthscale", [0.3, 30.0, 3e4])
def test_rounding_bounds_the_change_of_the_value(nu: float, lengthscale: float) -> None:
    """Entries that are all near one have smaller errors, so such systems stay in float32 at less noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 6, generator=generator) / lengthscale
    kernel = RadialKernelLinearOperator(x, torch.tensor(1.0), function=MATERN[nu])
    operator, zeros = NoisyLinearOperator(kernel, torch.full((N,), 5e-5)), torch.zeros(N)
    system = TrainingSystem(MultivariateNormal(zeros, kernel), operator, zeros, None)
    exact, tiles = system.suited(0.0).operator.to_dense(), kernel.tiles()
    rounded = tiles.values(tiles.visits()[0]).double() + tiles.centre + 5e-5 * torch.eye(N, dtype=torch.float64)
    targets = torch.linalg.cholesky(exact) @ torch.randn(N, dtype=torch.float64, generator=generator)

    def deviance(matrix: Tensor) -> Tensor:
        return targets @ torch.linalg.solve(matrix, targets) + torch.linalg.slogdet(matrix)[1]

    assert (deviance(rounded) - deviance(exact)).abs() < system.rounding()
    suited = system.suited(training_system.ROUNDING_IN_TRAINING).operator
    assert suited.dtype == (torch.float32 if lengthscale > 1 else torch.float64)
    assert tiles.rounding == (0.5 if lengthscale > 1 else 1.0)  # vectors round, however near one entries are


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_value_and_gradient_are_those_of_the_model_in_float64(kernel: str) -> None:
    results = [
        step(gpi.mlls.HutchinsonMarginalLogLikelihood, smooth_function(dtype, 1e-4, kernel), FINE, probes="rademacher")
        for dtype in (torch.float32, torch.float64)
    ]
    (_, value, gradients), (_, exact, exact_gradients) = results
    torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-4)
    for found, true in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=2e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
@pytest.mark.parametrize(
    "mll_class", [gpi.mlls.RussianRouletteMarginalLogLikelihood, gpi.mlls.TruncatedCGMarginalLogLikelihood]
)
def test_truncated_series_are_computed_in_float64(mll_class: type) -> None:
    """In float32 conjugate directions were lost: the roulette was biased, gradients of a hundred steps had wrong signs.

    Gradients of one draw are not compared: a hundred steps magnify the rounding of scaled inputs.
    """
    found = []
    for dtype in (torch.float32, torch.float64):
        model = smooth_function(dtype, 0.1)
        model.covar_module.base_kernel = gpytorch.kernels.MaternKernel(nu=1.5).to(dtype)
        mll = mll_class(model.likelihood, model, generator=0)
        mll(model(*model.train_inputs), model.train_targets)
        assert dtype_of(mll) == dtype
        model.likelihood.noise = 1e-3
        value = mll(model(*model.train_inputs), model.train_targets)
        value.backward()
        assert value.dtype == dtype
        assert dtype_of(mll) == torch.float64
        assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}
        found.append(value.detach().double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mll_class", MLLS)
def test_a_run_keeps_its_probes_when_it_becomes_float64_and_stays(mll_class: type) -> None:
    model = smooth_function(torch.float32, 0.1)
    mll, *_ = step(mll_class, model)
    before = mll.training_state()
    assert dtype_of(mll) == torch.float32
    for noise in (1e-4, 0.1):
        model.likelihood.noise = noise
        mll(model(*model.train_inputs), model.train_targets)
        assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
        after = mll.training_state()
        assert dtype_of(mll) == torch.float64
        for name, tensor in before.items():
            if name.startswith("probes."):
                torch.testing.assert_close(after[name], tensor.to(after[name].dtype), rtol=0, atol=0)
    mll.load_training_state(before)
    mll(model(*model.train_inputs), model.train_targets)
    assert dtype_of(mll) == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["radial", "product", "generic"])
def test_tiles_in_float64_take_the_place_of_earlier_ones(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation kept tiles beside those of earlier graphs and of float32."""
    tiles: list[weakref.ref[Tensor]] = []

    def new_memory(shape: torch.Size, like: Tensor) -> Tensor:
        tile = torch.empty(shape, dtype=like.dtype)
        tiles.append(weakref.ref(tile))
        return tile

    monkeypatch.setattr(cache, "new_memory", new_memory)
    model = smooth_function(torch.float32, 0.1, kernel)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=COARSE, generator=0)
    values = []
    for noise, size in ((0.1, 4), (1e-4, 8), (2e-4, 8)):
        model.likelihood.noise = noise
        values.append(mll(model(*model.train_inputs), model.train_targets))
        held = sum(tile.nbytes for tile in (reference() for reference in tiles) if tile is not None)
        assert held == size * N**2 * (1 if kernel == "generic" else 2)  # with derivatives
    for value in values:
        value.backward()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"solver": FINE, "exact_below": 0, "rank": 100}], ids=["exact", "projected"])
def test_predictions_are_those_of_the_model_in_float64(kernel: str, options: dict[str, Any]) -> None:
    points = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).mul(3)
    found, true = (
        gpi.prediction.PathwisePosterior(model, model.likelihood, **options)
        for model in (smooth_function(dtype, 1e-4, kernel) for dtype in (torch.float32, torch.float64))
    )
    prediction, exact = found(points), true(points.double())
    assert {prediction.mean.dtype, prediction.variance.dtype, prediction.covariance_matrix.dtype} == {torch.float32}
    deviation = exact.variance.sqrt()
    assert ((prediction.mean - exact.mean) / deviation).abs().max() < 0.01
    torch.testing.assert_close(prediction.variance.double(), exact.variance, rtol=0.001, atol=0)
    found.install()
    by_gpytorch = found.model(points)
    assert by_gpytorch.mean.dtype == by_gpytorch.variance.dtype == torch.float32
    point = points[:1].clone().requires_grad_()
    found(point).mean.sum().backward()
    assert point.grad is not None
    assert point.grad.dtype == torch.float32


def test_sample_paths_stay_the_same_functions_when_they_become_float64() -> None:
    model = smooth_function(torch.float32, 0.1)
    posterior = gpi.prediction.PathwisePosterior(model, model.likelihood, solver=COARSE, exact_below=0)
    posterior.sample_paths(2)
    draws = posterior.solves.draws
    assert draws is not None
    model.likelihood.noise = 1e-4
    paths = posterior.sample_paths(3)
    assert posterior.solves.system.operator.dtype == torch.float64
    now = posterior.solves.draws
    assert now is not None
    torch.testing.assert_close(now.draws["weights"][..., :2], draws.draws["weights"].double(), rtol=0, atol=0)
    assert model.train_inputs is not None
    values = paths(*model.train_inputs)
    assert values.dtype == torch.float32
    # Paths meet the data within the noise, .01.
    assert (values - model.train_targets).square().mean().sqrt() < 0.015


@pytest.mark.parametrize("count", [20, 100])
def test_new_observations_keep_the_precision(count: int) -> None:
    """Those after 200 move the centre of the inputs, and so their rounding."""
    model, true = (smooth_function(dtype, 1e-4) for dtype in (torch.float32, torch.float64))
    assert model.train_inputs is not None
    assert model.train_targets is not None
    x, y = model.train_inputs[0], model.train_targets
    points = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).mul(3)
    exact = gpi.prediction.PathwisePosterior(true, true.likelihood)(points.double())
    fewer = copy.deepcopy(model)
    fewer.set_train_data(x[:-count], y[:-count], strict=False)
    posterior = gpi.prediction.PathwisePosterior(fewer, fewer.likelihood)
    posterior(points).variance  # noqa: B018, it makes the factor that is extended
    found = posterior.condition_on_observations(x[-count:], y[-count:])(points)
    assert ((found.mean - exact.mean) / exact.variance.sqrt()).abs().max() < 0.01
    torch.testing.assert_close(found.variance.double(), exact.variance, rtol=0.001, atol=0)


def test_new_observations_of_two_outputs_keep_the_precision() -> None:
    """The centre is that of points, not of targets."""
    points, found = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).mul(3), []
    corner = torch.rand(60, 2, generator=torch.Generator().manual_seed(2)).mul(0.7).add(2.2)
    outputs = lambda x: torch.stack([x.sin().sum(-1), (2 * x).cos().sum(-1)], dim=-1)
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(150, 2, generator=torch.Generator().manual_seed(0)).mul(3)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
            num_tasks=2, has_task_noise=False, noise_constraint=gpytorch.constraints.GreaterThan(1e-8)
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = MultitaskRegression(x, outputs(x), likelihood)
        likelihood.noise = 1e-5
        model.to(dtype).set_train_data(x.to(dtype), outputs(x).to(dtype), strict=False)
        posterior = gpi.prediction.PathwisePosterior(model, likelihood)
        with gpytorch.settings.min_variance(float_value=0.0):
            assert posterior(points.to(dtype)).variance.shape == (20, 2)  # makes the factor that is extended
            prediction = posterior.condition_on_observations(corner.to(dtype), outputs(corner).to(dtype))(
                points.to(dtype)
            )
            found.append((prediction.mean.double(), prediction.variance.double()))
    (mean, variance), (exact_mean, exact_variance) = found
    assert ((mean - exact_mean) / exact_variance.sqrt()).abs().max() < 0.01
    torch.testing.assert_close(variance, exact_variance, rtol=0.01, atol=0)


def _tasks_at_the_same_inputs(dtype: torch.dtype, noise: float, repeated: int) -> Regression:
    """Three tasks at 200 points, ordered by the first input; so many data are there twice."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(200, 2, generator=generator, dtype=torch.float64).float()  # differences of these are rounded
    points = points[points[:, 0].argsort()]
    x = torch.cat([points.repeat_interleave(3, dim=0), torch.arange(600).remainder(3).unsqueeze(-1)], dim=-1)
    x = torch.cat([x, x[:repeated]]).to(dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-7))
    with torch.random.fork_rng():  # GPyTorch draws the tasks' covariance
        torch.manual_seed(0)
        tasks = gpytorch.kernels.IndexKernel(num_tasks=3, rank=2, active_dims=(2,))
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(active_dims=(0, 1)) * tasks)
    y = (5 * x[:, 0] + x[:, 2]).sin() + x[:, 1] + 0.1 * torch.randn(len(x), generator=generator).to(dtype)
    model = Regression(x, y, likelihood, kernel)
    kernel.base_kernel.kernels[0].lengthscale, likelihood.noise = 0.3, noise
    return model.to(dtype)


@pytest.mark.parametrize("is_new", [False, True])
def test_tasks_at_the_same_inputs_keep_the_precision(is_new: bool) -> None:
    """The centre is that of the distinct points, also if few rows are predicted, or new data come."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model = _tasks_at_the_same_inputs(dtype, 1e-2, repeated=int(is_new))  # repeated data have no exact structure
        posterior = gpi.prediction.PathwisePosterior(model, model.likelihood)
        new = torch.rand(60, 3, generator=torch.Generator().manual_seed(1)).mul(torch.tensor([1.0, 1.0, 3.0]))
        new[:, 2].floor_()
        new = new.to(dtype)
        posterior(new).variance  # noqa: B018, it makes the factor that is extended
        if is_new:
            posterior = posterior.condition_on_observations(new[:30], new[:30].sin().sum(-1))
        prediction = posterior(new[30:])
        found.append((prediction.mean.double(), prediction.variance.double()))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("exact_below", [0, N])
@pytest.mark.parametrize("kernel", ["radial", "sum", "separable"])
def test_missing_targets_keep_the_precision(kernel: str, exact_below: int) -> None:
    """Observed data had another centre than all data, and another rounding: means were standard deviations off."""
    points, found = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).mul(3), []
    for dtype in (torch.float32, torch.float64):
        model = smooth_function(dtype, 1e-6, kernel)
        assert model.train_targets is not None
        model.train_targets[::3] = torch.nan
        with gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.min_variance(float_value=0.0):
            posterior = gpi.prediction.PathwisePosterior(model, model.likelihood, exact_below=exact_below)
            prediction = posterior(points.to(dtype))
            found.append((prediction.mean.double(), prediction.variance.double()))
    (mean, variance), (exact_mean, exact_variance) = found
    assert ((mean - exact_mean) / exact_variance.sqrt()).abs().max() < 0.01
    torch.testing.assert_close(variance, exact_variance, rtol=0.001, atol=0)


@pytest.mark.parametrize("kernel", ["rbf", "sum", "linear"])
def test_covariances_of_points_are_those_of_the_model_in_float64(kernel: str) -> None:
    """K(x, x) of another rounding than K(x, X) made them indefinite, with samples of twice the variance."""
    kernels = gpytorch.kernels
    made = {
        "rbf": kernels.RBFKernel,
        "sum": lambda: kernels.RBFKernel() + kernels.LinearKernel(),
        "linear": kernels.LinearKernel,
    }[kernel]
    points, found = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).mul(3), []
    for dtype in (torch.float32, torch.float64):
        model = smooth_function(torch.float32, 1e-4)
        model.covar_module.base_kernel = made()
        assert model.train_inputs is not None
        assert model.train_targets is not None
        x, y = model.train_inputs[0].to(dtype), model.train_targets.to(dtype)
        model.to(dtype).set_train_data(x, y, strict=False)
        posterior = gpi.prediction.PathwisePosterior(model, model.likelihood)
        whole = posterior(points.to(dtype)).covariance_matrix.double()
        pairs = posterior(points.to(dtype).view(10, 2, 2)).covariance_matrix.double()
        found.append((whole, pairs))
    for covariance, exact in zip(*found, strict=True):
        deviation = exact.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
        assert ((covariance - exact) / (deviation @ deviation.mT)).abs().max() < 1e-3


def test_exact_observations_make_a_posterior_float64() -> None:
    model = smooth_function(torch.float32, 0.1)
    assert model.train_inputs is not None
    assert model.train_targets is not None
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(1)).mul(3)
    points = torch.rand(20, 2, generator=torch.Generator().manual_seed(2)).mul(3)
    solver, found = gpi.solvers.ConjugateGradients(tolerance=2e-5), []
    for dtype in (torch.float32, torch.float64):
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((N,), 0.3, dtype=dtype))
        data = (model.train_inputs[0].to(dtype), model.train_targets.to(dtype))
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        kernel.outputscale = 20.0
        regression = Regression(*data, likelihood, kernel).to(dtype)
        posterior = gpi.prediction.PathwisePosterior(regression, likelihood, solver=solver, exact_below=0, rank=150)
        posterior(points.to(dtype)).variance  # noqa: B018, it makes the projection that could be extended
        posterior.sample_paths(2)
        noise = torch.full((30,), 1e-4, dtype=dtype)
        more = posterior.condition_on_observations(x.to(dtype), x.sin().sum(-1).to(dtype), noise=noise)
        assert more.solves.system.operator.dtype == torch.float64
        assert more.report.status is gpi.solvers.SolveStatus.CONVERGED
        paths = more.sample_paths(2)
        assert ((paths(x.to(dtype)) - x.sin().sum(-1)).abs() < 0.05).all()
        found.append(more(points.to(dtype)))
    prediction, exact = found
    assert ((prediction.mean - exact.mean) / exact.stddev).abs().max() < 0.01
    assert ((prediction.variance / exact.variance).log().abs() < 0.2).all()


@pytest.mark.parametrize(("noise", "is_told"), [(0.3, False), (1e-3, True)])
@pytest.mark.parametrize("is_grid", [False, True])
def test_rounding_of_a_matrix_that_gpytorch_evaluated_is_told(is_grid: bool, noise: float, is_told: bool) -> None:
    """It cannot be undone: statuses were CONVERGED with predictions standard deviations off."""

    class Product(Regression):
        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            prior = super().forward(x)
            trend = gpytorch.kernels.LinearKernel()(x + 3.0)
            return gpytorch.distributions.MultivariateNormal(prior.mean, prior.lazy_covariance_matrix.mul(trend))

    model = smooth_function(torch.float32, noise)
    if is_grid:
        options = {"grid_size": 20, "num_dims": 2, "grid_bounds": [(-0.5, 3.5)] * 2}
        kernel = gpytorch.kernels.GridInterpolationKernel(gpytorch.kernels.RBFKernel(), **options)
        model.covar_module.base_kernel = kernel
    else:
        model.__class__ = Product
    told = pytest.warns(gpi.errors.ApproximationWarning, match=r"model\.double") if is_told else nullcontext()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=gpi.solvers.Cholesky(), generator=0)
    with told:
        mll(model(*model.train_inputs), model.train_targets)
    with told:
        gpi.prediction.PathwisePosterior(model, model.likelihood).report  # noqa: B018


@pytest.mark.parametrize(
    ("kernel", "noise"),
    [
        (gpytorch.kernels.RBFKernel(), 0.015),
        (gpytorch.kernels.LinearKernel(), 0.015),
        (gpytorch.kernels.PolynomialKernel(2), 0.03),
    ],
)
def test_sums_over_all_data_that_cancel_are_computed_in_float64(kernel: gpytorch.kernels.Kernel, noise: float) -> None:
    """Those of a far field and of a low rank: with 50,000 rows means were 2 and 6 standard deviations off in float32."""
    size = 8000
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 2, generator=generator)
    y = x.mul(6).sin().sum(-1) + 0.1 * torch.randn(size, generator=generator)  # not as the kernel expects
    points = torch.rand(20, 2, generator=generator)

    def posterior(dtype: torch.dtype) -> gpi.prediction.PathwisePosterior:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(x, y, likelihood, copy.deepcopy(kernel))
        if kernel.has_lengthscale:
            model.covar_module.lengthscale = 2.0
        likelihood.noise = noise
        model.to(dtype).set_train_data(x.to(dtype), y.to(dtype), strict=False)
        return gpi.prediction.PathwisePosterior(model, likelihood, rank=64)

    found, true = posterior(torch.float32)(points), posterior(torch.float64)(points.double())
    assert ((found.mean - true.mean) / true.stddev).abs().max() < 0.01
    torch.testing.assert_close(found.lazy_covariance_matrix.diagonal().double(), true.variance, rtol=0.001, atol=0)


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.ApproximationWarning")
def test_too_many_rows_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = to_linear_operator(20 * torch.ones(N, N))
    system = TrainingSystem(None, NoisyLinearOperator(kernel, torch.full((N,), 1e-4)), torch.zeros(N), None)  # type: ignore[arg-type]
    assert system.suited(0.5).operator.dtype == torch.float64
    assert system.suited(100.0).operator is system.operator
    assert system.suited(100.0, in_float64=True).operator.dtype == torch.float64
    monkeypatch.setattr(training_system, "MOST_ROWS_IN_FLOAT64", N - 1)
    assert system.suited(0.5).operator is system.operator
    assert system.suited(0.5, in_float64=True).operator.dtype == torch.float64


@pytest.mark.slow
def test_tiles_replace_an_automatic_far_field_whose_errors_exceed_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trend of large outputscale beside a short lengthscale: INDEFINITE, means 24 standard deviations off."""
    x = torch.rand(4100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 100.0, 0.05

    def system(noise: float, far_field: Any = "auto") -> TrainingSystem:
        operator = kernel_operator(kernel(x), KernelProducts(far_field=far_field)).detach()
        noisy = NoisyLinearOperator(operator, torch.full((len(x),), noise, dtype=torch.float64))
        return TrainingSystem(None, noisy, torch.zeros(len(x)), None).suited(0.5)  # type: ignore[arg-type]

    assert far_field_error(system(1.0).operator) is not None
    assert far_field_error(system(1e-4).operator) is None
    assert far_field_error(system(1e-4, 1e-7).operator) is not None
    monkeypatch.setattr(training_system, "MOST_ROWS_IN_TILES", 4099)
    assert far_field_error(system(1e-4).operator) is not None


@pytest.mark.slow
def test_a_fit_of_a_smooth_function_converges() -> None:
    """In float32 it wandered from the optimum, and predicted means were 28 standard deviations off."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3100, 2, generator=generator)
    y = (6 * x[:, 0]).sin() + (4 * x[:, 1]).cos() + 0.01 * torch.randn(3100, generator=generator)
    model = Regression(
        x,
        y,
        gpytorch.likelihoods.GaussianLikelihood(),
        gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)),
    )
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    found = gpi.fit(mll, progress=False)
    assert found.status is gpi.fitting.FitStatus.CONVERGED
    assert abs(model.likelihood.noise.item() / 1e-4 - 1) < 0.1


def test_steps_of_a_fit_see_gains_that_float32_would_round() -> None:
    """Fits of float32 models ended as STAGNATED or NOISE nats before the optimum, where float64 ones went on."""
    x = torch.rand(N, 2, generator=torch.Generator().manual_seed(0))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, torch.sin(6 * x[:, 0]), likelihood, gpytorch.kernels.RBFKernel())
    exact, values = copy.deepcopy(model).double(), []
    exact.set_train_data(x.double(), model.train_targets.double(), strict=False)
    for step in range(5):
        likelihood.noise = 0.5 + 3e-7 * step
        exact.likelihood.noise = likelihood.noise.detach().double()
        for own in (model, exact):
            mll = gpi.mlls.HutchinsonMarginalLogLikelihood(own.likelihood, own)
            evaluation = mll.evaluate(own(*own.train_inputs), own.train_targets)
            values.append(evaluation.value.detach().double() * N)
            assert mll(own(*own.train_inputs), own.train_targets).dtype == own.train_targets.dtype
    found, expected = torch.stack(values).view(-1, 2).diff(dim=0).unbind(1)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0)

"""The posterior against GPyTorch's own dense predictions, for every kind of model."""

import copy
import warnings

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, DataWarning, UnsupportedLikelihoodError
from gpy_iterative.exact.prediction import training_solves
from gpy_iterative.exact.prediction.projection import ProjectionRecipe
from gpy_iterative.exact.prediction.training_solves import prediction_solver
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.linear_solvers.default import default_solver
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from gpy_iterative.prediction import LaplacePosterior, PathwisePosterior
from gpy_iterative.solvers import AlternatingProjections, Cholesky, ConjugateGradients, SolveStatus
from gpy_iterative.training.training_system import training_system
from tests.exact.gaussian_models import CASES, Case, Regression, data, regression

TIGHT = ConjugateGradients(tolerance=1e-10)


def held_out_points(t: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    index = torch.arange(1, t + 1, dtype=torch.float64)[:, None]
    return ((index * torch.tensor([3.0, 6.0, 13.0], dtype=torch.float64).sqrt()) % 1.0 * 4 - 2).to(dtype)


def dense(case: Case, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance from GPyTorch's Cholesky route."""
    model = copy.deepcopy(case.model).eval()
    with warnings.catch_warnings(), torch.no_grad(), gpytorch.settings.max_cholesky_size(10_000):
        # GPyTorch cuts jittered blocks out of sparse matrices, which torch has deprecated.
        warnings.simplefilter("ignore")
        prediction = model(*inputs)
        return prediction.mean, prediction.covariance_matrix


def noise(case: Case, *inputs: Tensor) -> Tensor:
    """What GPyTorch's likelihood adds to the latent covariance."""
    model, likelihood = copy.deepcopy((case.model, case.likelihood))
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        latent = model(*inputs)
        return likelihood(latent).covariance_matrix - latent.covariance_matrix


@pytest.mark.parametrize("name", sorted(CASES))
def test_cholesky_is_exact(name: str) -> None:
    case, x = CASES[name](), held_out_points()
    mean, covariance = dense(case, x)
    prediction = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())(x)
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(prediction.covariance_matrix, covariance, rtol=0, atol=1e-8)
    torch.testing.assert_close(prediction.variance, covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape))


@pytest.mark.parametrize("name", sorted(CASES))
def test_iterative_solver_with_a_complete_subspace(name: str) -> None:
    """With as many projections as data nothing is left to sample."""
    case, x = CASES[name](), held_out_points()
    mean, covariance = dense(case, x)
    posterior = PathwisePosterior(case.model, case.likelihood, solver=TIGHT, exact_below=0, rank=100)
    prediction = posterior(x)
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(prediction.covariance_matrix, covariance, rtol=0, atol=1e-8)
    torch.testing.assert_close(prediction.variance, covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape))


@pytest.mark.parametrize("name", ["matern-3/2", "product", "fixed-noise", "batch", "multitask", "additive"])
def test_model_call_equals_the_posterior(name: str) -> None:
    case, x = CASES[name](), held_out_points()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=TIGHT, exact_below=0, rank=8, num_neighbours=10)
    posterior.install()
    ours = posterior(x)
    with torch.no_grad():
        theirs = case.model(x)
    assert type(theirs) is type(ours)
    torch.testing.assert_close(theirs.mean, ours.mean)
    torch.testing.assert_close(theirs.variance, ours.variance)
    torch.testing.assert_close(theirs.covariance_matrix, ours.covariance_matrix)


@pytest.mark.parametrize("name", ["matern-3/2", "batch", "multitask"])
def test_likelihood_adds_the_noise(name: str) -> None:
    case, x = CASES[name](), held_out_points()
    mean, covariance = dense(case, x)
    posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())
    posterior.install()
    predictive = case.likelihood(posterior(x))
    torch.testing.assert_close(predictive.covariance_matrix, covariance + noise(case, x), rtol=0, atol=1e-8)
    torch.testing.assert_close(predictive.mean, mean)


def test_default_solver_and_float32() -> None:
    case, x = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), dtype=torch.float32), held_out_points()
    mean, covariance = dense(case, x.float())
    prediction = PathwisePosterior(case.model, case.likelihood)(x.float())
    assert prediction.mean.dtype == torch.float32
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(prediction.variance, covariance.diagonal(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "variance", "tolerance"),
    [
        (3100, 2.0, 0.01),
        (3100, 0.2, 0.01 * 0.2**0.5),
        (3100, 1e-3, 0.01 * 1e-3**0.5),
        (3100, 1e-10, 1e-6),
        (4100, 0.2, 0.3 * (0.2 / 4100) ** 0.5),  # with a far field
    ],
)
def test_means_are_exact_to_a_part_of_the_noise(n: int, variance: float, tolerance: float) -> None:
    x = torch.linspace(0, 1, n, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(20 * x.squeeze(-1)).sign()  # of mean square 1
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-12))
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    model.mean_module.constant.data.zero_()
    likelihood.noise = variance
    operator, columns = training_system(model, likelihood, (), KernelProducts()).operator, y.unsqueeze(-1)
    solver = prediction_solver(default_solver(operator), operator, columns)
    assert isinstance(solver, AlternatingProjections if n == 3100 else ConjugateGradients)
    assert solver.tolerance == pytest.approx(tolerance, rel=1e-3)


@pytest.mark.slow
def test_rounding_ends_the_default_solve_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hundreds of thousands of rows in float32; a tolerance of the user's own warns."""
    index = torch.arange(4100, dtype=torch.float64)
    x = torch.stack([index * 2**0.5 % 1, index * 3**0.5 % 1], dim=-1)
    y = torch.sin(20 * x[:, 0]) + 0.5 * torch.cos(37.0 * index)
    model = Regression(x.float(), y.float(), GaussianLikelihood(), kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)))
    model.likelihood.noise = 0.1
    monkeypatch.setattr(training_solves, "NOISE_NORM", 0.0)
    monkeypatch.setattr(training_solves, "SMALLEST_TOLERANCE", {torch.float32: 1e-9})
    assert PathwisePosterior(model, model.likelihood, exact_below=0).report.status is SolveStatus.STAGNATED
    solver = ConjugateGradients(tolerance=1e-9, preconditioner=None)
    with pytest.warns(ConvergenceWarning, match="predictions ended with status stagnated"):
        PathwisePosterior(model, model.likelihood, solver=solver, exact_below=0)


def test_a_far_field_that_the_noise_hides_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample paths of 6,500 data with a noise of 1e-4 were right, and warned of."""
    index = torch.arange(3100, dtype=torch.float64)
    x = torch.stack([index * 2**0.5 % 1, index * 3**0.5 % 1], dim=-1)
    y = torch.sin(20 * x[:, 0]) + 0.5 * torch.cos(37.0 * index)
    model = Regression(x, y, GaussianLikelihood(), kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    model.likelihood.noise = 0.1
    monkeypatch.setattr(training_solves, "NOISE_NORM", 1e-4)
    posterior = PathwisePosterior(model, model.likelihood, products=KernelProducts(far_field=1e-6), exact_below=0)
    assert posterior.report.status is SolveStatus.STAGNATED
    with pytest.warns(ConvergenceWarning, match="The cause is the far field"):
        PathwisePosterior(model, model.likelihood, products=KernelProducts(far_field=1e-2), exact_below=0)


@pytest.mark.slow
def test_means_are_exact_where_the_noise_is_small() -> None:
    """Noise over six orders of magnitude: its mean says nothing of the data that determine the posterior."""
    n = 3100
    x = torch.linspace(0, 4, n, dtype=torch.float64).unsqueeze(-1)
    variances = 10.0 ** (6 * (torch.arange(n, dtype=torch.float64) * 2**0.5 % 1) - 4)
    y = torch.sin(3 * x.squeeze(-1)) + variances.sqrt() * torch.cos(37.0 * torch.arange(n, dtype=torch.float64))
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(variances)
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    case, points = Case(model, likelihood, x, y), x[::100] + 1e-3
    mean, covariance = dense(case, points)
    found = PathwisePosterior(model, likelihood)(points).mean
    assert ((found - mean) / covariance.diagonal().sqrt()).abs().max() < 0.05


def test_a_posterior_of_training_takes_options_of_its_own() -> None:
    case = CASES["matern-3/2"]()
    training = ConjugateGradients(tolerance=1e-8, max_epochs=2, preconditioner=None)
    mll = HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=training, generator=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mll(case.model(case.x), case.y)
        short = mll.posterior().solves
    posterior = mll.posterior(solver=ConjugateGradients(tolerance=1e-8), rank=7, num_neighbours=3)
    assert posterior._recipe == ProjectionRecipe(rank=7, num_neighbours=3)
    solves = posterior.solves
    assert short.status is SolveStatus.BUDGET_EXHAUSTED
    assert solves.status is SolveStatus.CONVERGED
    residual = solves.system.residual - solves.system.operator.to_dense() @ solves.weights
    assert residual.norm() <= 1e-8 * solves.system.residual.norm()


def test_means_alone_cost_no_variance_solve() -> None:
    case = CASES["rbf"]()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=TIGHT, exact_below=0)
    _ = posterior(held_out_points()).mean
    assert posterior.solves._projection is None


def test_good_initial_weights_are_kept() -> None:
    """A start within the tolerance is the solution, to the last bit up to the solver's scaling."""
    case = CASES["rbf"]()
    exact = PathwisePosterior(case.model, case.likelihood, solver=Cholesky()).solves.weights
    start = exact * (1 + 1e-5)
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=ConjugateGradients(tolerance=0.01), initial_weights=start
    )
    torch.testing.assert_close(posterior.solves.weights, exact, rtol=1e-9, atol=1e-9)


def test_weights_of_another_shape_are_no_start() -> None:
    case = CASES["rbf"]()
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=TIGHT, initial_weights=torch.zeros(7, dtype=torch.float64)
    )
    mean, _ = dense(case, held_out_points())
    torch.testing.assert_close(posterior(held_out_points()).mean, mean, rtol=0, atol=1e-7)


def test_no_convergence_warns_with_advice() -> None:
    case = CASES["rbf"]()
    with pytest.warns(ConvergenceWarning, match="max_epochs"):
        PathwisePosterior(
            case.model, case.likelihood, solver=ConjugateGradients(tolerance=1e-9, max_epochs=1, preconditioner=None)
        )


@pytest.mark.parametrize("shape", [(2, 3), (4, 1, 2)])
def test_batches_of_held_out_points_on_one_model(shape: tuple[int, ...]) -> None:
    case = CASES["matern-5/2"]()
    flat = held_out_points(torch.Size(shape).numel())
    x = flat.reshape(*shape, 3)
    posterior = PathwisePosterior(case.model, case.likelihood, solver=TIGHT, exact_below=0, rank=15)
    prediction, listed = posterior(x), posterior(flat)
    torch.testing.assert_close(prediction.mean, listed.mean.reshape(shape))
    torch.testing.assert_close(prediction.variance, listed.variance.reshape(shape))
    assert prediction.covariance_matrix.shape == (*shape, shape[-1])
    torch.testing.assert_close(prediction.covariance_matrix.diagonal(dim1=-2, dim2=-1), prediction.variance)


def test_batches_of_held_out_points_on_a_batch_of_models() -> None:
    case = CASES["batch"]()
    x = held_out_points(8).reshape(4, 1, 2, 3)
    mean, covariance = dense(case, x)
    prediction = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())(x)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.covariance_matrix, covariance)


def test_batch_of_targets_on_one_kernel() -> None:
    x, y = data()
    likelihood = GaussianLikelihood()
    model = Regression(x, torch.stack([y, y.flip(0)]), likelihood, kernels.RBFKernel()).double()
    single = [Regression(x, target, likelihood, model.covar_module).double() for target in model.train_targets]
    wanted = [dense(Case(member, likelihood, x, member.train_targets), held_out_points()) for member in single]
    for solver in (Cholesky(), TIGHT):
        prediction = PathwisePosterior(model, likelihood, solver=solver)(held_out_points())
        torch.testing.assert_close(prediction.mean, torch.stack([mean for mean, _ in wanted]), rtol=0, atol=1e-7)
        torch.testing.assert_close(prediction.covariance_matrix, torch.stack([matrix for _, matrix in wanted]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matern-3/2", "product", "deep", "batch", "multitask"])
@pytest.mark.parametrize("solver", [Cholesky(), TIGHT])
def test_gradients_flow_to_the_test_inputs_alone(name: str, solver: Cholesky | ConjugateGradients) -> None:
    case = CASES[name]()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=solver, exact_below=0, rank=10, num_neighbours=10)
    x = held_out_points(3).requires_grad_()

    def objective(points: Tensor) -> Tensor:
        prediction = posterior(points)
        return prediction.mean.sin().sum() + prediction.variance.log().sum() + prediction.covariance_matrix.exp().sum()

    (gradient,) = torch.autograd.grad(objective(x), x)
    step, wanted = 1e-6, torch.zeros_like(x)
    with torch.no_grad():
        for index in torch.ones_like(x).nonzero().tolist():
            shift = torch.zeros_like(x)
            shift[tuple(index)] = step
            wanted[tuple(index)] = (objective(x + shift) - objective(x - shift)) / (2 * step)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    objective(x).backward()
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert all(parameter.requires_grad for parameter in case.model.parameters())


def test_no_graph_without_inputs_that_ask_for_one() -> None:
    case = CASES["rbf"]()
    prediction = PathwisePosterior(case.model, case.likelihood)(held_out_points())
    assert not prediction.mean.requires_grad
    assert not prediction.variance.requires_grad


@pytest.mark.parametrize("name", ["matern-3/2", "same-inputs"])
def test_mask_policy_drops_missing_targets(name: str) -> None:
    case = CASES[name]()
    y = case.y.clone()
    y[[3, 17]] = torch.nan
    keep = ~torch.isnan(y)
    restricted = copy.deepcopy(case.model)
    restricted.set_train_data(case.x[keep], y[keep], strict=False)
    mean, covariance = dense(Case(restricted, case.likelihood, case.x[keep], y[keep]), held_out_points())
    case.model.set_train_data(targets=y)
    with gpytorch.settings.observation_nan_policy("mask"):
        for solver in (Cholesky(), TIGHT):
            posterior = PathwisePosterior(case.model, case.likelihood, solver=solver, exact_below=0, rank=100)
            posterior.install()
            prediction = posterior(held_out_points())
            torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-7)
            torch.testing.assert_close(prediction.covariance_matrix, covariance)
            torch.testing.assert_close(case.model(held_out_points()).mean.detach(), prediction.mean)
            assert posterior.variance_error(held_out_points()).largest < 1e-6


def test_missing_targets_need_the_mask_policy() -> None:
    case = CASES["rbf"]()
    y = case.y.clone()
    y[3] = torch.nan
    case.model.set_train_data(targets=y)
    with pytest.raises(ValueError, match="observation_nan_policy"):
        PathwisePosterior(case.model, case.likelihood)


def test_skip_posterior_variances() -> None:
    case = CASES["rbf"]()
    posterior = PathwisePosterior(case.model, case.likelihood, solver=TIGHT, exact_below=0)
    with gpytorch.settings.skip_posterior_variances(True):
        prediction = posterior(held_out_points())
    assert prediction.covariance_matrix.abs().max() == 0
    assert posterior.solves._projection is None


def test_empty_test_set() -> None:
    for name in ("rbf", "multitask", "batch", "product"):
        case = CASES[name]()
        for solver in (Cholesky(), TIGHT):
            prediction = PathwisePosterior(case.model, case.likelihood, solver=solver)(held_out_points()[:0])
            assert prediction.mean.numel() == 0
            assert prediction.variance.numel() == 0


def test_one_datum_in_one_dimension() -> None:
    x = torch.tensor([[0.3]], dtype=torch.float64)
    likelihood = GaussianLikelihood()
    model = Regression(x, torch.tensor([1.2], dtype=torch.float64), likelihood, kernels.RBFKernel()).double()
    test = torch.tensor([0.1, 0.9], dtype=torch.float64)
    mean, covariance = dense(Case(model, likelihood, x, model.train_targets), test)
    for solver in (Cholesky(), TIGHT, AlternatingProjections(tolerance=1e-10)):
        prediction = PathwisePosterior(model, likelihood, solver=solver, exact_below=0)(test)
        torch.testing.assert_close(prediction.mean, mean)
        torch.testing.assert_close(prediction.covariance_matrix, covariance)


def test_task_indices_reach_the_noise() -> None:
    """Noise that depends on the inputs is conditioned on as GPyTorch does, and follows new training inputs."""

    class NoisePerTask(GaussianLikelihood):
        def _shaped_noise_covar(self, base_shape, *params, **kwargs):
            tasks = params[0] if torch.is_tensor(params[0]) else params[0][1]
            return DiagLinearOperator(0.1 + 0.3 * tasks.squeeze(-1).double())

    class TwoTasks(gpytorch.models.ExactGP):
        def __init__(self, inputs, y, likelihood):
            super().__init__(inputs, y, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernels.RBFKernel()

        def forward(self, x, tasks):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x, y = data()
    tasks = (torch.arange(40) % 2).unsqueeze(-1)
    test = (held_out_points(), torch.zeros(6, 1, dtype=torch.long))
    for params in ((), (tasks,), ([x, tasks],)):
        likelihood = NoisePerTask()
        model = TwoTasks((x, tasks), y, likelihood).double()
        posterior = PathwisePosterior(model, likelihood, solver=Cholesky(), params=params)
        for new in (tasks, 1 - tasks):
            model.set_train_data((x, new), y)
            system = model.covar_module(x).to_dense() + torch.diag(0.1 + 0.3 * new.squeeze(-1).double())
            wanted = model.covar_module(test[0], x).to_dense() @ torch.linalg.solve(system, y)
            torch.testing.assert_close(posterior(*test).mean, wanted.detach())
    with pytest.raises(ValueError, match=r"must broadcast, got \(2,\), \(3,\)"):
        posterior(*(part.expand(size, *part.shape) for size, part in zip((2, 3), test, strict=True)))


def test_stale_likelihood_arguments_are_refused() -> None:
    case = CASES["rbf"]()
    posterior = PathwisePosterior(case.model, case.likelihood, params=(torch.arange(40.0),))
    case.model.set_train_data(case.x + 1, case.y)
    with pytest.raises(ValueError, match="make a new posterior"):
        posterior(held_out_points())


def test_multitask_class_and_shape() -> None:
    case = CASES["multitask"]()
    prediction = PathwisePosterior(case.model, case.likelihood)(held_out_points())
    assert isinstance(prediction, MultitaskMultivariateNormal)
    assert prediction.mean.shape == (6, 2)
    assert prediction.variance.shape == (6, 2)


def test_bad_test_inputs() -> None:
    case = CASES["rbf"]()
    posterior = PathwisePosterior(case.model, case.likelihood)
    x = held_out_points()
    with pytest.raises(ValueError, match="do not fit the training inputs"):
        posterior(x[:, :2])
    with pytest.raises(ValueError, match=r"\(\) do not fit the training inputs"):
        posterior(x[0, 0])
    with pytest.raises(ValueError, match=r"\(3,\) do not fit.*for one point use x\.unsqueeze\(0\)"):
        posterior(x[0])
    with pytest.raises(ValueError, match=r"float32.*float64.*Use x\.to\('cpu', torch\.float64\)"):
        posterior(x.float())
    with pytest.raises(ValueError, match="takes 1 input tensor"):
        posterior(x, x)
    for call in (posterior, posterior.sample_paths(2)):
        with pytest.raises(ValueError, match=r"got ndarray: convert them with torch\.as_tensor"):
            call(x.numpy())
    x[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"x\[2, 1\]"):
        posterior(x)


@pytest.mark.parametrize("solver", [Cholesky(), TIGHT])
def test_bad_training_data_are_named(solver: Cholesky | ConjugateGradients) -> None:
    case = CASES["rbf"]()
    case.model.train_targets[3] = torch.inf
    with pytest.raises(ValueError, match=r"train_targets\[3\] is inf"):
        PathwisePosterior(case.model, case.likelihood, solver=solver)
    case = CASES["rbf"]()
    case.model.train_inputs[0][4, 1] = torch.nan
    with pytest.raises(ValueError, match=r"train_inputs\[4, 1\] is nan"):
        PathwisePosterior(case.model, case.likelihood, solver=solver)


@pytest.mark.parametrize("option", ["rank", "num_neighbours", "num_frequencies"])
def test_bad_options(option: str) -> None:
    case = CASES["rbf"]()
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        PathwisePosterior(case.model, case.likelihood, **{option: 0})


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [
        ("params", torch.ones(3), "params must be a tuple.*got Tensor"),  # no tuple of its three numbers
        ("params", "x", "params must be a tuple.*got str"),
        ("kwargs", [1], "kwargs must be None or a Mapping"),
        ("initial_weights", 0.0, "initial_weights must be None or a Tensor"),
    ],
)
def test_an_argument_of_a_wrong_type(option: str, value: object, match: str) -> None:
    case = CASES["rbf"]()
    with pytest.raises(TypeError, match=match):
        PathwisePosterior(case.model, case.likelihood, **{option: value})


def test_the_order_of_an_mll_is_refused() -> None:
    case = CASES["rbf"]()
    with pytest.raises(TypeError, match="a model, then its likelihood, got GaussianLikelihood, then Regression"):
        PathwisePosterior(case.likelihood, case.model)
    with pytest.raises(TypeError, match="a model, then its likelihood, got Linear, then GaussianLikelihood"):
        PathwisePosterior(torch.nn.Linear(3, 1), case.likelihood)


class _Variational(gpytorch.models.ApproximateGP):
    def __init__(self) -> None:
        variational = gpytorch.variational.CholeskyVariationalDistribution(2)
        super().__init__(gpytorch.variational.VariationalStrategy(self, torch.zeros(2, 1), variational))


@pytest.mark.parametrize("posterior", [PathwisePosterior, LaplacePosterior])
def test_models_without_training_data_of_their_own(posterior: type) -> None:
    case = CASES["rbf"]()
    for model in (_Variational(), gpytorch.models.IndependentModelList(case.model, case.model)):
        with pytest.raises(TypeError, match=f"got {type(model).__name__}, then .* with its own training data"):
            posterior(model, case.likelihood)


def test_a_likelihood_that_is_not_gaussian() -> None:
    with pytest.raises(UnsupportedLikelihoodError, match="needs a Gaussian likelihood, got BernoulliLikelihood"):
        PathwisePosterior(CASES["rbf"]().model, gpytorch.likelihoods.BernoulliLikelihood())


def test_training_mode_and_products_are_left_alone() -> None:
    case = CASES["rbf"]()
    case.model.train()
    posterior = PathwisePosterior(case.model, case.likelihood, products=KernelProducts(tile_size=7))
    mean, _ = dense(case, held_out_points())
    torch.testing.assert_close(posterior(held_out_points()).mean, mean)
    assert case.model.training
    assert case.likelihood.training


@pytest.mark.parametrize("kernel", [kernels.MaternKernel(nu=2.5), kernels.PeriodicKernel()], ids=["radial", "any"])
def test_second_derivatives_are_those_of_gpytorch(kernel: kernels.Kernel) -> None:
    """What Newton's method on an acquisition function takes."""
    x, y = data(30)
    likelihood = GaussianLikelihood().double()
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernel)).double()
    likelihood.noise = 0.1
    model.eval()
    point = torch.full((1, x.shape[-1]), 0.3, dtype=torch.float64)
    for moment in ("mean", "variance"):
        found = []
        for predict in (PathwisePosterior(model, likelihood), model):
            value = lambda x, predict=predict, moment=moment: getattr(predict(x), moment).sum()
            found.append(torch.autograd.functional.hessian(value, point))
        assert found[1].abs().max() > 1e-3
        torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)


def test_small_variances_in_float32_have_the_digits_of_the_kernel() -> None:
    x, y = data(300)
    variances = []
    for dtype in (torch.float64, torch.float32):
        likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6))
        model = Regression(x.to(dtype), y.to(dtype), likelihood, kernels.RBFKernel()).to(dtype)
        likelihood.noise = 1e-3
        posterior = PathwisePosterior(model, likelihood)
        variances.append(posterior((x[:40] + 0.01).to(dtype)).variance.detach().double())
        error = posterior.variance_error((x[:40] + 0.01).to(dtype))
        assert error.largest < 0.02
    assert (variances[1] / variances[0]).log().abs().median() < 0.01


def test_noise_that_the_training_was_given_by_name() -> None:
    x, y = data(30)
    noise = torch.linspace(0.05, 2.0, 30, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((30,), 0.1, dtype=torch.float64))
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = HutchinsonMarginalLogLikelihood(likelihood, model)
    mll(model(x), y, noise=noise)
    found = mll.posterior()(x[:5]).mean
    known = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    expected = PathwisePosterior(Regression(x, y, known, kernels.RBFKernel()).double(), known)(x[:5]).mean
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")  # sparse matrices of linear_operator
@pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning")
@pytest.mark.parametrize("exact_below", [0, 1000])
def test_a_grid_without_bounds_stays_that_of_the_training_inputs(exact_below: int) -> None:
    """Further points would move it for all of them; those that it does not reach are refused."""
    kernel = kernels.GridInterpolationKernel(kernels.RBFKernel(), grid_size=10, num_dims=3)
    case, x = regression(kernels.ScaleKernel(kernel)), held_out_points(4)
    posterior = PathwisePosterior(case.model, case.likelihood, exact_below=exact_below)
    edge, far = (torch.cat([x, torch.full((1, 3), value, dtype=torch.float64)]) for value in (2.2, 9.0))
    with torch.no_grad():
        expected = posterior(x)
        beside = posterior(edge)
        torch.testing.assert_close(beside.mean[:4], expected.mean)
        torch.testing.assert_close(beside.variance[:4], expected.variance)
        with pytest.raises(ValueError, match=r"to 9 .* grid_bounds"):
            posterior(far)
        posterior.install()
        torch.testing.assert_close(case.model(x).mean, expected.mean)
        for moved in (edge, far):
            with pytest.raises(ValueError, match=r"grid_bounds.*posterior\(x\)"):
                case.model(moved)
        torch.testing.assert_close(case.model(x).mean, expected.mean)
        torch.testing.assert_close(posterior(x).mean, expected.mean)
    assert kernel.grid_is_dynamic


def test_a_model_whose_likelihood_was_replaced_warns() -> None:
    """As BoTorch's relevance pursuit does in a fit: the posterior silently had the noise of its last trial."""
    case = CASES["matern-3/2"]()
    mll = HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    case.model.likelihood = copy.deepcopy(case.likelihood)
    with pytest.warns(DataWarning, match="The model has another likelihood"):
        mll.posterior()

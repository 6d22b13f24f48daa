"""Models with far fields: copies, missing targets, batches, threads, resumed runs, fits, crude steps, other likelihoods."""

import copy
import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.linear_operators import KernelProducts, kernel_operator
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from tests.exact.gaussian_models import Regression
from tests.laplace.cases import LaplaceModel
from tests.linear_operators.far_field.test_training import data

N = 1000
TEST_X = 4 * torch.rand(20, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def training(
    far_field: float | None = 1e-5, targets: Tensor | None = None, tolerance: float = 1e-4, max_epochs: float = 500
) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    """A marginal log likelihood whose products pass through a far field."""
    x, y = data(N)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))
    model = Regression(x, y if targets is None else targets, likelihood, kernel).double()
    solver = gpi.solvers.ConjugateGradients(
        tolerance=tolerance, max_epochs=max_epochs, preconditioner=gpi.preconditioners.Vecchia(10)
    )
    products = KernelProducts(far_field=far_field)
    return gpi.mlls.HutchinsonMarginalLogLikelihood(
        likelihood, model, products=products, solver=solver, generator=0, num_probes=4
    )


def step(mll: gpi.mlls.HutchinsonMarginalLogLikelihood, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """The value of a step."""
    mll.zero_grad()
    value = mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)
    (-value.sum()).backward()
    if optimizer is not None:
        optimizer.step()
    return value.detach()


@torch.no_grad()
def means(mll: gpi.mlls.HutchinsonMarginalLogLikelihood) -> Tensor:
    return mll.posterior(rank=64, num_neighbours=16)(TEST_X).mean


def test_values_come_from_the_factor_of_the_default_preconditioner() -> None:
    """A low rank says little about a system with a far field: its value has four times the error here."""
    mll, exact = training(), training(far_field=None).variant(solver=gpi.solvers.Cholesky())
    default = mll.variant(solver=gpi.solvers.ConjugateGradients())
    value, truth = step(default), step(exact)
    assert default.report is not None
    assert float(default.report.value_sem) < 2e-3
    assert abs(float(value - truth)) < 5e-3
    assert "order" in dict(default._run.parts.get("logdet") or {})


def test_one_factor_serves_an_evaluation_and_its_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = gpi.preconditioners.Vecchia.build
    monkeypatch.setattr(
        gpi.preconditioners.Vecchia, "build", lambda *given, **named: built.append(None) or build(*given, **named)
    )
    optimiser = gpi.fitting.AverageInformation(training().variant(solver=gpi.solvers.ConjugateGradients()))
    assert optimiser.assess().curvature.epochs > 0
    assert len(built) == 1


def test_variances_need_fewer_projections_where_there_is_a_far_field() -> None:
    ranks = {}
    for far_field in (1e-5, None):
        mll = training(far_field)
        posterior = gpi.prediction.PathwisePosterior(
            mll.model, mll.likelihood, solver=mll.solver, products=mll.products, exact_below=10
        )
        ranks[far_field] = posterior.solves.projection().basis.shape[-1]
        assert posterior.variance_error(TEST_X).median < 0.03
    assert ranks == {1e-5: 256, None: N}


def variances(
    x: Tensor,
    y: Tensor,
    points: Tensor,
    kernel: kernels.Kernel,
    likelihood: gpytorch.likelihoods.Likelihood,
    *,
    has_tree: bool = True,
    jitter: float = 0.0,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """Latent variances by neighbours and projections, in the dtype of x, and those of dense float64 matrices."""

    class Jittered(Regression):
        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            prior = super().forward(x)
            return prior.add_jitter(jitter) if jitter else prior

    model = Jittered(x, y, likelihood, kernel).to(x.dtype)
    solver, products = gpi.solvers.ConjugateGradients(), KernelProducts(far_field=1e-5)
    posterior = gpi.prediction.PathwisePosterior(
        model, likelihood, solver=solver, products=products, exact_below=10, **options
    )
    assert (posterior.solves.projection().local.tree is not None) is has_tree
    with torch.no_grad():
        found = posterior(points).variance
        noise = likelihood._shaped_noise_covar(x.shape[:1]).diagonal(dim1=-1, dim2=-2).double() + jitter
        is_known = ~y.isnan()
        kernel, points, x = kernel.double(), points.double(), x[is_known].double()
        cross = kernel(points, x).to_dense()
        factor = torch.linalg.cholesky(kernel(x).to_dense() + torch.diag(noise.expand(len(y))[is_known]))
        explained = torch.linalg.solve_triangular(factor, cross.mT, upper=False).square().sum(0)
        return found, kernel(points, diag=True) + jitter - explained


def matern(lengthscale: float, outputscale: float = 1.0, **options: object) -> kernels.Kernel:
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, **options))
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, outputscale
    return kernel


def gaussian(noise: float) -> gpytorch.likelihoods.GaussianLikelihood:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = noise
    return likelihood


def test_variances_of_float32_know_the_data_where_the_noise_is_small() -> None:
    """A point that was observed twice has half of the noise left: no rounding error of the largest eigenvalue."""
    x, y = (tensor.float() for tensor in data(2 * N))
    x = (10 * x).round() / 10
    found, exact = variances(x, y, x[:50], matern(0.69, 4.0), gaussian(1e-3))
    assert (found / exact).log().abs().max() < 0.1


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_many_near_neighbours_do_not_magnify_the_rounding_errors_of_distances(dims: int) -> None:
    """Entries and products of k(x, X) are of the same distances; a variance is never below the exact one."""
    generator = torch.Generator().manual_seed(0)
    x, points = torch.rand(1500, dims, generator=generator), torch.rand(100, dims, generator=generator)
    kernel = kernels.ScaleKernel(kernels.RBFKernel())
    kernel.base_kernel.lengthscale = {1: 0.02, 2: 0.1, 3: 0.1}[dims]
    for options in ({"num_neighbours": 128, "has_tree": dims < 3}, {"has_tree": dims == 2}):
        found, exact = variances(x, x.sum(-1).sin(), points, kernel, gaussian(1e-3), **options)
        assert (found / exact).min() > 0.97
        assert (found / exact).median() < 1.02


@pytest.mark.parametrize("case", ["missing", "jitter"])
def test_test_points_and_data_have_the_same_centre(case: str) -> None:
    """Kernels centre their inputs by the data that they see: without missing ones, and with test points beside jitter."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(1500, 2, generator=generator, dtype=torch.float64)
    y, points = x.sum(-1).sin(), torch.rand(40, 2, generator=generator, dtype=torch.float64) * torch.tensor([5.0, 10.0])
    if case == "missing":
        y[x[:, 0] > 5] = torch.nan
    else:
        points = torch.cat([points, 30 + torch.rand(1500, 2, generator=generator, dtype=torch.float64)])
    with gpytorch.settings.observation_nan_policy("mask"):
        found, exact = variances(x, y, points, matern(0.5), gaussian(0.01), jitter=1e-4 * (case == "jitter"))
    assert (found / exact)[:40].log().abs().max() < 0.05


def test_one_noisy_datum_costs_the_others_no_digits() -> None:
    x, y = (tensor.float() for tensor in data(N))
    noise = torch.full((N,), 0.01)
    noise[7] = 1e6
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    found, exact = variances(x, y, TEST_X.float(), matern(0.1), likelihood)
    assert (found / exact).log().abs().max() < 0.1


def test_neighbours_of_a_sum_are_the_correlated_ones() -> None:
    """The nearest ones are those of a weak term here, whose lengthscale is a ten thousandth."""
    generator = torch.Generator().manual_seed(0)
    x, points = (torch.rand(size, 2, generator=generator, dtype=torch.float64) for size in (N, 40))
    kernel = matern(0.2, 0.7, active_dims=[0]) + matern(1e-4, 1e-4, active_dims=[1])
    found, exact = variances(x, x.sum(-1).sin(), points, kernel, gaussian(0.01), has_tree=False, rank=64)
    assert (found / exact).log().abs().max() < 0.1


def test_fantasies_share_the_neighbours_of_their_data() -> None:
    x, y = data(N)
    model = Regression(x, y, gaussian(0.01), matern(0.1)).double()
    solver, products = gpi.solvers.ConjugateGradients(tolerance=1e-6), KernelProducts(far_field=1e-5)
    posterior = gpi.prediction.PathwisePosterior(
        model, model.likelihood, solver=solver, products=products, exact_below=10
    )
    generator = torch.Generator().manual_seed(0)
    new = 4 * torch.rand(5, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    together = posterior.condition_on_observations(new, targets)(TEST_X)
    alone = posterior.condition_on_observations(new, targets[1])(TEST_X)
    assert together.variance.shape == (3, 20)
    torch.testing.assert_close(together.variance[1], alone.variance, rtol=0.02, atol=1e-4)
    torch.testing.assert_close(together.mean[1], alone.mean, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "missing", "count"), [("one", 0, 2), ("one", 150, 6), ("sum", 0, 6), ("sum", 150, 2)]
)
def test_with_all_data_as_neighbours_covariances_and_their_gradients_are_exact(
    kernel: str, missing: int, count: int
) -> None:
    """Whichever neighbours a tree finds: all of them. Two points take their joint covariance pair by pair."""
    x, y = data(N)
    y[:missing] = torch.nan
    likelihood, matern = gpytorch.likelihoods.GaussianLikelihood(), kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))
    covariance = matern if kernel == "one" else matern + kernels.ScaleKernel(kernels.MaternKernel(nu=2.5))
    model = Regression(x, y, likelihood, covariance).double()
    with gpytorch.settings.observation_nan_policy("mask"):
        posterior = gpi.prediction.PathwisePosterior(
            model,
            likelihood,
            solver=gpi.solvers.ConjugateGradients(),
            products=KernelProducts(far_field=1e-5),
            exact_below=10,
            rank=5,
            num_neighbours=N,
        )
        assert (posterior.solves.projection().local.tree is not None) is (kernel == "one")
        points = TEST_X[:count].reshape(2, -1, 2)  # a batch, which is a list of points for one system
        found, wanted = points.clone().requires_grad_(), points.clone().requires_grad_()
        latent = posterior(found)
        at, x = covariance(wanted).to_dense(), x[missing:]
        cross = covariance(wanted, x).to_dense()
        noisy = covariance(x).to_dense() + likelihood.noise * torch.eye(N - missing)
        expected = at - cross @ torch.linalg.solve(noisy, cross.mT)
        torch.testing.assert_close(latent.covariance_matrix, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(latent.variance, expected.diagonal(dim1=-2, dim2=-1), atol=1e-5, rtol=1e-4)
        gradients = [
            torch.autograd.grad(matrix.square().sum(), inputs)[0]
            for matrix, inputs in ((latent.covariance_matrix, found), (expected, wanted))
        ]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))], ids=["copy", "pickle"]
)
def test_copies_and_pickles(copied: object) -> None:
    mll = training()
    value = step(mll)
    other = copied(mll)
    assert step(other).equal(step(mll))
    assert other.report.far_field_error == mll.report.far_field_error is not None
    posterior = mll.posterior(rank=64, num_neighbours=16)
    with torch.no_grad():
        assert copied(posterior)(TEST_X).mean.equal(posterior(TEST_X).mean)
    assert value.isfinite()


def test_missing_targets() -> None:
    targets = data(N)[1].clone()
    targets[::7] = torch.nan
    field, tiles = training(targets=targets), training(None, targets)
    with gpytorch.settings.observation_nan_policy("mask"):
        assert float(step(field)) == pytest.approx(float(step(tiles)), abs=1e-3)
        assert field.report.far_field_error is not None
        assert (means(field) - means(tiles)).abs().max() < 1e-3


def test_noises_share_the_far_field_of_their_kernel() -> None:
    x, y = data(N)
    kernel = kernel_operator(kernels.MaternKernel(nu=1.5).double()(x), KernelProducts(far_field=1e-5)).detach()
    operator = NoisyLinearOperator(kernel, torch.tensor([[0.1], [0.3]], dtype=torch.float64).expand(2, N))
    assert all(operator[member].kernel is kernel for member in range(2))
    solution = gpi.solvers.ConjugateGradients(tolerance=1e-3).solve(operator, y.expand(2, N))
    exact = torch.stack([torch.linalg.solve(matrix, y) for matrix in operator.to_dense()])
    assert (solution.value - exact).norm() < 0.01 * exact.norm()


def test_members_of_a_batch_of_kernels_have_tiles() -> None:
    x = data(N)[0]
    kernel = kernels.MaternKernel(nu=1.5, batch_shape=torch.Size([2])).double()
    operator = kernel_operator(kernel(x), KernelProducts(far_field=1e-3)).detach()
    assert far_field_error(operator) is None
    assert far_field_error(operator[1]) is None


def test_predictions_and_products_of_several_threads() -> None:
    mll = training()
    step(mll)
    posterior = mll.posterior(rank=64, num_neighbours=16)

    def predicted(number: int) -> Tensor:
        with torch.no_grad():
            return posterior(TEST_X[number:]).mean

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(predicted, range(8)))
    for number, mean in enumerate(found):
        torch.testing.assert_close(mean, predicted(number), rtol=0, atol=1e-10)


def test_a_resumed_run_goes_on_to_the_last_bit() -> None:
    first, second = training(tolerance=1e-2), training(tolerance=1e-2)
    optimizers = [torch.optim.Adam(mll.model.parameters(), lr=0.1) for mll in (first, second)]
    step(first, optimizers[0])
    file = io.BytesIO()
    torch.save((first.model.state_dict(), optimizers[0].state_dict(), first.training_state()), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    second.model.load_state_dict(states[0])
    optimizers[1].load_state_dict(states[1])
    second.load_training_state(states[2])
    assert [step(first, optimizers[0]) for _ in range(2)] == [step(second, optimizers[1]) for _ in range(2)]
    assert second.report.far_field_error == first.report.far_field_error is not None


def test_a_fit() -> None:
    mll = training(tolerance=1e-2)
    result = gpi.fit(mll, progress=False, max_steps=2)
    assert mll.report.far_field_error is not None
    assert result.history


def test_predictions_after_a_crude_step() -> None:
    mll, tiles = training(max_epochs=1), training(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        step(mll)
    assert mll.report.status is gpi.solvers.SolveStatus.BUDGET_EXHAUSTED
    posterior = mll.posterior(rank=64, num_neighbours=16, solver=gpi.solvers.ConjugateGradients(tolerance=1e-4))
    with torch.no_grad():
        assert (posterior(TEST_X).mean - means(tiles)).abs().max() < 2e-3


def test_laplace_reports_the_error() -> None:
    x, y = data(N)
    values = []
    for far_field in (1e-5, None):
        model = LaplaceModel(x, (y > 0).double(), gpytorch.likelihoods.BernoulliLikelihood()).double()
        mll = gpi.mlls.LaplaceMarginalLogLikelihood(
            model.likelihood,
            model,
            products=KernelProducts(far_field=far_field),
            solver=gpi.solvers.LaplaceNewton(),
            generator=0,
        )
        values.append(float(step(mll)))
        assert (mll.report.far_field_error is not None) == (far_field is not None)
        assert ("far field" in str(mll.report)) == (far_field is not None)
    assert values[0] == pytest.approx(values[1], abs=1e-4)

"""Projections of the data against dense algebra: exact where they are complete, never too small where they are not."""

import math
from functools import partial

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch import kernels
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.exact.prediction import local_part
from gpy_iterative.exact.prediction import projection as projection_module
from gpy_iterative.exact.prediction.projection import (
    ExactProjection,
    GalerkinProjection,
    KroneckerProjection,
    ProjectionRecipe,
)
from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, operator_of_kernel
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.preconditioners.vecchia import block_factors
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.exact.gaussian_models import CASES, Regression
from tests.oracles import problem

N, T = 60, 8
NOISE = 0.04


def system() -> tuple[NoisyLinearOperator, LinearOperator, Tensor]:
    """H [n, n]; K(x, X) and K(x, x) of T further points."""
    _, joint, _ = problem(N + T, noise=NOISE)
    kernel = joint - NOISE * torch.eye(N + T, dtype=torch.float64)
    noise = torch.full((N,), NOISE, dtype=torch.float64)
    operator = NoisyLinearOperator(to_linear_operator(kernel[:N, :N]), noise)
    return operator, to_linear_operator(kernel[N:, :N]), kernel[N:, N:]


def exact_covariance(operator: LinearOperator, cross: LinearOperator, prior: Tensor) -> Tensor:
    rows = cross.to_dense()
    return prior - rows @ torch.linalg.solve(operator.to_dense(), rows.mT)


def naive_variance(rank: int, neighbours: int) -> Tensor:
    """Point by point: the best predictor from projections C^T y and the observations that correlate most past them."""
    operator, cross, prior = system()
    dense, rows, variances = operator.to_dense(), cross.to_dense(), []
    basis = ProjectionRecipe(rank=rank).build(operator).basis
    for row, variance in zip(rows, prior.diagonal(), strict=True):
        rest = row - dense @ basis @ (basis.mT @ row)
        inverse = dense - dense @ basis @ basis.mT @ dense
        nearest = (rest.abs() / inverse.diagonal().sqrt()).argsort(descending=True)[:neighbours]
        space = torch.cat([basis, torch.eye(N, dtype=torch.float64)[:, nearest]], dim=-1)
        explained = row @ space @ torch.linalg.solve(space.mT @ dense @ space, space.mT @ row)
        variances.append(variance - explained)
    return torch.stack(variances)


def test_basis_is_orthonormal_whatever_is_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, cross, prior = system()
    recipe = ProjectionRecipe(rank=10, num_neighbours=3)
    whole = recipe.build(operator)
    monkeypatch.setattr(projection_module, "CHUNK", 7)
    parts = recipe.build(operator)
    torch.testing.assert_close(parts.basis, whole.basis)
    torch.testing.assert_close(parts.basis.mT @ operator.to_dense() @ parts.basis, torch.eye(10, dtype=torch.float64))
    torch.testing.assert_close(parts.local.product, operator.to_dense() @ parts.basis)
    torch.testing.assert_close(parts.variance(prior.diagonal(), cross), whole.variance(prior.diagonal(), cross))


def test_cholesky_is_exact() -> None:
    operator, cross, prior = system()
    projection = ExactProjection(Cholesky().factorize(operator))
    wanted = exact_covariance(operator, cross, prior)
    torch.testing.assert_close(projection.covariance(prior, cross), wanted)
    torch.testing.assert_close(projection.variance(prior.diagonal(), cross), wanted.diagonal())


@pytest.mark.parametrize("tasks_of", ["", "points", "rows"])
@pytest.mark.parametrize("missing", [0, 4])
def test_rows_on_a_grid_are_products_over_axes(missing: int, tasks_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of K(x, X) is evaluated. Some points are data."""
    generator = torch.Generator().manual_seed(1)
    drawn = partial(torch.randn, generator=generator, dtype=torch.float64)
    x = torch.cartesian_prod(drawn(5), drawn(4), drawn(3))[torch.randperm(60, generator=generator)][missing:]
    points = torch.cat([drawn(125, 3), x[:5]]).requires_grad_()
    smooth = kernels.RBFKernel(active_dims=(0, 1), ard_num_dims=2)
    kernel = kernels.ScaleKernel(smooth * kernels.MaternKernel(nu=1.5, active_dims=(2,))).double()
    train, cross, prior = (
        operator_of_kernel(kernel, *pair, KernelProducts()) for pair in ((x, None), (points, x), (points, None))
    )
    tasks = torch.tensor([[1.0, 0.4], [0.4, 0.7]], dtype=torch.float64)
    if tasks_of == "points":
        train, cross, prior = (
            2 * KroneckerLinearOperator(part, to_linear_operator(tasks)) for part in (train, cross, prior)
        )
    elif tasks_of == "rows":
        entries, of_new = torch.randperm(2 * len(x), generator=generator)[4:], torch.arange(len(points)) % 2
        own, at = entries % 2, entries // 2
        train = HadamardLinearOperator.of(train, tasks, own, own, at, at)
        cross = HadamardLinearOperator.of(cross, tasks, of_new, own, None, at)
        prior = HadamardLinearOperator.of(prior, tasks, of_new, of_new)
    noise = torch.full((train.shape[-1],), NOISE, dtype=torch.float64)
    prior, operator = prior.to_dense(), NoisyLinearOperator(train, noise)
    wanted = exact_covariance(operator, cross, prior)
    projection = KroneckerProjection(Cholesky().factorize(operator.detach()))

    def refused(operator: object) -> Tensor:
        raise AssertionError("a matrix of all data")

    monkeypatch.setattr(RadialProductLinearOperator, "to_dense", refused)
    found, variance = projection.covariance(prior, cross), projection.variance(prior.diagonal(), cross)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(variance, wanted.diagonal())
    gradients = [
        torch.autograd.grad(each.sum(), points, retain_graph=True)[0] for each in (variance, wanted.diagonal())
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("whole_axis", [False, True])
def test_missing_targets_on_a_grid(whole_axis: bool) -> None:
    """Of single data, or of all of an input: the grid of observed data is then another than that of all."""
    case = CASES["complete-grid"]()
    last = case.x[:, 0].max()
    case.y[(case.x[:, 0] == last) if whole_axis else [3, 8]] = torch.nan
    points = torch.randn(130, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with gpytorch.settings.observation_nan_policy("mask"), torch.no_grad():
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
        mll(case.model(case.x), case.y)
        found = mll.posterior()(points)
        kernel, noise, seen = case.model.covar_module, case.likelihood.noise, ~case.y.isnan()
        rows = kernel(points, case.x[seen]).to_dense()
        matrix = kernel(case.x[seen]).to_dense() + noise * torch.eye(int(seen.sum()), dtype=torch.float64)
        wanted = kernel(points).to_dense() - rows @ torch.linalg.solve(matrix, rows.mT)
    torch.testing.assert_close(found.covariance_matrix, wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.variance, wanted.diagonal(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("rank", "neighbours"), [(1, 1), (1, 20), (10, 5), (40, 1), (40, 19)])
def test_equals_the_naive_predictor(rank: int, neighbours: int) -> None:
    operator, cross, prior = system()
    projection = ProjectionRecipe(rank=rank, num_neighbours=neighbours).build(operator)
    torch.testing.assert_close(projection.variance(prior.diagonal(), cross), naive_variance(rank, neighbours))


@pytest.mark.parametrize(("rank", "neighbours"), [(100, 1), (1, 100), (20, 60)])
def test_complete_spaces_are_exact(rank: int, neighbours: int) -> None:
    operator, cross, prior = system()
    projection = ProjectionRecipe(rank=rank, num_neighbours=neighbours).build(operator)
    wanted = exact_covariance(operator, cross, prior)
    torch.testing.assert_close(projection.covariance(prior, cross), wanted)
    torch.testing.assert_close(projection.variance(prior.diagonal(), cross), wanted.diagonal())


@pytest.mark.parametrize("limit", [0, 10_000])
@pytest.mark.parametrize(("rank", "neighbours"), [(1, 1), (5, 8), (30, 3)])
def test_covariance_is_that_of_the_predictors_errors(
    rank: int, neighbours: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either route: semi-definite, above the exact covariance, with the variances on its diagonal."""
    monkeypatch.setattr(local_part, "MAX_PAIRWISE", limit)
    operator, cross, prior = system()
    projection = ProjectionRecipe(rank=rank, num_neighbours=neighbours).build(operator)
    covariance = projection.covariance(prior, cross)
    exact = exact_covariance(operator, cross, prior)
    torch.testing.assert_close(covariance.diagonal(), projection.variance(prior.diagonal(), cross))
    assert torch.linalg.eigvalsh(covariance - exact).min() > -1e-10
    assert (covariance.diagonal() > exact.diagonal() + 1e-6).any()


def test_both_routes_to_a_covariance_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, cross, prior = system()
    projection = ProjectionRecipe(rank=5, num_neighbours=6).build(operator)
    pairwise = projection.covariance(prior, cross)
    monkeypatch.setattr(local_part, "MAX_PAIRWISE", 0)
    torch.testing.assert_close(projection.covariance(prior, cross), pairwise)
    listed = projection.covariance(prior.expand(3, T, T), to_linear_operator(cross.to_dense().repeat(3, 1)))
    torch.testing.assert_close(listed, pairwise.expand(3, T, T))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noises_that_differ_spoil_no_variance(dtype: torch.dtype) -> None:
    """H^-1 k_x is in the span of L for equal noises, else in that of L over the noise."""
    x = torch.linspace(0, 4, 230, dtype=torch.float64)
    matrix = torch.exp(-0.5 * (x.unsqueeze(-1) - x).square() / 0.5**2)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(230, generator=generator)
    kernel = matrix[order][:, order].to(dtype)
    noise = torch.exp(2 * torch.randn(200, generator=generator, dtype=torch.float64)).to(dtype)
    operator = NoisyLinearOperator(to_linear_operator(kernel[:200, :200]), noise)
    cross, prior = to_linear_operator(kernel[200:, :200]), kernel[200:, 200:]
    exact = exact_covariance(operator.double(), cross.double(), prior.double()).diagonal()
    found = ProjectionRecipe(rank=30, num_neighbours=3).build(operator).variance(prior.diagonal(), cross)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-5)


def test_missing_observations() -> None:
    operator, cross, prior = system()
    observed = torch.ones(N, dtype=torch.bool)
    observed[[3, 30]] = False
    kept = NoisyLinearOperator(
        to_linear_operator(operator.kernel.to_dense()[observed][:, observed]), operator.noise[observed]
    )
    for recipe in (ProjectionRecipe(rank=5, num_neighbours=100), ProjectionRecipe(rank=100)):
        projection = recipe.build(kept, observed)
        wanted = exact_covariance(kept, to_linear_operator(cross.to_dense()[:, observed]), prior)
        torch.testing.assert_close(projection.covariance(prior, cross), wanted)


def test_batches_and_early_stops() -> None:
    """Members of different numerical rank share one number of columns."""
    operator, cross, prior = system()
    twins = operator.kernel.to_dense().clone()
    twins[1:] = twins[:1]
    twins[:, 1:] = twins[:, :1]  # one point, sixty times: rank one
    kernels = torch.stack([operator.kernel.to_dense(), twins])
    batch = NoisyLinearOperator(to_linear_operator(kernels), operator.noise.expand(2, N))
    projection = ProjectionRecipe(rank=20, num_neighbours=60).build(batch)
    crosses = torch.stack([cross.to_dense(), twins[:T]])
    priors = torch.stack([prior, twins[:T, :T]])
    wanted = exact_covariance(batch, to_linear_operator(crosses), priors)
    torch.testing.assert_close(projection.covariance(priors, to_linear_operator(crosses)), wanted)
    variance = projection.variance(priors.diagonal(dim1=-2, dim2=-1), to_linear_operator(crosses))
    torch.testing.assert_close(variance, wanted.diagonal(dim1=-2, dim2=-1))


def test_duplicate_data_and_points_on_data() -> None:
    """Neighbours that say the same, and test points that are training points: still right, and never negative."""
    operator, _, _ = system()
    kernel = operator.kernel.to_dense()
    index = torch.arange(N).repeat(2)
    doubled = NoisyLinearOperator(
        to_linear_operator(kernel[index][:, index]), torch.full((2 * N,), 1e-6, dtype=torch.float64)
    )
    cross = to_linear_operator(kernel[:T][:, index])
    projection = ProjectionRecipe(rank=10, num_neighbours=12).build(doubled)
    variance = projection.variance(kernel.diagonal()[:T], cross)
    exact = exact_covariance(doubled, cross, kernel[:T, :T]).diagonal()
    assert (variance >= exact - 1e-9).all()
    torch.testing.assert_close(variance, exact, rtol=0, atol=1e-6)


def test_entries_that_are_not_finite_raise() -> None:
    operator, cross, prior = system()
    projection = ProjectionRecipe(rank=2, num_neighbours=5).build(operator)
    operator.kernel.to_dense().mul_(torch.nan)
    with pytest.raises(NonFiniteError, match="hyperparameters"):
        projection.variance(prior.diagonal(), cross)


@pytest.mark.filterwarnings("ignore:A not p.d.")
def test_a_matrix_that_is_not_positive_definite_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, _, _ = system()
    gram = torch.eye(20, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = 1.5
    monkeypatch.setattr(operator, "_matmul", lambda basis: basis @ gram)  # as of a crude far field
    with pytest.raises(NotPositiveDefiniteError, match=r"no predictive variances\. Keep the noise away from zero"):
        ProjectionRecipe(rank=20).build(operator)
    monkeypatch.setattr(projection_module, "far_field_error", lambda _: 1e-7)
    with pytest.raises(NotPositiveDefiniteError, match=r"error of 1e-07: use KernelProducts\(far_field=None\)"):
        ProjectionRecipe(rank=20).build(operator)


def test_a_prior_of_zero_has_no_variance() -> None:
    operator, cross, _ = system()
    operator = NoisyLinearOperator(to_linear_operator(torch.zeros(N, N, dtype=torch.float64)), operator.noise)
    projection = ProjectionRecipe(rank=10, num_neighbours=3).build(operator)
    nothing = to_linear_operator(torch.zeros_like(cross.to_dense()))
    torch.testing.assert_close(
        projection.variance(torch.zeros(T, dtype=torch.float64), nothing), torch.zeros(T).double()
    )


def test_float32() -> None:
    operator, cross, prior = system()
    single = NoisyLinearOperator(to_linear_operator(operator.kernel.to_dense().float()), operator.noise.float())
    projection = ProjectionRecipe(rank=20, num_neighbours=60).build(single)
    variance = projection.variance(prior.diagonal().float(), to_linear_operator(cross.to_dense().float()))
    assert variance.dtype == torch.float32
    truth = exact_covariance(operator, cross, prior).diagonal().float()
    torch.testing.assert_close(variance, truth, rtol=1e-3, atol=1e-5)


def test_rounding_in_one_block_of_neighbours_changes_no_other() -> None:
    # float32 with noise of 1e-4 leaves such blocks: past the projections hardly more than rounding errors.
    good = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    rounded = torch.tensor([[1.0, 1.5], [1.5, 1.0]], dtype=torch.float64)
    lower = block_factors(torch.stack([good, rounded]))
    assert torch.equal(lower[0], torch.linalg.cholesky(good))
    assert torch.isfinite(lower[1]).all()
    rest = lower[1] @ lower[1].mT - rounded
    assert (rest.diagonal() > 0).all()
    torch.testing.assert_close(rest, torch.diag_embed(rest.diagonal()))


def test_rounding_does_not_add_up_where_neighbours_are_nearly_explained() -> None:
    """Two dimensions, little noise, float32, a rank that leaves next to nothing: one point here once had variance 0."""
    random = np.random.default_rng(0)
    x = random.uniform(size=(2000, 2))
    y = np.sin(6 * x.sum(1)) + 0.1 * random.normal(size=len(x))
    mean, deviation = x[:1500].mean(0), x[:1500].std(0)
    points = torch.from_numpy((x - mean) / deviation).float()
    targets = torch.from_numpy(y).float()[:1500]
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.01
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.2 * 12**0.5
    model = Regression(points[:1500], targets, likelihood, kernel)
    exact = PathwisePosterior(model, likelihood, solver=gpi.solvers.Cholesky())(points[1500:]).variance
    posterior = PathwisePosterior(
        model, likelihood, solver=gpi.solvers.ConjugateGradients(), rank=512, num_neighbours=128, exact_below=0
    )
    variance = posterior(points[1500:]).variance
    assert (variance / exact).log().abs().max() < 0.05


@pytest.mark.parametrize(("smoothness", "has_neighbours"), [(math.inf, False), (2.5, True)])
def test_neighbours_are_left_out_where_noise_hides_the_rest(smoothness: float, has_neighbours: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, points = torch.rand(1500, 2, generator=generator), torch.rand(100, 2, generator=generator)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    base = gpytorch.kernels.RBFKernel() if math.isinf(smoothness) else gpytorch.kernels.MaternKernel(smoothness)
    base.lengthscale = 0.15
    model = Regression(x, x.sum(-1).sin(), likelihood, gpytorch.kernels.ScaleKernel(base))
    exact = PathwisePosterior(model, likelihood, solver=gpi.solvers.Cholesky())(points).variance
    posterior = PathwisePosterior(model, likelihood, solver=gpi.solvers.ConjugateGradients(), rank=400, exact_below=0)
    local = posterior.solves.projection().local
    assert local is not None
    assert (local.num_neighbours > 0) is has_neighbours
    torch.testing.assert_close(posterior(points).variance, exact, rtol=0.02, atol=0)


def test_projections_that_reach_down_to_the_noise_are_not_those_of_float32() -> None:
    """Their eigenvalues are below the rounding errors of a product: variances at the data were a sixth of the noise."""
    generator = torch.Generator().manual_seed(19)
    centres = torch.randn(20, 10, generator=generator)[torch.randint(20, (700,), generator=generator)]
    x = centres + 0.05 * torch.randn(700, 10, generator=generator)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))
    kernel.outputscale, kernel.base_kernel.lengthscale = 50.0, 0.3
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 1e-3
    model = Regression(x, x[:, 0].sin(), likelihood, kernel)
    posterior = PathwisePosterior(
        model, likelihood, solver=ConjugateGradients(), exact_below=0, rank=600, num_neighbours=64
    )
    with torch.no_grad():
        variance = posterior(x).variance
        matrix = kernel.double()(x.double()).to_dense()
        noisy = matrix + 1e-3 * torch.eye(700, dtype=torch.float64)
        exact = 1e-3 - 1e-6 * torch.linalg.inv(noisy).diagonal()
    error = (variance / exact).log()
    assert error.min() > -0.2
    assert error.max() < 1


@pytest.mark.filterwarnings("ignore:Predictive variances are wrong")
@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_never_makes_grown_projections_overconfident(seed: int) -> None:
    """In float32 with little noise, most of what is new about another datum is rounding."""
    x = torch.rand(330, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(4).sub(2).float()
    y, noise, scale = torch.zeros(330), 1.01e-4, 50.0
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = scale, 1.0
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.initialize(noise=noise)
    model = Regression(x[:300], y[:300], likelihood, kernel)
    options = {"solver": ConjugateGradients(), "exact_below": 0, "rank": 40, "num_neighbours": 64}
    posterior = PathwisePosterior(model, likelihood, **options)
    posterior.solves.projection()
    for row in torch.arange(300, 330).split(10):
        posterior = posterior.condition_on_observations(x[row], y[row])
    test = torch.rand(40, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 4 - 2
    matrix = scale * torch.exp(-0.5 * torch.cdist(torch.cat([x.double(), test]), torch.cat([x.double(), test])) ** 2)
    rows = matrix[330:, :330]
    inverse = torch.linalg.inv(matrix[:330, :330] + noise * torch.eye(330, dtype=torch.float64))
    exact = (matrix[330:, 330:] - rows @ inverse @ rows.mT).diagonal()
    assert (posterior(test.float()).variance / exact).min() > 0.9


@pytest.mark.parametrize("exact_below", [0, 1000])
@pytest.mark.parametrize("kernel", [gpytorch.kernels.MaternKernel(), gpytorch.kernels.RQKernel()])
def test_sites_far_apart_in_float32(kernel: gpytorch.kernels.Kernel, exact_below: int) -> None:
    """Data meet test points rounded as they met one another, with a gradient and without."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(300, 1, generator=generator)
    x[150:] += 20_000
    points, found = torch.tensor([[3.0], [20_005.0]]), {}
    for dtype in (torch.float64, torch.float32):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(x.to(dtype), torch.sin(x[:, 0]).to(dtype), likelihood, kernel).to(dtype)
        likelihood.noise = 0.05
        posterior = PathwisePosterior(model, likelihood, exact_below=exact_below, rank=100)
        found[dtype] = [
            posterior(points.to(dtype).requires_grad_(has_gradient)).variance.double() for has_gradient in (False, True)
        ]
    for exact, single in zip(*found.values(), strict=True):
        torch.testing.assert_close(single, exact, rtol=0.01, atol=0)


def test_a_variance_is_never_below_the_rounding_of_the_prior_one() -> None:
    too_large = GalerkinProjection(torch.ones(1, 1).double(), None)  # explains 4 of 2
    prior = torch.full((1, 1), 2.0).double()
    eps = torch.finfo(torch.float64).eps
    assert float(too_large.variance(prior[0], DenseLinearOperator(prior))) == 2 * eps
    assert float(too_large.covariance(prior, DenseLinearOperator(prior))) == pytest.approx(2 * eps, rel=1e-6, abs=0)


def test_rounding_in_float32_is_no_second_noise_beside_a_large_prior() -> None:
    """Errors of n entries hardly add up: as large as the largest eigenvalue's, they made variances 7 % too large."""
    generator = torch.Generator().manual_seed(0)
    x, size = torch.rand(3050, 2, generator=generator, dtype=torch.float64), 3000
    matrix = 300 * torch.exp(-0.5 * torch.cdist(x, x) ** 2)
    operator = NoisyLinearOperator(to_linear_operator(matrix[:size, :size]), torch.ones(size).double())
    exact = exact_covariance(operator, to_linear_operator(matrix[size:, :size]), matrix[size:, size:]).diagonal()
    rounded = NoisyLinearOperator(to_linear_operator(matrix[:size, :size].float()), torch.ones(size))
    rows = to_linear_operator(matrix[size:, :size].float())
    variance = ProjectionRecipe(rank=100).build(rounded).variance(matrix[size:, size:].diagonal().float(), rows)
    assert (variance / exact).log().median().abs() < 0.03

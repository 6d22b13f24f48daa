"""Grids and data of several outputs, of which some may be missing: exact factors by eigenvectors, against dense algebra."""

from functools import reduce

import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, SumLinearOperator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.linear_operators import KernelProducts, operator_of_kernel
from gpy_iterative.linear_operators.from_gpytorch import noisy_operator
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.linear_solvers.exact_factors import structure
from gpy_iterative.linear_solvers.kronecker import KroneckerFactor, kronecker_parts
from gpy_iterative.linear_solvers.unobserved import Unobserved
from gpy_iterative.solvers import Cholesky, SolveStatus, default_solver
from tests.exact.gaussian_models import CASES

POINTS, TASKS = 12, 3


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def covariance(size: int, rank: int) -> Tensor:
    return drawn(size, rank) @ drawn(size, rank).mT


def on_grid(missing: int = 0) -> RadialProductLinearOperator:
    """Three axes, of sizes 5, 4 and 2, in random order; two factors share an axis, and one has two axes."""
    kernel = kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0, 1), ard_num_dims=2)
        * kernels.MaternKernel(nu=1.5, active_dims=(2,))
        * kernels.PeriodicKernel(active_dims=(2,))
    ).double()
    x = torch.cartesian_prod(*(drawn(size) for size in (5, 4, 2)))[drawn(40).argsort()][missing:]
    operator = operator_of_kernel(kernel, x, None, KernelProducts())
    assert isinstance(operator, RadialProductLinearOperator)
    return operator


def system(kind: str, dtype: torch.dtype = torch.float64) -> LinearOperator:
    """A singular K, and a multiple of B; or kernels on a grid. Cells or targets may be missing."""
    convert = lambda matrix: to_linear_operator(matrix.to(dtype))
    points = on_grid(4 if "empty cells" in kind else 0).to(dtype) if "grid" in kind else convert(covariance(POINTS, 5))
    if "tasks" not in kind:
        noise = torch.full(points.shape[-1:], 0.1, dtype=dtype)
        return NoisyLinearOperator(2.5 * points, noise, num_variances=1)
    observed = torch.ones(points.shape[-1] * TASKS, dtype=torch.bool)
    if "missing" in kind:
        observed[[0, 2, 3, 11, 12]] = False
    numbers = observed.nonzero().squeeze(-1)
    masked = lambda whole: ObservedLinearOperator(whole, numbers, numbers) if "missing" in kind else whole
    kernel = 2.5 * KroneckerLinearOperator(points, convert(covariance(TASKS, 2)))
    if "correlated" not in kind:
        noise = torch.tensor([0.1, 0.3, 2.0], dtype=dtype).repeat(points.shape[-1])[observed]
        return NoisyLinearOperator(masked(kernel), noise, num_variances=TASKS)
    identity = ConstantDiagLinearOperator(torch.ones(1, dtype=dtype), points.shape[-1])
    noise = covariance(TASKS, 2) + 0.1 * torch.eye(TASKS, dtype=torch.float64)
    return masked(SumLinearOperator(kernel, KroneckerLinearOperator(identity, convert(noise))))


KINDS = [
    "tasks",
    "tasks, correlated",
    "tasks, missing targets",
    "tasks, correlated, missing targets",
    "grid",
    "grid, empty cells",
    "grid of tasks",
    "grid of tasks, correlated",
    "grid of tasks, empty cells",
    "grid of tasks, correlated, empty cells, missing targets",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor(kind: str, dtype: torch.dtype) -> None:
    operator = system(kind, dtype)
    rhs, dense = drawn(operator.shape[-1], 4).to(dtype), operator.to_dense().double()
    factor = Cholesky().factorize(operator)
    assert isinstance(factor, KroneckerFactor)
    assert factor.dim() == operator.dim()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    assert factor.solve(rhs).dtype == factor.logdet().dtype == dtype
    torch.testing.assert_close(factor.solve(rhs).double(), torch.linalg.solve(dense, rhs.double()), **tolerance)
    torch.testing.assert_close(factor.logdet().double(), torch.logdet(dense), **tolerance)
    white = factor.whiten(rhs)
    expected = rhs.double().mT @ torch.linalg.solve(dense, rhs.double())
    torch.testing.assert_close(white.mT @ white, expected, **tolerance)
    assert Cholesky().solve(operator, rhs).status is SolveStatus.CONVERGED


@pytest.mark.parametrize("way", ["_by_pairs", "_by_others"])  # of missing data
@pytest.mark.parametrize("kind", KINDS)
def test_score(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_by_pairs", "_by_others"):
        monkeypatch.setattr(Unobserved, name, getattr(Unobserved, way))
    found = kronecker_parts(system(kind))
    assert found is not None
    parts, entries = found
    parts = [to_dense(part).detach().requires_grad_() for part in parts]
    *axes, tasks, noise = parts
    whole = torch.kron(reduce(torch.kron, axes), tasks)
    if noise.dim() == 2:
        whole = whole + torch.kron(torch.eye(len(whole) // len(noise), dtype=torch.float64), noise)
    dense = whole[entries][:, entries] + (noise.diag() if noise.dim() == 1 else 0)
    y = drawn(len(dense))
    density = torch.distributions.MultivariateNormal(torch.zeros_like(y), dense).log_prob(y)
    *expected, of_noise = torch.autograd.grad(density, parts)
    factor = KroneckerFactor(*parts, entries=entries)
    *score, found_noise = factor.score(factor.solve(y.unsqueeze(-1)))
    torch.testing.assert_close(score, expected)
    if len(entries) < len(whole) and noise.dim() == 1:  # all data of a task share a variance
        by_task = noise.new_zeros(len(tasks))
        found_noise, of_noise = (by_task.index_add(0, entries % len(tasks), each) for each in (found_noise, of_noise))
    torch.testing.assert_close(found_noise, of_noise)


def test_missing_data_with_variances_of_their_own_are_left_to_other_solvers() -> None:
    """Derivatives by each would cost more than the factor."""
    operator = system("grid, empty cells")
    noise = operator.noise.requires_grad_()
    assert structure(NoisyLinearOperator(operator.kernel, noise, num_variances=1)) is not None
    assert structure(NoisyLinearOperator(operator.kernel, noise.detach())) is not None
    assert structure(NoisyLinearOperator(operator.kernel, noise)) is None


def test_tasks_may_be_inputs_of_a_grid() -> None:
    """Then the product's last factor is no task, and variances by task are not its variances."""
    x, observed = torch.cartesian_prod(torch.arange(12.0), torch.arange(3.0)), torch.arange(36) > 0
    covariance = (kernels.MaternKernel(active_dims=(0,)) * kernels.RBFKernel(active_dims=(1,)))(x)
    noisy = lambda *given: noisy_operator(*given, products=KernelProducts(), observed=observed)
    assert structure(noisy(GaussianLikelihood(), MultivariateNormal(torch.zeros(36), covariance))) is not None
    prior = MultitaskMultivariateNormal(torch.zeros(12, 3), covariance)
    assert structure(noisy(MultitaskGaussianLikelihood(3), prior)) is None


def test_several_data_of_a_task_at_a_point_are_left_to_other_solvers() -> None:
    points, tasks = to_linear_operator(covariance(POINTS, 5)), covariance(TASKS, 2)
    of_rows, noise = torch.arange(POINTS * TASKS), torch.ones(POINTS * TASKS).double()
    own = HadamardLinearOperator.of(points, tasks, *[of_rows % TASKS] * 2, *[of_rows // TASKS] * 2)
    assert structure(NoisyLinearOperator(own, noise)) is not None
    of_rows = of_rows.index_fill(0, torch.tensor([4]), 7)
    repeated = HadamardLinearOperator.of(points, tasks, *[of_rows % TASKS] * 2, *[of_rows // TASKS] * 2)
    assert structure(NoisyLinearOperator(repeated, noise)) is None


@pytest.mark.parametrize("setting", ["MOST_EMPTY", "missing"])
def test_many_missing_data_are_left_to_other_solvers(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, targets = system("grid, empty cells"), system("tasks, missing targets")
    if setting == "MOST_EMPTY":
        monkeypatch.setattr("gpy_iterative.linear_operators.radial.grid.MOST_EMPTY", 3)
        assert structure(grid) is structure(targets) is None
    else:
        noisy = lambda missing: NoisyLinearOperator(on_grid(missing), torch.ones(40 - missing).double())
        assert structure(noisy(8)) is not None
        assert structure(noisy(9)) is None


@pytest.mark.parametrize("least", [1e-6, 1e-12, 0.0])
def test_a_sum_of_tasks_may_have_hardly_any_noise(least: float) -> None:
    """H is well conditioned."""
    points, tasks, y = covariance(POINTS, 2 * POINTS), covariance(TASKS, TASKS), drawn(POINTS * TASKS, 1)
    vectors = torch.linalg.qr(drawn(TASKS, TASKS)).Q
    noise = vectors * torch.tensor([least, 0.1, 1.0], dtype=torch.float64) @ vectors.mT
    dense = torch.kron(points, tasks) + torch.kron(torch.eye(POINTS, dtype=torch.float64), noise)
    factor = KroneckerFactor(to_linear_operator(points), tasks, noise)
    torch.testing.assert_close(factor.solve(y), torch.linalg.solve(dense, y), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(factor.logdet(), torch.logdet(dense), rtol=1e-9, atol=1e-9)


def test_a_kernel_of_zeros() -> None:
    points, tasks, noise = torch.zeros(POINTS, POINTS).double(), covariance(TASKS, 2), covariance(TASKS, TASKS)
    y = drawn(POINTS * TASKS, 1)
    dense = torch.kron(torch.eye(POINTS, dtype=torch.float64), noise)
    factor = KroneckerFactor(to_linear_operator(points), tasks, noise)
    torch.testing.assert_close(factor.solve(y), torch.linalg.solve(dense, y))
    torch.testing.assert_close(factor.logdet(), torch.logdet(dense))


@pytest.mark.parametrize(
    "name", ["multitask", "multitask-low-rank-noise", "complete-grid", "incomplete-grid", "same-inputs"]
)
def test_a_model_is_exact_beyond_exact_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no dense matrix of all data."""
    monkeypatch.setattr("gpy_iterative.linear_solvers.default.EXACT_BELOW", 10)
    case = CASES[name]()
    expected = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=Cholesky())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpy_iterative.linear_solvers.exact_factors.kronecker_parts", lambda operator: None)
        value = expected(case.model(case.x), case.y)
        value.backward()
    gradients = [parameter.grad.clone() for parameter in case.model.parameters()]
    case.model.zero_grad()

    def refused(operator: object) -> Tensor:
        raise AssertionError("a dense matrix of all data")

    for operator in (KroneckerLinearOperator, HadamardLinearOperator, RadialProductLinearOperator):
        monkeypatch.setattr(operator, "to_dense", refused)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    found = mll(case.model(case.x), case.y)
    found.backward()
    torch.testing.assert_close(found, value)
    assert mll.report.epochs == 0
    for gradient, parameter in zip(gradients, case.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _kernel() -> KroneckerLinearOperator:
    return KroneckerLinearOperator(*map(to_linear_operator, (covariance(POINTS, 5), covariance(TASKS, 2))))


@pytest.mark.parametrize(
    "operator",
    [
        NoisyLinearOperator(_kernel(), torch.linspace(0.1, 1, POINTS * TASKS).double()),  # noise of each value
        NoisyLinearOperator(SumLinearOperator(_kernel(), _kernel()), torch.ones(POINTS * TASKS).double()),
        NoisyLinearOperator(
            SumLinearOperator(_kernel(), DiagLinearOperator(torch.ones(POINTS * TASKS).double())),
            torch.ones(POINTS * TASKS).double(),
        ),
        NoisyLinearOperator(_kernel(), torch.ones(2, POINTS * TASKS).double()),  # a batch
    ],
)
def test_other_systems_have_no_such_factor(operator: LinearOperator) -> None:
    assert structure(operator) is None


def test_many_points_are_left_to_other_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = system("tasks")
    monkeypatch.setattr("gpy_iterative.linear_solvers.default.EXACT_BELOW", 10)
    assert isinstance(default_solver(operator), Cholesky)
    monkeypatch.setattr("gpy_iterative.linear_solvers.kronecker.MOST_POINTS", POINTS - 1)
    assert isinstance(default_solver(operator), Cholesky)
    monkeypatch.setattr("gpy_iterative.linear_solvers.kronecker.MOST_ROWS", POINTS * TASKS - 6)
    assert isinstance(default_solver(operator), Cholesky)
    assert not isinstance(default_solver(system("tasks, missing targets")), Cholesky)
    monkeypatch.setattr("gpy_iterative.linear_solvers.kronecker.MOST_BY_ROOT", 1)
    assert not isinstance(default_solver(operator), Cholesky)


def test_what_has_no_factor() -> None:
    points, tasks, noise = to_linear_operator(covariance(POINTS, 5)), covariance(TASKS, 2), torch.eye(TASKS).double()
    with pytest.raises(NonFiniteError, match="not finite"):
        KroneckerFactor(to_linear_operator(covariance(POINTS, 5) * torch.nan), tasks, noise)
    with pytest.raises(NonFiniteError, match="not finite"):
        KroneckerFactor(points, tasks * torch.inf, noise)
    with pytest.raises(NotPositiveDefiniteError, match="noise of the tasks"):
        KroneckerFactor(points, tasks, torch.zeros(POINTS * TASKS).double())
    with pytest.raises(NotPositiveDefiniteError, match="noise of the tasks"):
        KroneckerFactor(points, torch.ones(TASKS, TASKS).double(), torch.zeros(TASKS, TASKS).double())

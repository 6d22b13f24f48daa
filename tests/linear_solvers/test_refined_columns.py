"""Iterative refinement: every promise of a native solve, kept by iterations in lower precision."""

import dataclasses

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
)
from gpy_iterative.linear_operators.extensions import low_precision_copy
from gpy_iterative.linear_solvers import columns
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.solvers import (
    AcceleratedSketchAndProject,
    AlternatingProjections,
    ColumnGroup,
    ConjugateGradients,
    IterativeSolver,
    SolveStatus,
    StochasticDualDescent,
    StochasticGradientDescent,
)
from tests.linear_solvers.contract import SolverContract, right_hand_sides, system, true_norms


class TestSinglePrecision(SolverContract):
    solver, precision = ConjugateGradients(preconditioner=PivotedCholesky(rank=20)), "float32"


class TestWithoutPreconditioner(SolverContract):
    solver, precision = ConjugateGradients(preconditioner=None), "float32"


class TestProjections(SolverContract):
    solver = AlternatingProjections(block_size=20, fallback=ConjugateGradients(preconditioner=PivotedCholesky(rank=10)))
    precision = "float32"
    share, smallest_noise, budgets = None, 0.04, ()


class TestEstimatedResiduals(SolverContract):
    solver, precision = StochasticGradientDescent(batch_size=30), "float32"
    share, smallest_noise, budgets = None, 0.04, (0.25, 1.0, 3.5)


SOLVERS = [
    ConjugateGradients(preconditioner=None),
    ConjugateGradients(),
    AlternatingProjections(block_size=20),
    AlternatingProjections(block_size=20, fallback=None),
    StochasticGradientDescent(batch_size=30),
    StochasticDualDescent(batch_size=30),
    AcceleratedSketchAndProject(block_size=20),
]


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_what_float32_cannot_reach_is_reached_with_its_products(solver: IterativeSolver) -> None:
    rhs = right_hand_sides()
    exact = dataclasses.replace(solver, tolerance=1e-9)
    solution = exact.solve(system(0.1, precision="float32"), rhs)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(system(0.1), rhs, solution.value).max() <= 1e-9 * (1 + 1e-4)
    torch.testing.assert_close(solution.residual, rhs - system(0.1).to_dense() @ solution.value, atol=1e-12, rtol=0)
    single = exact.solve(system(0.1, dtype=torch.float32), rhs.float())
    assert true_norms(system(0.1), rhs, single.value).max() > 1e-8


def test_an_ill_conditioned_system() -> None:
    operator, rhs = smooth_system(1e-4), right_hand_sides()
    solution = ConjugateGradients(tolerance=1e-8, preconditioner=None, max_epochs=3000).solve(operator, rhs)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(operator, rhs, solution.value).max() <= 1e-8 * (1 + 1e-4)


def smooth_system(noise: float, nearness: float = 0.05) -> NoisyLinearOperator:
    """Points so near one another that the kernel matrix alone has eigenvalues of rounding size."""
    operator = system(noise, precision="float32")
    kernel = operator.kernel
    nearer = RadialKernelLinearOperator(
        nearness * kernel.x1, kernel.outputscale, function=kernel.function, products=kernel.products
    )
    return NoisyLinearOperator(nearer, operator.noise)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
def test_a_copy_that_is_of_no_use_is_told(solver: IterativeSolver) -> None:
    """The rounded matrix has negative eigenvalues here."""
    operator, rhs = smooth_system(1e-9, nearness=4e-3), right_hand_sides()
    rounded = low_precision_copy(operator)._matmul(torch.eye(operator.shape[-1])).double()
    assert torch.linalg.eigvalsh((rounded + rounded.mT) / 2)[0] < -1e-8
    solution = dataclasses.replace(solver, tolerance=1e-8, max_epochs=100).solve(operator, rhs)
    norms = true_norms(operator, rhs, solution.value)
    if not isinstance(solver, AcceleratedSketchAndProject):  # whose momentum diverges on such a matrix
        assert solution.status in (SolveStatus.STAGNATED, SolveStatus.BUDGET_EXHAUSTED)
        assert "precision" in solution.status.advice
    assert solution.status is not SolveStatus.CONVERGED
    assert norms.max() <= 1 + 1e-12
    assert solution.stats.residual_norms["targets"] == pytest.approx(norms.max().item(), rel=1e-6)
    torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)


def test_stagnation_is_seen_before_the_budget_is_spent() -> None:
    rhs = right_hand_sides()
    solver = ConjugateGradients(tolerance=1e-8, preconditioner=None, max_epochs=10_000)
    solution = solver.solve(smooth_system(1e-9, nearness=4e-3), rhs)
    assert solution.status is SolveStatus.STAGNATED
    assert solution.stats.epochs < 5000


class Counting(ConjugateGradients):
    """Tells the dtypes that its steps compute in."""

    def step(self, operator: LinearOperator, iterate: object, state: object) -> object:
        DTYPES.add((operator.dtype, iterate.value.dtype, iterate.residual.dtype, iterate.rhs.dtype))
        return super().step(operator, iterate, state)


DTYPES: set[tuple[torch.dtype, ...]] = set()


def test_steps_compute_in_float32_with_a_given_preconditioner() -> None:
    DTYPES.clear()
    operator, rhs = system(precision="float32"), right_hand_sides()
    preconditioner = PivotedCholesky(rank=20).build(operator)
    assert preconditioner.solve(rhs).dtype == torch.float64
    solution = Counting(tolerance=1e-8).solve(operator, rhs, preconditioner=preconditioner)
    assert {(torch.float32,) * 4} == DTYPES
    assert solution.value.dtype == torch.float64
    assert preconditioner.solve(rhs).dtype == torch.float64


def test_rounds_cost_one_native_product_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "WATCHED_EVERY", 1000)
    operator, rhs, products = system(precision="float32"), right_hand_sides(), []
    matmul = RadialKernelLinearOperator._matmul
    monkeypatch.setattr(
        RadialKernelLinearOperator,
        "_matmul",
        lambda self, rhs: products.append(rhs.dtype) or matmul(self, rhs),
    )
    solution = ConjugateGradients(preconditioner=None).solve(operator, rhs)
    assert products.count(torch.float64) == solution.stats.overhead == 1
    assert products.count(torch.float32) == solution.stats.iterations


def test_errors_name_the_column_of_the_whole_system(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, rhs = system(precision="float32"), right_hand_sides()
    rhs[:, :2] = 0  # done from the start: the round begins with column 2
    spoilt = lambda self, operator, iterate, state: iterate.residual[:, 1].fill_(torch.nan)
    monkeypatch.setattr(ConjugateGradients, "step", spoilt)
    with pytest.raises(NonFiniteError, match="column 3"):
        ConjugateGradients(preconditioner=None).solve(operator, rhs)


@pytest.mark.parametrize("groups", [[64], [1, 63], [32, 32]])
def test_a_mean_that_one_column_is_behind(groups: list[int]) -> None:
    """All others are zero: their mean is below the aim of the worst from the start."""
    operator = system(0.1, precision="float32")
    rhs = torch.cat([right_hand_sides()[:, :1], torch.zeros(operator.shape[-1], 63).double()], dim=1)
    solver = ConjugateGradients(tolerance=0.001, preconditioner=None, stopping="mean")
    named = [ColumnGroup(str(size), size, 0.001) for size in groups]
    solution = solver.solve(operator, rhs, groups=named)
    assert solution.status is SolveStatus.CONVERGED
    residual = rhs - operator.to_dense() @ solution.value
    norms = torch.linalg.vector_norm(residual, dim=0) / torch.linalg.vector_norm(rhs[:, 0])
    assert all(part.mean() <= 0.001 * (1 + 1e-6) for part in norms.split(groups))


def test_a_mean_of_columns_that_begin_far_apart() -> None:
    operator, rhs = system(0.1, precision="float32"), right_hand_sides()
    guess = torch.linalg.solve(operator.to_dense(), rhs)
    guess[:, 0] = 0
    solver = ConjugateGradients(tolerance=0.001, preconditioner=None, stopping="mean")
    solution = solver.solve(operator, rhs, initial_guess=guess)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(operator, rhs, solution.value).mean() <= 0.001 * (1 + 1e-6)


def test_values_beyond_the_range_of_float32_name_it() -> None:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.PolynomialKernel(power=2)).double()
    kernel.outputscale = 1e38  # float32 ends at 3.4e38
    products = KernelProducts(tile_size=32, precision="float32")
    operator = NoisyLinearOperator(
        GenericKernelLinearOperator.of_kernel(kernel, 10 * system().kernel.x1, products=products).detach(),
        torch.full((120,), 1.0).double(),
    )
    with pytest.raises(NonFiniteError, match=r"precision='float32'.*'native'"):
        ConjugateGradients(preconditioner=None).solve(operator, right_hand_sides())


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver", [StochasticDualDescent(batch_size=5), AcceleratedSketchAndProject(block_size=5)], ids=["dual", "sketch"]
)
def test_looks_at_true_residuals_are_a_small_part_of_the_work(solver: IterativeSolver) -> None:
    """Also where a step is a small part of an epoch, and a look is a whole one: the matrix has few rows."""
    rhs, rounds = right_hand_sides(), 5
    solver = dataclasses.replace(solver, tolerance=1e-4, max_epochs=3000)
    solution, native = (solver.solve(system(0.1, precision=name), rhs) for name in ("float32", "native"))
    assert solution.status is native.status is SolveStatus.CONVERGED
    assert solution.stats.iterations > 20 * 20
    assert solution.stats.overhead <= native.stats.overhead + solution.stats.epochs / 20 + rounds


def test_batch_members_are_refined_one_by_one() -> None:
    single = system(precision="float32")
    kernel = RadialKernelLinearOperator(
        torch.stack([single.kernel.x1, 0.5 * single.kernel.x1]),
        torch.tensor([1.0, 2.0]).double(),
        function=single.kernel.function,
        products=single.kernel.products,
    )
    operator = NoisyLinearOperator(kernel, torch.full((2, 120), 0.1).double())
    rhs: Tensor = torch.stack([right_hand_sides(), right_hand_sides().flip(0)])
    solution = ConjugateGradients(tolerance=1e-8).solve(operator, rhs)
    assert true_norms(operator, rhs, solution.value).max() <= 1e-8 * (1 + 1e-4)

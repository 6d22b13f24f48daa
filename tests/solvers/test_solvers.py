"""The conformance suite of all iterative solvers, and what is each one's own."""

import dataclasses

import pytest
import torch
from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator, ToeplitzLinearOperator

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import MATERN32
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.solvers import (
    AlternatingProjections,
    Cholesky,
    ColumnGroup,
    ConjugateGradients,
    Iterate,
    IterativeSolver,
    SolveStatus,
    StochasticGradientDescent,
)
from tests import oracles

N = 120
SOLVERS = {
    "cg": ConjugateGradients(preconditioner=None),
    "cg, rank 20": ConjugateGradients(preconditioner=PivotedCholesky(rank=20)),
    "ap": AlternatingProjections(block_size=20, finish=None),
    "ap with finish": AlternatingProjections(block_size=20),
    "sgd": StochasticGradientDescent(batch_size=20, max_epochs=20_000),
}


def system(noise: float = 0.04) -> tuple[NoisyLinearOperator, torch.Tensor]:
    """H and right-hand sides [n, 6]: targets and signs."""
    x, _, y = oracles.problem(N)
    operator = NoisyLinearOperator(
        RadialKernelLinearOperator(
            x, torch.tensor(1.44).double(), function=MATERN32, products=KernelProducts(tile_size=32)
        ),
        torch.full((N,), noise).double(),
    )
    signs = torch.sign(torch.sin(torch.outer(torch.arange(1, N + 1), torch.arange(1, 6)).double() * 1.234567 + 0.5))
    return operator, torch.cat([y.unsqueeze(-1), signs], dim=-1)


def true_norms(operator: NoisyLinearOperator, rhs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    matrix = operator.to_dense()
    return torch.linalg.vector_norm(rhs - matrix @ value, dim=-2) / torch.linalg.vector_norm(rhs, dim=-2)


@pytest.fixture(params=SOLVERS, name="solver")
def _solver(request: pytest.FixtureRequest) -> IterativeSolver:
    return SOLVERS[request.param]


def test_true_residual_is_within_the_tolerance(solver: IterativeSolver) -> None:
    operator, rhs = system(0.0025 if not isinstance(solver, StochasticGradientDescent) else 0.04)
    solution = solver.solve(operator, rhs)
    assert solution.status is SolveStatus.CONVERGED
    norms = true_norms(operator, rhs, solution.value)
    assert norms.max() <= solver.tolerance * (1 + 1e-8)
    assert solution.stats.residual_norms["targets"] == pytest.approx(norms.max().item(), rel=1e-6)
    torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)
    if not isinstance(solver, AlternatingProjections):  # whose finish takes longer steps
        share = solver.batch_size / N if isinstance(solver, StochasticGradientDescent) else 1.0
        assert solution.stats.epochs == pytest.approx(solution.stats.iterations * share)


def test_groups_have_their_own_tolerance(solver: IterativeSolver) -> None:
    operator, rhs = system()
    groups = (ColumnGroup("targets", 1, 0.01), ColumnGroup("probes", 5, 0.2))
    solution = solver.solve(operator, rhs, groups=groups)
    norms = true_norms(operator, rhs, solution.value)
    assert norms[0] <= 0.01 * (1 + 1e-8)
    assert norms[1:].max() <= 0.2 * (1 + 1e-8)
    assert norms[1:].max() > 0.01  # they left the block when they were done
    assert set(solution.stats.residual_norms) == {"targets", "probes"}


def test_mean_rule_runs_all_columns_together(solver: IterativeSolver) -> None:
    operator, rhs = system()
    groups = (ColumnGroup("targets", 1, 0.01), ColumnGroup("probes", 5, 0.05))
    solution = dataclasses.replace(solver, stopping="mean").solve(operator, rhs, groups=groups)
    norms = true_norms(operator, rhs, solution.value)
    assert norms[0] <= 0.01 * (1 + 1e-8)
    assert norms[1:].mean() <= 0.05 * (1 + 1e-8)
    assert solution.stats.residual_norms["probes"] == pytest.approx(norms[1:].mean().item(), rel=1e-6)


def test_exact_start_takes_no_iteration(solver: IterativeSolver) -> None:
    operator, rhs = system()
    exact = torch.linalg.solve(operator.to_dense(), rhs)
    solution = solver.solve(operator, rhs, initial_guess=exact)
    assert solution.stats.iterations == 0
    torch.testing.assert_close(solution.value, exact)


def test_bad_start_is_slow_and_right(solver: IterativeSolver) -> None:
    operator, rhs = system()
    garbage = 100 * torch.cos(torch.arange(N * 6).double()).reshape(N, 6)
    solution = solver.solve(operator, rhs, initial_guess=garbage)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(operator, rhs, solution.value).max() <= solver.tolerance * (1 + 1e-8)


def test_budget_returns_the_best_iterate(solver: IterativeSolver) -> None:
    operator, rhs = system(1e-6)
    budget = dataclasses.replace(solver, max_epochs=3, tolerance=1e-8)
    solution = budget.solve(operator, rhs)
    assert solution.status is SolveStatus.BUDGET_EXHAUSTED
    assert solution.stats.epochs <= 3
    assert "budget" in solution.status.advice
    assert true_norms(operator, rhs, solution.value).max() <= 1  # never farther than the start at zero


def test_duplicate_rows(solver: IterativeSolver) -> None:
    x, _, y = oracles.problem(N)
    x[1::2] = x[::2]
    kernel = RadialKernelLinearOperator(x, torch.tensor(1.0).double(), function=MATERN32)
    operator = NoisyLinearOperator(kernel, torch.full((N,), 0.04).double())
    solution = solver.solve(operator, y)
    assert solution.status is SolveStatus.CONVERGED
    assert solution.value.shape == (N,)


def test_zero_columns_stay_zero(solver: IterativeSolver) -> None:
    operator, rhs = system()
    rhs[:, 2] = 0
    solution = solver.solve(operator, rhs, initial_guess=torch.ones_like(rhs))
    assert (solution.value[:, 2] == 0).all()
    assert solution.status is SolveStatus.CONVERGED


def test_non_finite_numbers_raise_and_change_nothing(solver: IterativeSolver) -> None:
    operator, rhs = system()
    guess = torch.zeros_like(rhs)
    rhs[3, 4] = torch.nan
    with pytest.raises(NonFiniteError, match=r"column 4[\s\S]*0 iterations"):
        solver.solve(operator, rhs, initial_guess=guess)
    assert (guess == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_members_are_solved_one_by_one(solver: IterativeSolver, dtype: torch.dtype) -> None:
    x, _, y = oracles.problem(60)
    kernel = RadialKernelLinearOperator(
        torch.stack([x, 0.5 * x]).to(dtype), torch.tensor([1.0, 2.0], dtype=dtype), function=MATERN32
    )
    operator = NoisyLinearOperator(kernel, torch.full((2, 60), 0.1, dtype=dtype))
    rhs = torch.stack([y, y.flip(0)]).to(dtype)
    solution = solver.solve(operator, rhs)
    residual = rhs - (operator.to_dense() @ solution.value.unsqueeze(-1)).squeeze(-1)
    norms = torch.linalg.vector_norm(residual, dim=-1) / torch.linalg.vector_norm(rhs, dim=-1)
    assert norms.max() <= 0.0101
    assert solution.value.shape == rhs.shape
    assert solution.value.dtype == dtype


@pytest.mark.parametrize("name", ["kronecker", "toeplitz", "dense"])
def test_any_positive_definite_operator(solver: IterativeSolver, name: str) -> None:
    small = torch.exp(-(torch.arange(6)[:, None] - torch.arange(6)[None]).abs().double())
    kernel = {
        "kronecker": lambda: KroneckerProductLinearOperator(DenseLinearOperator(small), DenseLinearOperator(small)),
        "toeplitz": lambda: ToeplitzLinearOperator(torch.exp(-0.5 * torch.arange(36).double())),
        "dense": lambda: DenseLinearOperator(torch.kron(small, small)),
    }[name]()
    operator = kernel.add_jitter(0.5)
    rhs = torch.cos(torch.arange(36).double())
    solution = solver.solve(operator, rhs)
    assert torch.linalg.vector_norm(rhs - operator.to_dense() @ solution.value) <= 0.0101 * rhs.norm()


def test_one_row(solver: IterativeSolver) -> None:
    solution = solver.solve(DenseLinearOperator(torch.tensor([[4.0]]).double()), torch.tensor([2.0]).double())
    assert solution.value.item() == pytest.approx(0.5, rel=0.011)


def test_progress_is_told(solver: IterativeSolver) -> None:
    operator, rhs = system()
    told = []
    solution = solver.solve(operator, rhs, callback=told.append)
    assert [progress.iteration for progress in told] == list(range(1, solution.stats.iterations + 1))
    assert told[-1].epochs == pytest.approx(solution.stats.epochs)


@pytest.mark.parametrize(
    ("solver_class", "options"),
    [
        (ConjugateGradients, {"tolerance": 0.0}),
        (ConjugateGradients, {"tolerance": 1.5}),
        (ConjugateGradients, {"max_epochs": 0}),
        (ConjugateGradients, {"stopping": "never"}),
        (AlternatingProjections, {"block_size": 0}),
        (AlternatingProjections, {"probe_tolerance": -0.1}),
        (StochasticGradientDescent, {"batch_size": 0}),
        (StochasticGradientDescent, {"momentum": 1.0}),
        (StochasticGradientDescent, {"learning_rate": -1.0}),
    ],
)
def test_options_outside_their_range(solver_class: type, options: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*{next(iter(options.values()))}"):
        solver_class(**options)


def test_shapes_that_do_not_fit() -> None:
    operator, rhs = system()
    with pytest.raises(ValueError, match="does not fit"):
        ConjugateGradients().solve(operator, rhs[:-1])
    with pytest.raises(ValueError, match="add up"):
        ConjugateGradients().solve(operator, rhs, groups=(ColumnGroup("targets", 1, 0.1),))


# Each solver's own


@pytest.mark.parametrize("rank", [None, 20])
def test_cg_iterates_are_the_textbook_ones(rank: int | None) -> None:
    operator, rhs = system()
    recipe = None if rank is None else PivotedCholesky(rank=rank)
    inverse = None if recipe is None else recipe.build(operator).solve(torch.eye(N).double())
    solver = ConjugateGradients(tolerance=1e-12, max_epochs=5, preconditioner=recipe, stopping="mean")
    expected = oracles.conjugate_gradients(operator.to_dense(), rhs[:, 0], 5, inverse)
    torch.testing.assert_close(solver.solve(operator, rhs[:, 0]).value, expected, rtol=1e-7, atol=1e-9)


def test_cg_with_a_full_preconditioner_takes_two_iterations() -> None:
    operator, rhs = system()
    solver = ConjugateGradients(tolerance=1e-6, preconditioner=PivotedCholesky(rank=N))
    assert solver.solve(operator, rhs).stats.iterations <= 2


def test_ap_iterates_are_the_textbook_ones() -> None:
    operator, rhs = system()
    solver = AlternatingProjections(block_size=20)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = solver.init(operator, iterate, None, None)
    for steps in range(1, 13):
        state = solver.step(operator, iterate, state)
        expected = oracles.alternating_projections(operator.to_dense(), rhs, steps, 20)
        torch.testing.assert_close(iterate.value, expected, rtol=1e-7, atol=1e-9)


def test_ap_blocks_are_scored_by_squares_so_that_opposite_columns_do_not_cancel() -> None:
    operator, rhs = system()
    opposite = torch.stack([rhs[:, 0], -rhs[:, 0]], dim=-1)
    assert AlternatingProjections(block_size=20).solve(operator, opposite).status is SolveStatus.CONVERGED


def test_ap_with_one_block_takes_one_iteration() -> None:
    operator, rhs = system()
    solution = AlternatingProjections(block_size=500, tolerance=1e-8).solve(operator, rhs)
    assert solution.stats.iterations == 1


@pytest.mark.parametrize("lengthscale", [0.1, 0.3, 1.0, 3.0])
def test_sgd_step_size_is_stable(lengthscale: float) -> None:
    x, _, y = oracles.problem(N)
    kernel = RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).double(), function=MATERN32)
    operator = NoisyLinearOperator(kernel, torch.full((N,), 0.2).double())
    solution = StochasticGradientDescent(batch_size=25, max_epochs=5000).solve(operator, y)
    assert solution.status is SolveStatus.CONVERGED


def test_sgd_recovers_from_a_step_size_that_is_too_large() -> None:
    operator, rhs = system()
    solver = StochasticGradientDescent(batch_size=20, learning_rate=60.0, max_epochs=20_000)
    assert solver.solve(operator, rhs).status is SolveStatus.CONVERGED


def test_sgd_says_when_it_diverges() -> None:
    operator, rhs = system()
    solver = StochasticGradientDescent(batch_size=20, learning_rate=1e6)
    solution = solver.solve(operator, rhs)
    assert solution.status is SolveStatus.DIVERGED
    assert "learning_rate" in solution.status.advice
    assert true_norms(operator, rhs, solution.value).max() <= 1 + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cholesky(dtype: torch.dtype) -> None:
    operator, rhs = system()
    single = NoisyLinearOperator(DenseLinearOperator(operator.kernel.to_dense().to(dtype)), operator.noise.to(dtype))
    factor = Cholesky().factorize(single)
    matrix = operator.to_dense()
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
    torch.testing.assert_close(factor.solve(rhs.to(dtype)).double(), torch.linalg.solve(matrix, rhs), **tolerance)
    torch.testing.assert_close(factor.inverse().double(), torch.linalg.inv(matrix), **tolerance)
    torch.testing.assert_close(factor.logdet().double(), torch.logdet(matrix), **tolerance)
    assert Cholesky().solve(single, rhs.to(dtype)).status is SolveStatus.CONVERGED


def test_cholesky_of_what_is_not_positive_definite() -> None:
    with pytest.raises(gpi.errors.NotPositiveDefiniteError, match="noise"):
        Cholesky().factorize(DenseLinearOperator(-torch.eye(3).double()))
    with pytest.raises(NonFiniteError):
        Cholesky().factorize(DenseLinearOperator(torch.full((3, 3), torch.nan).double()))


def test_default_follows_size_and_structure() -> None:
    x = torch.zeros(4000, 2)
    tiled = NoisyLinearOperator(RadialKernelLinearOperator(x, torch.tensor(1.0), function=MATERN32), torch.ones(4000))
    assert isinstance(gpi.solvers.default_solver(tiled), AlternatingProjections)
    assert isinstance(gpi.solvers.default_solver(tiled[:3000, :3000]), Cholesky)
    toeplitz = NoisyLinearOperator(ToeplitzLinearOperator(torch.ones(4000)), torch.ones(4000))
    assert isinstance(gpi.solvers.default_solver(toeplitz), ConjugateGradients)

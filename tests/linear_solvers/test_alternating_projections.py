"""Alternating projections: the contract, the naive iterates, and the fallback."""

import dataclasses

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_solvers import alternating_projections
from gpy_iterative.preconditioners import PivotedCholesky, RandomlyPivotedCholesky
from gpy_iterative.solvers import AlternatingProjections, ConjugateGradients, Iterate, SolveInputs, SolveStatus
from tests import oracles
from tests.linear_solvers.contract import GROUPS, N, SolverContract, right_hand_sides, system, true_norms

PURE = AlternatingProjections(block_size=20, fallback=None)


class TestPure(SolverContract):
    solver = PURE
    share = 20 / N


class TestLastBlockIsShorter(SolverContract):
    solver = dataclasses.replace(PURE, block_size=25)
    share = 25 / N
    budgets = (75 / N, 250 / N)


class TestWithFallback(SolverContract):
    solver = AlternatingProjections(block_size=20, fallback=ConjugateGradients(preconditioner=PivotedCholesky(rank=10)))
    share = None


def test_iterates_are_the_naive_ones() -> None:
    operator, rhs = system(), right_hand_sides()
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = PURE.init(operator, iterate, SolveInputs())
    for steps in range(1, 13):
        state = PURE.step(operator, iterate, state)
        expected = oracles.alternating_projections(operator.to_dense(), rhs, steps, 20)
        torch.testing.assert_close(iterate.value, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("room", [0, 2])
def test_factors_without_room_are_made_again(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, rhs = system(), right_hand_sides()
    expected = PURE.solve(operator, rhs).value
    monkeypatch.setattr(alternating_projections, "MAX_FACTOR_BYTES", room * 20 * 20 * operator.dtype.itemsize)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = PURE.init(operator, iterate, SolveInputs())
    for _ in range(12):
        state = PURE.step(operator, iterate, state)
    assert len(state.factors) == room
    assert torch.equal(PURE.solve(operator, rhs).value, expected)


def test_blocks_are_scored_by_squares_so_that_opposite_columns_do_not_cancel() -> None:
    rhs = right_hand_sides()
    opposite = torch.stack([rhs[:, 0], -rhs[:, 0]], dim=-1)
    assert PURE.solve(system(), opposite).status is SolveStatus.CONVERGED


def test_blocks_of_a_cpu_have_512_rows_by_default() -> None:
    operator, rhs = system(size=1100), right_hand_sides(1100)
    solution = AlternatingProjections(max_epochs=512 / 1100).solve(operator, rhs)
    assert solution.stats.iterations == 1
    assert solution.stats.epochs == pytest.approx(512 / 1100)


def test_one_block_takes_one_iteration() -> None:
    solution = AlternatingProjections(block_size=500, tolerance=1e-8).solve(system(), right_hand_sides())
    assert solution.stats.iterations == 1
    assert solution.stats.epochs == 1


@pytest.mark.slow
def test_fallback_takes_over_where_the_pace_is_lost() -> None:
    # Long lengthscales: what is left after the first digits is smooth, and spread over all blocks.
    x, _, _ = oracles.problem(N)
    kernel = RadialKernelLinearOperator(x / 5, torch.tensor(1.0).double(), function=MATERN32)
    operator, rhs = NoisyLinearOperator(kernel, torch.full((N,), 0.01).double()), right_hand_sides()
    pure = PURE.solve(operator, rhs, groups=GROUPS)
    solver = AlternatingProjections(block_size=20, fallback=ConjugateGradients(preconditioner=PivotedCholesky(rank=40)))
    finished = solver.solve(operator, rhs, groups=GROUPS)
    assert finished.status is SolveStatus.CONVERGED
    assert finished.stats.epochs < 0.5 * pure.stats.epochs
    assert finished.stats.overhead == pytest.approx(pure.stats.overhead + 40 / N)  # its preconditioner
    assert true_norms(operator, rhs, finished.value)[0] <= 0.01


def test_fallback_waits_while_the_pace_is_good() -> None:
    operator, rhs = system(5.0), right_hand_sides()
    pure, finished = PURE.solve(operator, rhs), AlternatingProjections(block_size=20).solve(operator, rhs)
    assert pure.stats.epochs > 3
    assert torch.equal(pure.value, finished.value)
    assert pure.stats.epochs == finished.stats.epochs


def test_fallback_draws_from_the_generator_of_the_solve() -> None:
    fallback = ConjugateGradients(preconditioner=RandomlyPivotedCholesky(rank=20))
    solver = AlternatingProjections(block_size=20, fallback=fallback, tolerance=1e-4)
    solve = lambda seed: solver.solve(system(), right_hand_sides(), generator=torch.Generator().manual_seed(seed)).value
    assert torch.equal(solve(0), solve(0))
    assert not torch.equal(solve(0), solve(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_blocks_get_jitter_and_the_solution_does_not(dtype: torch.dtype) -> None:
    # Two equal rows and no noise: consistent right-hand sides still have a solution.
    matrix = oracles.problem(60, noise=0.1)[1]
    matrix[1], matrix[:, 1] = matrix[0].clone(), matrix[:, 0].clone()
    matrix[1, 1] = matrix[0, 0]
    operator = DenseLinearOperator(matrix.to(dtype))
    rhs = (matrix @ torch.cos(torch.arange(60).double())).unsqueeze(-1).to(dtype)
    solution = dataclasses.replace(PURE, max_epochs=2000).solve(operator, rhs)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(operator, rhs, solution.value).max() <= 0.0101


def test_indefinite_blocks_are_reported() -> None:
    operator = NoisyLinearOperator(DenseLinearOperator(-torch.eye(6).double()), torch.zeros(6).double())
    solution = PURE.solve(operator, torch.ones(6).double())
    assert solution.status is SolveStatus.INDEFINITE
    assert torch.isfinite(solution.value).all()

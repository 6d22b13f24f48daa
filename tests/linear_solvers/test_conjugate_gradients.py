"""Conjugate gradients: the contract, and the textbook's iterates."""

import pytest
import torch

from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.solvers import ConjugateGradients, SolveStatus
from tests import oracles
from tests.linear_solvers.contract import N, SolverContract, right_hand_sides, system, true_norms


class TestPlain(SolverContract):
    solver = ConjugateGradients(preconditioner=None)


class TestPreconditioned(SolverContract):
    solver = ConjugateGradients(preconditioner=PivotedCholesky(rank=20))


@pytest.mark.parametrize("rank", [None, 20])
def test_iterates_are_the_textbook_ones(rank: int | None) -> None:
    operator, rhs = system(), right_hand_sides()
    recipe = None if rank is None else PivotedCholesky(rank=rank)
    inverse = None if recipe is None else recipe.build(operator).solve(torch.eye(N).double())
    solver = ConjugateGradients(tolerance=1e-12, max_epochs=5, preconditioner=recipe)
    expected = oracles.conjugate_gradients(operator.to_dense(), rhs[:, 0], 5, inverse)
    torch.testing.assert_close(solver.solve(operator, rhs[:, 0]).value, expected, rtol=1e-7, atol=1e-9)


def test_a_full_preconditioner_takes_two_iterations() -> None:
    solver = ConjugateGradients(tolerance=1e-6, preconditioner=PivotedCholesky(rank=N))
    assert solver.solve(system(), right_hand_sides()).stats.iterations <= 2


def test_a_preconditioner_that_was_built_before_is_used() -> None:
    operator, rhs = system(), right_hand_sides()
    built = PivotedCholesky(rank=30).build(operator)
    own = ConjugateGradients(preconditioner=PivotedCholesky(rank=30)).solve(operator, rhs)
    given = ConjugateGradients(preconditioner=None).solve(operator, rhs, preconditioner=built)
    assert torch.equal(own.value, given.value)
    assert own.stats.overhead == pytest.approx(given.stats.overhead + 30 / N)
    again = ConjugateGradients(preconditioner=None).solve(operator, rhs, preconditioner=own.preconditioner)
    assert torch.equal(again.value, own.value)
    solved = ConjugateGradients(preconditioner=None).solve(operator, rhs, initial_guess=own.value)
    assert solved.stats.iterations == 0
    assert solved.preconditioner is None


def test_preconditioner_of_a_batch() -> None:
    operator = system().expand(2, N, N)
    rhs = right_hand_sides().expand(2, N, 6)
    built = PivotedCholesky(rank=30).build(operator)
    solution = ConjugateGradients(preconditioner=None).solve(operator, rhs, preconditioner=built)
    assert solution.status is SolveStatus.CONVERGED
    assert (
        solution.stats.iterations
        == 2 * ConjugateGradients(preconditioner=PivotedCholesky(rank=30)).solve(operator[0], rhs[0]).stats.iterations
    )


def test_what_float32_cannot_reach_is_stagnation() -> None:
    operator, rhs = system(1e-4, dtype=torch.float32), right_hand_sides().float()
    solution = ConjugateGradients(tolerance=1e-7, max_epochs=5000).solve(operator, rhs)
    assert solution.status is SolveStatus.STAGNATED
    assert "float64" in solution.status.advice
    assert solution.stats.epochs < 2500
    assert true_norms(operator, rhs, solution.value).max() < 1e-2

"""Stochastic dual descent: the contract, the paper's iterates, and its step size."""

import dataclasses

import pytest
import torch

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import MATERN32
from gpy_iterative.solvers import Given, Iterate, SolveStatus, StochasticDualDescent
from tests import oracles
from tests.solvers.contract import N, SolverContract, right_hand_sides, system, true_norms

SOLVER = StochasticDualDescent(batch_size=20, max_epochs=20_000)


class TestStochasticDualDescent(SolverContract):
    solver = SOLVER
    smallest_noise = 0.01
    share = 20 / N


def test_iterates_are_the_naive_ones() -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, batch_size=25, learning_rate=3.0, averaging=0.3)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = solver.init(operator, iterate, Given(generator=torch.Generator().manual_seed(1)))
    twin, batches = torch.Generator().manual_seed(1), []
    for _ in range(12):
        state = solver.step(operator, iterate, state)
        batches.append(torch.randperm(N, generator=twin)[:25])
        expected = oracles.stochastic_dual_descent(operator.to_dense(), rhs, batches, 3.0, 0.9, 0.3)
        torch.testing.assert_close(iterate.value, expected)
        torch.testing.assert_close(iterate.residual, rhs - operator.to_dense() @ expected)


@pytest.mark.parametrize("lengthscale", [0.1, 0.3, 1.0, 3.0])
def test_step_size_is_stable(lengthscale: float) -> None:
    x, _, y = oracles.problem(N)
    kernel = RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).double(), function=MATERN32)
    operator = NoisyLinearOperator(kernel, torch.full((N,), 0.2).double())
    solver = StochasticDualDescent(batch_size=25, max_epochs=5000)
    iterate = Iterate(torch.zeros(N, 1).double(), y.unsqueeze(-1), y.unsqueeze(-1))
    rate = solver.init(operator, iterate, Given()).descent.learning_rate
    largest = torch.linalg.eigvalsh(operator.to_dense())[-1]
    limit = min(3.8 / 2.8 * N / largest, 2 * 0.1 * 25 / 1.2)
    assert 0.4 * limit <= rate <= 0.8 * limit
    assert solver.solve(operator, y).status is SolveStatus.CONVERGED
    # Not a step size that only recovered from being too large.
    given = dataclasses.replace(solver, learning_rate=rate).solve(operator, y)
    assert given.status is SolveStatus.CONVERGED
    assert given.stats.overhead < 2


def test_momentum_pays() -> None:
    operator, rhs = system(0.01), right_hand_sides()
    plain = dataclasses.replace(SOLVER, momentum=0.0, learning_rate=2.0).solve(operator, rhs)
    assert SOLVER.solve(operator, rhs).stats.epochs < plain.stats.epochs


def test_recovers_from_a_step_size_that_is_too_large() -> None:
    solver = dataclasses.replace(SOLVER, learning_rate=100.0)
    assert solver.solve(system(), right_hand_sides()).status is SolveStatus.CONVERGED


def test_says_when_it_diverges() -> None:
    operator, rhs = system(), right_hand_sides()
    solution = dataclasses.replace(SOLVER, learning_rate=1e6).solve(operator, rhs)
    assert solution.status is SolveStatus.DIVERGED
    assert "learning_rate" in solution.status.advice
    assert true_norms(operator, rhs, solution.value).max() <= 1 + 1e-12


def test_same_generator_same_solution() -> None:
    operator, rhs = system(), right_hand_sides()
    first, again, other = (
        SOLVER.solve(operator, rhs, generator=torch.Generator().manual_seed(seed)).value for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"momentum": 1.0}, {"learning_rate": 0.0}, {"averaging": 0.0}, {"averaging": 1.1}],
)
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        StochasticDualDescent(**options)

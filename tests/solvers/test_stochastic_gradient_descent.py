"""Stochastic gradient descent: the contract, the naive iterates, and its step size."""

import dataclasses

import pytest
import torch

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import MATERN32
from gpy_iterative.solvers import Given, Iterate, SolveStatus, StochasticGradientDescent
from tests import oracles
from tests.solvers.contract import N, SolverContract, right_hand_sides, system, true_norms

SOLVER = StochasticGradientDescent(batch_size=20, max_epochs=20_000)


class TestStochasticGradientDescent(SolverContract):
    solver = SOLVER
    smallest_noise = 0.04
    share = 20 / N


def test_iterates_are_the_naive_ones() -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, batch_size=25, learning_rate=3.0)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = solver.init(operator, iterate, Given(generator=torch.Generator().manual_seed(1)))
    orders = []
    for steps in range(1, 13):
        state = solver.step(operator, iterate, state)
        if steps % 5 == 1:  # the batches of an epoch: four of 25, and one of 20
            orders.append(state.order)
        batches = [rows for order in orders for rows in order.split(25)][:steps]
        expected = oracles.stochastic_gradient_descent(operator.to_dense(), rhs, batches, 3.0, 0.9)
        torch.testing.assert_close(iterate.value, expected)
    assert not torch.equal(orders[0], orders[1])
    assert all(torch.equal(order.sort().values, torch.arange(N)) for order in orders)


@pytest.mark.parametrize("lengthscale", [0.1, 0.3, 1.0, 3.0])
def test_step_size_is_stable(lengthscale: float) -> None:
    x, _, y = oracles.problem(N)
    kernel = RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).double(), function=MATERN32)
    operator = NoisyLinearOperator(kernel, torch.full((N,), 0.2).double())
    solver = StochasticGradientDescent(batch_size=25, max_epochs=5000)
    iterate = Iterate(torch.zeros(N, 1).double(), y.unsqueeze(-1), y.unsqueeze(-1))
    rate = solver.init(operator, iterate, Given()).descent.learning_rate
    solution = solver.solve(operator, y)
    assert solution.status is SolveStatus.CONVERGED
    # Not a step size that only recovered from being too large: the same solve as with the rate given.
    given = dataclasses.replace(solver, learning_rate=rate).solve(operator, y)
    assert given.status is SolveStatus.CONVERGED
    largest = torch.linalg.eigvalsh(operator.to_dense())[-1]
    limit = min(2 * 1.9 * N / largest, 2 * 0.1 * 25 / 1.2)
    assert 0.4 * limit <= rate <= 0.8 * limit


def test_recovers_from_a_step_size_that_is_too_large() -> None:
    solver = dataclasses.replace(SOLVER, learning_rate=60.0)
    assert solver.solve(system(), right_hand_sides()).status is SolveStatus.CONVERGED


def test_says_when_it_diverges() -> None:
    operator, rhs = system(), right_hand_sides()
    solution = dataclasses.replace(SOLVER, learning_rate=1e6).solve(operator, rhs)
    assert solution.status is SolveStatus.DIVERGED
    assert "learning_rate" in solution.status.advice
    assert true_norms(operator, rhs, solution.value).max() <= 1 + 1e-12


@pytest.mark.parametrize("learning_rate", [1.0, 5.0, 10.0, 20.0, 30.0])
def test_nothing_counts_before_its_true_residual_is_known(learning_rate: float) -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, learning_rate=learning_rate, max_epochs=10)
    solution = solver.solve(operator, rhs, initial_guess=0.5 * torch.linalg.solve(operator.to_dense(), rhs))
    norms = true_norms(operator, rhs, solution.value)
    assert norms.max() <= 0.5 + 1e-12
    assert solution.stats.residual_norms["targets"] == pytest.approx(norms.max().item())


def test_same_generator_same_solution() -> None:
    operator, rhs = system(), right_hand_sides()
    first, again, other = (
        SOLVER.solve(operator, rhs, generator=torch.Generator().manual_seed(seed)).value for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)

"""Stochastic gradient descent: the contract, the naive iterates, and its step size."""

import dataclasses

import pytest
import torch

from gpy_iterative.solvers import Iterate, SolveInputs, SolveStatus, StochasticGradientDescent
from tests import oracles
from tests.linear_solvers.contract import DescentContract, N, right_hand_sides, system, true_norms

SOLVER = StochasticGradientDescent(batch_size=20, max_epochs=20_000)


class TestStochasticGradientDescent(DescentContract):
    solver = SOLVER
    too_large = 60.0
    smallest_noise = 0.04
    share = 20 / N

    def stable_limit(self, largest: float) -> float:
        return min(2 * 1.9 * N / largest, 2 * 0.1 * 25 / 1.2)


def test_iterates_are_the_naive_ones() -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, batch_size=25, learning_rate=3.0)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = solver.init(operator, iterate, SolveInputs(generator=torch.Generator().manual_seed(1)))
    orders = []
    for steps in range(1, 13):
        state = solver.step(operator, iterate, state)
        if steps % 4 == 1:  # four batches of 25; the 20 rows that are left wait for the next permutation
            orders.append(state.order)
        batches = [rows for order in orders for rows in order[:100].split(25)][:steps]
        expected = oracles.stochastic_gradient_descent(operator.to_dense(), rhs, batches, 3.0, 0.9)
        torch.testing.assert_close(iterate.value, expected)
    assert not torch.equal(orders[0], orders[1])
    assert all(torch.equal(order.sort().values, torch.arange(N)) for order in orders)


@pytest.mark.parametrize("learning_rate", [1.0, 5.0, 10.0, 20.0, 30.0])
def test_nothing_counts_before_its_true_residual_is_known(learning_rate: float) -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, learning_rate=learning_rate, max_epochs=10)
    solution = solver.solve(operator, rhs, initial_guess=0.5 * torch.linalg.solve(operator.to_dense(), rhs))
    norms = true_norms(operator, rhs, solution.value)
    assert norms.max() <= 0.5 + 1e-12
    assert solution.stats.residual_norms["targets"] == pytest.approx(norms.max().item())


@pytest.mark.parametrize(("batch_size", "divisor"), [(17, 20), (59, 60), (119, 120)])  # one row would be left, or two
def test_rows_that_fill_no_batch_do_no_harm(batch_size: int, divisor: int) -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, batch_size=batch_size, max_epochs=1000)
    even = dataclasses.replace(solver, batch_size=divisor).solve(operator, rhs)
    solution = solver.solve(operator, rhs)
    assert solution.status is even.status is SolveStatus.CONVERGED
    assert solution.stats.epochs < 1.5 * even.stats.epochs

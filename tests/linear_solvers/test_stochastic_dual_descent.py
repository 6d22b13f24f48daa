"""Stochastic dual descent: the contract, the paper's iterates, and its step size."""

import dataclasses

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from gpy_iterative.linear_solvers import columns, stochastic_descent
from gpy_iterative.solvers import Iterate, SolveInputs, SolveStatus, StochasticDualDescent
from gpy_iterative.worker_threads import ByDevice
from tests import oracles
from tests.linear_solvers.contract import DescentContract, N, right_hand_sides, system

SOLVER = StochasticDualDescent(batch_size=20, max_epochs=20_000)


class TestStochasticDualDescent(DescentContract):
    solver = SOLVER
    too_large = 100.0
    smallest_noise = 0.01
    share = 20 / N

    def stable_limit(self, largest: float) -> float:
        return min(3.8 / 2.8 * N / largest, 2 * 0.1 * 25 / 1.2)


def test_iterates_are_the_naive_ones() -> None:
    operator, rhs = system(), right_hand_sides()
    solver = dataclasses.replace(SOLVER, batch_size=25, learning_rate=3.0)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = solver.init(operator, iterate, SolveInputs(generator=torch.Generator().manual_seed(1)))
    twin, batches = torch.Generator().manual_seed(1), []
    for _ in range(12):
        state = solver.step(operator, iterate, state)
        batches.append(torch.randperm(N, generator=twin)[:25])
        expected = oracles.stochastic_dual_descent(operator.to_dense(), rhs, batches, 3.0, 0.9, 0.1)
        torch.testing.assert_close(iterate.value, expected)
        torch.testing.assert_close(iterate.residual, rhs - operator.to_dense() @ expected)


def test_momentum_pays() -> None:
    operator, rhs = system(0.01), right_hand_sides()
    plain = dataclasses.replace(SOLVER, momentum=0.0, learning_rate=2.0).solve(operator, rhs)
    assert SOLVER.solve(operator, rhs).stats.epochs < plain.stats.epochs


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"momentum": 1.0}, {"learning_rate": 0.0}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        StochasticDualDescent(**options)


def test_divergence_is_said_where_norms_are_seldom_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: residuals grow once more before the loop looks."""
    for module in (columns, stochastic_descent):
        monkeypatch.setattr(module, "READS_EVERY", ByDevice(cpu=4, accelerator=4))
    root = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double()
    operator = DenseLinearOperator(root @ root.mT / 64 + torch.eye(64).double())
    solver = StochasticDualDescent(batch_size=64, learning_rate=6e4, max_epochs=3000)
    solution = solver.solve(operator, right_hand_sides(64))
    assert solution.status is SolveStatus.DIVERGED
    assert solution.stats.iterations <= 12

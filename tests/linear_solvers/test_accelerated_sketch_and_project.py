"""Accelerated sketch-and-project: the contract, the naive iterates, and what becomes of acceleration."""

import dataclasses
from typing import Any

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.solvers import AcceleratedSketchAndProject, Iterate, SolveInputs, SolveStatus
from tests import oracles
from tests.linear_solvers.contract import N, RandomSolverContract, right_hand_sides, system, true_norms

SOLVER = AcceleratedSketchAndProject(block_size=20, max_epochs=5000)


class TestExactBlocks(RandomSolverContract):
    solver = SOLVER
    share = 20 / N


class TestApproximateBlocks(RandomSolverContract):
    solver = dataclasses.replace(SOLVER, rank=8)
    share = 20 / N


def test_iterates_are_the_naive_ones() -> None:
    operator, rhs = system(), right_hand_sides()
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = SOLVER.init(operator, iterate, SolveInputs(generator=torch.Generator().manual_seed(1)))
    twin, blocks = torch.Generator().manual_seed(1), []
    for _ in range(12):
        state = SOLVER.step(operator, iterate, state)
        blocks.append(torch.randperm(N, generator=twin)[:20])
        expected = oracles.sketch_and_project(operator.to_dense(), rhs, blocks, 20 / N / 3)
        torch.testing.assert_close(iterate.value, expected)
        torch.testing.assert_close(iterate.residual, rhs - operator.to_dense() @ expected)


def test_one_block_takes_one_iteration() -> None:
    solution = AcceleratedSketchAndProject(block_size=500, tolerance=1e-8).solve(system(), right_hand_sides())
    assert solution.stats.iterations == solution.stats.epochs == 1


def test_acceleration_pays_where_the_system_is_ill_conditioned() -> None:
    x, _, y = oracles.problem(N)
    kernel = RadialKernelLinearOperator(x / 3, torch.tensor(1.0).double(), function=MATERN32)
    operator, rhs = NoisyLinearOperator(kernel, torch.full((N,), 0.0001).double()), y.unsqueeze(-1)
    norms = []
    for accelerated in (True, False):
        iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
        state = SOLVER.init(operator, iterate, SolveInputs(generator=torch.Generator().manual_seed(2)))
        state = state if accelerated else dataclasses.replace(state, is_accelerated=False)
        for _ in range(400):
            state = SOLVER.step(operator, iterate, state)
        norms.append(float(true_norms(operator, rhs, iterate.value)))
    assert norms[0] < 0.5 * norms[1]


def test_without_acceleration_the_error_falls_with_every_block() -> None:
    operator, rhs = system(), right_hand_sides()
    exact = torch.linalg.solve(operator.to_dense(), rhs)
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = SOLVER._give_up(iterate, SOLVER.init(operator, iterate, SolveInputs()))
    assert not state.has_diverged
    last = (exact * rhs).sum(0)
    for _ in range(30):
        state = SOLVER.step(operator, iterate, state)
        error = exact - iterate.value
        energy = (error * (operator.to_dense() @ error)).sum(0)
        assert (energy < last).all()
        last = energy


def without_leave_to_grow(state: Any) -> Any:
    return dataclasses.replace(state, way_back=dataclasses.replace(state.way_back, limit=torch.zeros(6).double()))


def test_what_diverges_goes_on_without_acceleration_and_then_says_so() -> None:
    operator, rhs = system(), right_hand_sides()
    iterate = Iterate(torch.zeros_like(rhs), rhs.clone(), rhs)
    state = SOLVER.init(operator, iterate, SolveInputs())
    state = SOLVER.step(operator, iterate, without_leave_to_grow(state))
    assert not state.is_accelerated
    assert not state.has_diverged
    assert torch.equal(iterate.value, torch.zeros_like(rhs))
    torch.testing.assert_close(iterate.residual, rhs)
    state = SOLVER.step(operator, iterate, without_leave_to_grow(state))
    assert state.has_diverged


def test_indefinite_blocks_are_reported() -> None:
    operator = NoisyLinearOperator(DenseLinearOperator(-torch.eye(6).double()), torch.zeros(6).double())
    solution = SOLVER.solve(operator, torch.ones(6).double())
    assert solution.status is SolveStatus.INDEFINITE
    assert torch.isfinite(solution.value).all()


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": 2.5}, {"rank": 0}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AcceleratedSketchAndProject(**options)

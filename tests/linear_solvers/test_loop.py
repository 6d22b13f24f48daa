"""The shared loop: options, shapes, and residuals that are not what they seem."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32, RBF
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_solvers import columns
from gpy_iterative.solvers import (
    AcceleratedSketchAndProject,
    AlternatingProjections,
    Cholesky,
    ColumnGroup,
    ConjugateGradients,
    Iterate,
    IterativeSolver,
    SolveInputs,
    Solver,
    SolverState,
    SolveStatus,
    StochasticDualDescent,
    StochasticGradientDescent,
)
from tests.linear_operators.radial.test_operator import inputs
from tests.linear_solvers.contract import GROUPS, N, right_hand_sides, system, true_norms


@pytest.mark.parametrize(
    ("solver_class", "options"),
    [
        (ConjugateGradients, {"tolerance": 0.0}),
        (ConjugateGradients, {"tolerance": 1.5}),
        (ConjugateGradients, {"tolerance": float("nan")}),
        (ConjugateGradients, {"max_epochs": 0}),
        (ConjugateGradients, {"stopping": "never"}),
        (AlternatingProjections, {"block_size": 0}),
        (AlternatingProjections, {"probe_tolerance": -0.1}),
        (StochasticGradientDescent, {"batch_size": 0}),
        (StochasticGradientDescent, {"momentum": 1.0}),
        (StochasticGradientDescent, {"learning_rate": -1.0}),
    ],
)
def test_options_outside_their_range(solver_class: type[Solver], options: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*{next(iter(options.values()))}"):
        solver_class(**options)


def test_what_does_not_fit_is_refused_before_any_work() -> None:
    operator, rhs = system(), right_hand_sides()
    solver = ConjugateGradients()
    with pytest.raises(ValueError, match="does not fit"):
        solver.solve(operator, rhs[:-1])
    with pytest.raises(ValueError, match="add up"):
        solver.solve(operator, rhs, groups=(ColumnGroup("targets", 1, 0.1),))
    with pytest.raises(ValueError, match="initial_guess must"):
        solver.solve(operator, rhs, initial_guess=rhs[:, :1])
    with pytest.raises(ValueError, match=r"float32.*float64"):
        solver.solve(operator, rhs.float())
    with pytest.raises(ValueError, match="square"):
        solver.solve(operator[:5, :], rhs[:5])


def test_no_autograd_graph_is_kept() -> None:
    operator, rhs = system(), right_hand_sides().requires_grad_()
    solution = ConjugateGradients().solve(operator, rhs)
    assert not solution.value.requires_grad
    assert not solution.residual.requires_grad


def test_a_guess_is_scaled_to_its_best() -> None:
    operator, rhs = system(), right_hand_sides()
    exact = torch.linalg.solve(operator.to_dense(), rhs)
    solution = ConjugateGradients().solve(operator, rhs, initial_guess=exact * torch.tensor([1e-3, -2, 5, 1, 7, 0.1]))
    assert solution.stats.iterations == 0
    torch.testing.assert_close(solution.value, exact)


def test_columns_that_are_done_leave_the_block() -> None:
    widths = []

    class Watching(ConjugateGradients):
        def step(self, operator: LinearOperator, iterate: Iterate, state: Any) -> Any:
            widths.append(iterate.value.shape[1])
            return super().step(operator, iterate, state)

    Watching().solve(system(), right_hand_sides(), groups=GROUPS)
    assert widths[0] == 6
    assert widths[-1] < 6
    assert widths == sorted(widths, reverse=True)


@dataclass(frozen=True, kw_only=True)
class Optimist(IterativeSolver[SolverState]):
    """Richardson's iteration on a well conditioned system, telling a residual that is smaller than the true one."""

    told: float = 0.5
    length: float = 0.05

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> SolverState:
        return SolverState()

    def restart(self, iterate: Iterate, state: SolverState) -> SolverState:
        return state

    def step(self, operator: LinearOperator, iterate: Iterate, state: SolverState) -> SolverState:
        residual = iterate.rhs - operator._matmul(iterate.value)
        iterate.value = iterate.value + self.length * residual
        iterate.residual = self.told * (iterate.rhs - operator._matmul(iterate.value))
        return state

    def narrow(self, state: SolverState, columns: Tensor) -> SolverState:
        return state


@dataclass(frozen=True, kw_only=True)
class Estimating(Optimist):
    recursive: ClassVar[bool] = False


@pytest.mark.parametrize("solver_class", [Optimist, Estimating])
def test_rounds_go_on_until_the_true_residual_holds(solver_class: type[Optimist]) -> None:
    operator, rhs = system(1.0, size=20), right_hand_sides(20)
    solution = solver_class().solve(operator, rhs)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(operator, rhs, solution.value).max() <= 0.01
    assert solution.stats.overhead >= 2


def test_a_round_without_progress_is_stagnation() -> None:
    operator, rhs = system(1.0, size=20), right_hand_sides(20)
    solution = Optimist(told=0.0, length=1e-6).solve(operator, rhs)
    assert solution.status is SolveStatus.STAGNATED
    assert solution.stats.iterations <= 2
    torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)


def test_a_round_that_ends_worse_than_it_began_is_undone() -> None:
    operator, rhs = system(1.0, size=20), right_hand_sides(20)
    guess = (1 - 1e-3) * torch.linalg.solve(operator.to_dense(), rhs) + 0.01
    solution = Optimist(told=0.0, length=10.0).solve(operator, rhs, initial_guess=guess)
    assert solution.status is SolveStatus.STAGNATED
    assert (true_norms(operator, rhs, solution.value) <= true_norms(operator, rhs, guess)).all()
    torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)


@pytest.mark.parametrize(
    "solver", [AlternatingProjections(max_epochs=30, fallback=None), ConjugateGradients(max_epochs=30)], ids=str
)
def test_systems_beyond_the_precision_end_with_a_status(solver: IterativeSolver) -> None:
    x = torch.rand(1500, 2, generator=torch.Generator().manual_seed(1))
    rhs = torch.sin(6 * x[:, :1]) + 0.3 * torch.randn(1500, 1, generator=torch.Generator().manual_seed(2))
    kernel = RadialKernelLinearOperator(x / 0.3, torch.tensor(1.0), function=RBF)
    operator = NoisyLinearOperator(kernel, torch.full((1500,), 1e-6))
    cold = solver.solve(operator, rhs)
    assert cold.status is not SolveStatus.CONVERGED
    assert cold.stats.residual_norms["targets"] <= 1
    # A good guess, whose energy is rounding.
    guess = torch.linalg.solve(kernel.to_dense().double() + 1e-4 * torch.eye(1500), rhs.double()).float()
    residual = (rhs - operator @ guess).norm() / rhs.norm()
    assert residual < 0.5
    found = solver.solve(operator, rhs, initial_guess=guess)
    assert found.stats.residual_norms["targets"] <= 1.01 * residual


@pytest.mark.parametrize(
    ("solver", "setup"),
    [
        (ConjugateGradients(preconditioner=None), 0.0),
        (AlternatingProjections(block_size=20, fallback=None), 20 / N),
    ],
)
def test_residuals_of_large_systems_are_verified_on_some_rows(
    solver: IterativeSolver, setup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "VERIFIED_ROWS", 12)
    operator, rhs = system(), right_hand_sides()
    solution = solver.solve(operator, rhs)
    assert true_norms(operator, rhs, solution.value).max() <= 0.01 * (1 + 1e-8)
    torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)
    assert solution.stats.overhead == pytest.approx(setup + 12 / N)


def test_residuals_that_have_drifted_are_found_on_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "VERIFIED_ROWS", 5)
    operator, rhs = system(1.0, size=20), right_hand_sides(20)
    solution = Optimist().solve(operator, rhs)
    assert solution.status is SolveStatus.CONVERGED
    assert true_norms(operator, rhs, solution.value).max() <= 0.01


@pytest.mark.parametrize("solver", [ConjugateGradients(), Cholesky()], ids=lambda solver: type(solver).__name__)
def test_inference_mode_keeps_tiles_and_autograd_stays_out(solver: Solver) -> None:
    x, evaluations = inputs(40, 2).double(), []
    kernel = RadialKernelLinearOperator(x, torch.tensor(1.0).double(), function=MATERN32)
    rhs = torch.linspace(-1, 1, 40).double().requires_grad_()
    evaluate = RadialTiles.evaluate

    def counted(tiles: RadialTiles, *arguments: Any) -> Tensor:
        evaluations.append(arguments)
        return evaluate(tiles, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RadialTiles, "evaluate", counted)
        with torch.inference_mode():
            solution = solver.solve(NoisyLinearOperator(kernel, torch.full((40,), 0.1).double()), rhs)
    assert len(evaluations) == 1
    assert not solution.value.is_inference()
    value = solver.solve(NoisyLinearOperator(kernel, torch.full((40,), 0.1).double()), rhs).value
    assert not value.requires_grad
    torch.testing.assert_close(solution.value, value)


def test_right_hand_sides_whose_squares_vanish_in_float32() -> None:
    operator, rhs = system(), right_hand_sides().float()[:, :1]
    operator = DenseLinearOperator(operator.to_dense().float())
    whole = ConjugateGradients().solve(operator, rhs).value
    found = ConjugateGradients().solve(operator, rhs * 1e-28).value * 1e28
    assert torch.linalg.vector_norm(found - whole) < 1e-3 * torch.linalg.vector_norm(whole)


@pytest.mark.parametrize(
    "solver",
    [StochasticGradientDescent(batch_size=20), StochasticDualDescent(batch_size=20), AcceleratedSketchAndProject()],
)
def test_a_zero_column_does_not_grow(solver: IterativeSolver) -> None:
    operator, rhs = system(), right_hand_sides()[:, :2]
    solver = replace(solver, stopping="mean")
    alone = solver.solve(operator, rhs)
    beside = solver.solve(operator, torch.cat([rhs, torch.zeros_like(rhs)], dim=-1))
    assert alone.status is beside.status is SolveStatus.CONVERGED
    assert (beside.value[:, 2:] == 0).all()
    assert beside.stats.iterations <= alone.stats.iterations

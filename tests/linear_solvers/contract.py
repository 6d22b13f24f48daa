"""What every iterative solver must do: subclass `SolverContract` and give `solver`."""

import dataclasses

import pytest
import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator, ToeplitzLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.products import Precision
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_solvers.stochastic_descent import StochasticDescent
from gpy_iterative.solvers import ColumnGroup, Iterate, IterativeSolver, SolveInputs, SolveStatus
from tests import oracles

N = 120
GROUPS = (ColumnGroup("targets", 1, 0.01), ColumnGroup("probes", 5, 0.2))


def system(
    noise: float = 0.04, *, size: int = N, dtype: torch.dtype = torch.float64, precision: Precision = "native"
) -> NoisyLinearOperator:
    """H [n, n], in several tiles."""
    x, _, _ = oracles.problem(size)
    products = KernelProducts(tile_size=32, precision=precision)
    kernel = RadialKernelLinearOperator(
        x.to(dtype), torch.tensor(1.44, dtype=dtype), function=MATERN32, products=products
    )
    return NoisyLinearOperator(kernel, torch.full((size,), noise, dtype=dtype))


def right_hand_sides(size: int = N) -> Tensor:
    """[n, 6]: targets and signs."""
    signs = torch.sign(torch.sin(torch.outer(torch.arange(1, size + 1), torch.arange(1, 6)).double() * 1.234567 + 0.5))
    return torch.cat([oracles.problem(size)[2].unsqueeze(-1), signs], dim=-1)


def true_norms(operator: LinearOperator, rhs: Tensor, value: Tensor) -> Tensor:
    """Relative residuals of all columns, in float64."""
    rhs = rhs.double()
    residual = rhs - operator.to_dense().double() @ value.double()
    return torch.linalg.vector_norm(residual, dim=-2) / torch.linalg.vector_norm(rhs, dim=-2)


class SolverContract:
    """The conformance suite.

    Attributes:
        solver: with a budget that lets it converge on these systems.
        smallest_noise: variance of the hardest system that it has to converge on.
        share: epochs of one step at n = 120; None where steps differ.
        budgets: whole numbers of steps.
        precision: of the iterations' products, where the data's dtype allows it.
    """

    solver: IterativeSolver
    smallest_noise = 0.0025
    share: float | None = 1.0
    budgets = (1.0, 3.0, 5.0)
    precision: Precision = "native"

    def system(self, noise: float = 0.04, *, dtype: torch.dtype = torch.float64) -> NoisyLinearOperator:
        precision = "native" if (self.precision, dtype) == ("float32", torch.float32) else self.precision
        return system(noise, dtype=dtype, precision=precision)

    def assert_solved(self, operator: LinearOperator, rhs: Tensor, value: Tensor, slack: float = 1e-8) -> None:
        assert true_norms(operator, rhs, value).max() <= self.solver.tolerance * (1 + slack)

    def test_true_residual_is_within_the_tolerance(self) -> None:
        operator, rhs = self.system(self.smallest_noise), right_hand_sides()
        solution = self.solver.solve(operator, rhs)
        assert solution.status is SolveStatus.CONVERGED
        norms = true_norms(operator, rhs, solution.value)
        assert norms.max() <= self.solver.tolerance * (1 + 1e-8)
        assert solution.stats.residual_norms["targets"] == pytest.approx(norms.max().item(), rel=1e-6)
        torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)
        if self.share is not None:
            assert solution.stats.epochs == pytest.approx(solution.stats.iterations * self.share)

    def test_float32(self) -> None:
        operator, rhs = self.system(0.04, dtype=torch.float32), right_hand_sides().float()
        solution = self.solver.solve(operator, rhs)
        assert solution.value.dtype == torch.float32
        assert solution.status is SolveStatus.CONVERGED
        self.assert_solved(operator, rhs, solution.value, slack=1e-2)

    def test_input_is_left_alone(self) -> None:
        operator, rhs = self.system(), right_hand_sides()
        guess = 0.1 * rhs
        before = rhs.clone(), guess.clone()
        self.solver.solve(operator, rhs, initial_guess=guess)
        assert torch.equal(rhs, before[0])
        assert torch.equal(guess, before[1])

    def test_groups_have_their_own_tolerance(self) -> None:
        operator, rhs = self.system(), right_hand_sides()
        solution = self.solver.solve(operator, rhs, groups=GROUPS)
        norms = true_norms(operator, rhs, solution.value)
        assert norms[0] <= 0.01 * (1 + 1e-8)
        assert norms[1:].max() <= 0.2 * (1 + 1e-8)
        assert norms[1:].max() > 0.01  # they left the block when they were done
        assert set(solution.stats.residual_norms) == {"targets", "probes"}

    def test_mean_rule_runs_all_columns_together(self) -> None:
        operator, rhs = self.system(), right_hand_sides()
        groups = (ColumnGroup("targets", 1, 0.01), ColumnGroup("probes", 5, 0.05))
        solution = dataclasses.replace(self.solver, stopping="mean").solve(operator, rhs, groups=groups)
        norms = true_norms(operator, rhs, solution.value)
        assert norms[0] <= 0.01 * (1 + 1e-8)
        assert norms[1:].mean() <= 0.05 * (1 + 1e-8)
        assert solution.stats.residual_norms["probes"] == pytest.approx(norms[1:].mean().item(), rel=1e-6)

    def test_exact_start_takes_no_iteration(self) -> None:
        operator, rhs = self.system(), right_hand_sides()
        exact = torch.linalg.solve(operator.to_dense(), rhs)
        solution = self.solver.solve(operator, rhs, initial_guess=exact)
        assert solution.stats.iterations == 0
        assert solution.stats.overhead == 1
        torch.testing.assert_close(solution.value, exact)

    @pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
    def test_bad_start_is_slow_and_right(self, size: float) -> None:
        operator, rhs = self.system(), right_hand_sides()
        garbage = size * torch.cos(torch.arange(N * 6).double()).reshape(N, 6)
        solution = self.solver.solve(operator, rhs, initial_guess=garbage)
        assert solution.status is SolveStatus.CONVERGED
        self.assert_solved(operator, rhs, solution.value)

    @pytest.mark.parametrize("stopping", ["columns", "mean"])
    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("noise", [1e-6, 1e-2])
    def test_budget_never_returns_worse_than_zero(self, stopping: str, warm: bool, noise: float) -> None:
        operator, rhs = self.system(noise), right_hand_sides()
        guess = right_hand_sides().flip(0) if warm else None
        budget = dataclasses.replace(self.solver, max_epochs=3, tolerance=1e-8, stopping=stopping)
        solution = budget.solve(operator, rhs, initial_guess=guess)
        assert solution.status is SolveStatus.BUDGET_EXHAUSTED
        assert solution.stats.epochs <= 3
        assert "budget" in solution.status.advice
        assert true_norms(operator, rhs, solution.value).max() <= 1 + 1e-12
        torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)

    def test_budget_of_whole_steps_is_used_up(self) -> None:
        # Sums of fractions fall on either side of them.
        for budget in self.budgets:
            solver = dataclasses.replace(self.solver, max_epochs=budget, tolerance=1e-12)
            assert solver.solve(self.system(1e-4), right_hand_sides()).stats.epochs == pytest.approx(budget)

    def test_duplicate_rows(self) -> None:
        x, _, y = oracles.problem(N)
        x[1::2] = x[::2]
        kernel = RadialKernelLinearOperator(x, torch.tensor(1.0).double(), function=MATERN32)
        operator = NoisyLinearOperator(kernel, torch.full((N,), 0.04).double())
        solution = self.solver.solve(operator, y)
        assert solution.status is SolveStatus.CONVERGED
        assert solution.value.shape == solution.residual.shape == (N,)

    def test_zero_columns_stay_zero(self) -> None:
        operator, rhs = self.system(), right_hand_sides()
        rhs[:, 2] = 0
        for guess in (None, torch.ones_like(rhs)):
            solution = self.solver.solve(operator, rhs, initial_guess=guess)
            assert (solution.value[:, 2] == 0).all()
            assert solution.status is SolveStatus.CONVERGED

    def test_columns_of_very_different_scale(self) -> None:
        operator, rhs = self.system(), right_hand_sides() * 10.0 ** torch.arange(-9, 9, 3)
        self.assert_solved(operator, rhs, self.solver.solve(operator, rhs).value)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("where", ["rhs", "guess"])
    def test_non_finite_input_raises_at_once(self, bad: float, where: str) -> None:
        operator, rhs = self.system(), right_hand_sides()
        guess = torch.ones_like(rhs)
        (rhs if where == "rhs" else guess)[3, 4] = bad
        with pytest.raises(NonFiniteError, match=r"column 4[\s\S]*0 iterations"):
            self.solver.solve(operator, rhs, initial_guess=guess)

    def test_non_finite_matrix_raises(self) -> None:
        _, matrix, y = oracles.problem(N)
        matrix[5, 7] = matrix[7, 5] = torch.nan
        operator = NoisyLinearOperator(DenseLinearOperator(matrix), torch.full((N,), 0.1).double())
        with pytest.raises(NonFiniteError):
            self.solver.solve(operator, y)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_batch_members_are_solved_one_by_one(self, dtype: torch.dtype) -> None:
        x, _, y = oracles.problem(60)
        kernel = RadialKernelLinearOperator(
            torch.stack([x, 0.5 * x]).to(dtype), torch.tensor([1.0, 2.0], dtype=dtype), function=MATERN32
        )
        operator = NoisyLinearOperator(kernel, torch.full((2, 60), 0.1, dtype=dtype))
        rhs = torch.stack([y, y.flip(0)]).to(dtype)
        solution = self.solver.solve(operator, rhs, initial_guess=0.1 * rhs)
        assert solution.value.shape == rhs.shape
        assert solution.value.dtype == dtype
        self.assert_solved(operator, rhs.unsqueeze(-1), solution.value.unsqueeze(-1), slack=1e-2)

    @pytest.mark.parametrize("name", ["kronecker", "toeplitz", "dense", "sum", "two batch dimensions"])
    def test_any_positive_definite_operator(self, name: str) -> None:
        small = torch.exp(-(torch.arange(6)[:, None] - torch.arange(6)[None]).abs().double())
        dense = DenseLinearOperator(torch.kron(small, small))
        toeplitz = ToeplitzLinearOperator(torch.exp(-0.5 * torch.arange(36).double()))
        operator = {
            "kronecker": KroneckerProductLinearOperator(DenseLinearOperator(small), DenseLinearOperator(small)),
            "toeplitz": toeplitz,
            "dense": dense,
            "sum": dense + toeplitz,
            "two batch dimensions": DenseLinearOperator(torch.kron(small, small).expand(2, 1, 36, 36)),
        }[name].add_jitter(0.5)
        rhs = torch.cos(torch.arange(36).double()).expand(operator.shape[:-1]).unsqueeze(-1).contiguous()
        self.assert_solved(operator, rhs, self.solver.solve(operator, rhs).value)

    def test_one_row(self) -> None:
        operator = DenseLinearOperator(torch.tensor([[4.0]]).double())
        assert self.solver.solve(operator, torch.tensor([2.0]).double()).value.item() == pytest.approx(0.5, rel=0.011)

    def test_progress_is_told(self) -> None:
        told = []
        solution = self.solver.solve(self.system(), right_hand_sides(), groups=GROUPS, callback=told.append)
        assert [progress.iteration for progress in told] == list(range(1, solution.stats.iterations + 1))
        assert told[-1].epochs == pytest.approx(solution.stats.epochs)
        assert told[-1].residual_norms["probes"] <= 0.2


class RandomSolverContract(SolverContract):
    """What a solver that draws its rows must do besides."""

    def test_same_generator_same_solution(self) -> None:
        operator, rhs = self.system(), right_hand_sides()
        first, again, other = (
            self.solver.solve(operator, rhs, generator=torch.Generator().manual_seed(seed)).value for seed in (3, 3, 4)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


class DescentContract(RandomSolverContract):
    """What a solver with a step size must do besides: subclasses say which are too large, and from where on all are."""

    solver: StochasticDescent
    too_large: float

    def stable_limit(self, largest: float) -> float:
        """The largest learning rate that is stable, for the largest eigenvalue of N rows in batches of 25."""
        raise NotImplementedError

    @pytest.mark.parametrize("lengthscale", [0.1, 0.3, 1.0, 3.0])
    def test_step_size_is_stable(self, lengthscale: float) -> None:
        x, _, y = oracles.problem(N)
        kernel = RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).double(), function=MATERN32)
        operator = NoisyLinearOperator(kernel, torch.full((N,), 0.2).double())
        solver = type(self.solver)(batch_size=25, max_epochs=5000)
        iterate = Iterate(torch.zeros(N, 1).double(), y.unsqueeze(-1), y.unsqueeze(-1))
        rate = solver.init(operator, iterate, SolveInputs()).learning_rate
        limit = self.stable_limit(torch.linalg.eigvalsh(operator.to_dense())[-1].item())
        assert 0.4 * limit <= rate <= 0.8 * limit
        assert solver.solve(operator, y).status is SolveStatus.CONVERGED
        # Not a step size that only recovered from being too large.
        given = dataclasses.replace(solver, learning_rate=rate).solve(operator, y)
        assert given.status is SolveStatus.CONVERGED
        assert given.stats.overhead < 2

    def test_recovers_from_a_step_size_that_is_too_large(self) -> None:
        solver = dataclasses.replace(self.solver, learning_rate=self.too_large)
        assert solver.solve(system(), right_hand_sides()).status is SolveStatus.CONVERGED

    def test_says_when_it_diverges(self) -> None:
        operator, rhs = system(), right_hand_sides()
        solution = dataclasses.replace(self.solver, learning_rate=1e6).solve(operator, rhs)
        assert solution.status is SolveStatus.DIVERGED
        assert "learning_rate" in solution.status.advice
        assert true_norms(operator, rhs, solution.value).max() <= 1 + 1e-12

"""Residuals that are also small in the norm of a preconditioner's inverse."""

import pytest
import torch
from gpytorch import kernels
from linear_operator import to_linear_operator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.linear_solvers.base import MAX_IN_NORM
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.solution import Solution, SolveStatus
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal

TOLERANCE = 0.01


def trend(n: int = 80) -> tuple[NoisyLinearOperator, Tensor, LowRankPlusDiagonal]:
    """A kernel with a large constant, a right-hand side that is nearly constant, and the constant's preconditioner."""
    x = torch.linspace(0, 4, n, dtype=torch.float64)
    kernel = kernels.RBFKernel().double()(x).to_dense().detach() + 1e6
    noise = torch.full((n,), 0.1, dtype=torch.float64)
    known = LowRankPlusDiagonal(torch.full((n, 1), 1e3, dtype=torch.float64), noise + 1)
    return NoisyLinearOperator(to_linear_operator(kernel), noise), (1000 + torch.sin(3 * x)).unsqueeze(-1), known


def in_norm(vectors: Tensor, known: LowRankPlusDiagonal) -> float:
    return float((vectors * known.solve(vectors)).sum()) ** 0.5


def solved(max_epochs: float = 1000, *, in_both: bool) -> tuple[Solution, float]:
    operator, rhs, known = trend()
    solver = ConjugateGradients(tolerance=TOLERANCE, max_epochs=max_epochs, preconditioner=None)
    found = solver.solve(operator, rhs, norm=known if in_both else None)
    return found, in_norm(found.residual, known) / in_norm(rhs, known)


def test_a_solve_goes_on_until_both_norms_are_small() -> None:
    plain, before = solved(in_both=False)
    found, after = solved(in_both=True)
    assert plain.status is found.status is SolveStatus.CONVERGED
    assert before > MAX_IN_NORM * TOLERANCE >= after
    assert found.stats.epochs > plain.stats.epochs
    assert found.stats.residual_norms["targets"] < plain.stats.residual_norms["targets"]


def test_it_keeps_to_the_budget() -> None:
    epochs = solved(in_both=False)[0].stats.epochs
    for budget in (epochs, epochs + 1):
        found, _ = solved(budget, in_both=True)
        assert found.status is SolveStatus.BUDGET_EXHAUSTED
        assert found.stats.epochs == pytest.approx(budget)

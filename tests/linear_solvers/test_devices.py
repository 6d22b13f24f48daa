"""Solvers on an accelerator: the same solutions, and how often the host waits for it."""

import dataclasses

import pytest
import torch

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.products import Precision
from gpy_iterative.linear_solvers.logdet.lanczos import LogDeterminantQuadrature
from gpy_iterative.preconditioners import Nystrom, PivotedCholesky, RandomlyPivotedCholesky, Vecchia
from gpy_iterative.solvers import (
    AcceleratedSketchAndProject,
    AlternatingProjections,
    Cholesky,
    ConjugateGradients,
    IterativeSolver,
    SolveProgress,
    Solver,
    SolveStatus,
    StochasticDualDescent,
    StochasticGradientDescent,
)
from tests.linear_solvers.contract import GROUPS, right_hand_sides, system, true_norms
from tests.simulated_device import DEVICE, SimulatedDevice

SOLVERS = [
    ConjugateGradients(preconditioner=None),
    ConjugateGradients(preconditioner=PivotedCholesky(rank=20)),
    ConjugateGradients(preconditioner=RandomlyPivotedCholesky(rank=20)),
    ConjugateGradients(preconditioner=Nystrom(rank=20)),
    ConjugateGradients(preconditioner=Vecchia(10)),
    AlternatingProjections(block_size=10, fallback=None),
    AlternatingProjections(block_size=10),
    StochasticGradientDescent(batch_size=30),
    StochasticDualDescent(batch_size=30),
    AcceleratedSketchAndProject(block_size=20),
]


def on(device: torch.device, operator: NoisyLinearOperator) -> NoisyLinearOperator:
    kernel = operator.kernel
    moved = RadialKernelLinearOperator(
        kernel.x1.to(device), kernel.outputscale.to(device), function=kernel.function, products=kernel.products
    )
    return NoisyLinearOperator(moved, operator.noise.to(device))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "precision"),
    [(solver, "native") for solver in SOLVERS]
    + [(solver, "float32") for solver in (SOLVERS[1], SOLVERS[4], SOLVERS[6], SOLVERS[9])],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_every_promise_is_kept(solver: IterativeSolver, precision: Precision, device: torch.device) -> None:
    operator, rhs = system(0.1, precision=precision), right_hand_sides()
    solution = solver.solve(on(device, operator), rhs.to(device), groups=GROUPS, initial_guess=0.1 * rhs.to(device))
    assert solution.value.device.type == device.type
    assert solution.status is SolveStatus.CONVERGED
    norms = true_norms(operator, rhs, solution.value.cpu())
    assert norms[0] <= 0.01 * (1 + 1e-8)
    assert norms[1:].max() <= 0.2 * (1 + 1e-8)
    torch.testing.assert_close(solution.residual.cpu(), rhs - operator.to_dense() @ solution.value.cpu())


def test_budgets_end_between_two_readings(device: torch.device) -> None:
    operator, rhs = system(0.01), right_hand_sides()
    solver = ConjugateGradients(preconditioner=None, max_epochs=6, tolerance=1e-8)
    solution = solver.solve(on(device, operator), rhs.to(device))
    assert solution.status is SolveStatus.BUDGET_EXHAUSTED
    assert solution.stats.iterations == 6
    norms = true_norms(operator, rhs, solution.value.cpu())
    assert solution.stats.residual_norms["targets"] == pytest.approx(norms.max().item(), rel=1e-6)
    on_host = true_norms(operator, rhs, solver.solve(operator, rhs).value)
    torch.testing.assert_close(norms, on_host, rtol=0.2, atol=0)  # the best iterate may be another one


@pytest.mark.parametrize("solver", [Cholesky()], ids=["Cholesky"])
def test_exact_solutions(solver: Solver, device: torch.device) -> None:
    operator, rhs = system(0.1), right_hand_sides()
    solution = solver.solve(on(device, operator), rhs.to(device))
    torch.testing.assert_close(solution.value.cpu(), torch.linalg.solve(operator.to_dense(), rhs))


def test_log_determinants(device: torch.device) -> None:
    def estimate(operator: NoisyLinearOperator) -> torch.Tensor:
        factor = PivotedCholesky(rank=20).build(operator)
        base = right_hand_sides()[:, 1:].to(operator.device)
        probes, _ = factor.sample(torch.cat([base[:20], base]))
        return LogDeterminantQuadrature(operator, probes, factor).finished().mean.cpu()

    torch.testing.assert_close(estimate(on(device, system(0.1))), estimate(system(0.1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "per_iteration"),
    [
        (ConjugateGradients(preconditioner=None), 0.3),
        (ConjugateGradients(preconditioner=PivotedCholesky(rank=20)), 0.3),
        (ConjugateGradients(preconditioner=Vecchia(2)), 0.3),
        (AlternatingProjections(block_size=10, fallback=None), 0.6),  # norms, and which blocks come next
        (StochasticGradientDescent(batch_size=30), 0.6),  # norms, and whether they grow
        (StochasticDualDescent(batch_size=30), 0.6),
        (AcceleratedSketchAndProject(block_size=20), 1.6),  # and whether a block had a Cholesky factor
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, Solver) else None,
)
def test_iterations_seldom_wait_for_the_device(solver: IterativeSolver, per_iteration: float) -> None:
    """Iterations of one round, once every block has been visited (whose factors are checked)."""
    told: list[tuple[int, int]] = []

    def note(progress: SolveProgress) -> None:
        told.append((progress.iteration, simulated.count))

    with SimulatedDevice() as simulated:
        endless = dataclasses.replace(solver, tolerance=1e-12, max_epochs=60)
        endless.solve(on(DEVICE, system(1e-3)), right_hand_sides().to(DEVICE), callback=note)
    (first, before), (last, after) = told[len(told) // 2], told[-1]
    assert last - first >= 20
    assert 0 < after - before <= per_iteration * (last - first)


def test_greedy_pivots_wait_once_each() -> None:
    with SimulatedDevice() as simulated:
        operator = on(DEVICE, system())
        before = simulated.count
        PivotedCholesky(rank=20).build(operator)
    assert simulated.count - before <= 20 + 10

"""The log density of N(0, H) at the residual y - mean, and the two factors of its gradient.

Two ways to the same five tensors: exactly, through a dense Cholesky factor, or from one block solve for
`[y - mean, probes]` together.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.exact.probes import Probes
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.logdet.lanczos import LogDeterminant
from gpy_iterative.linear_solvers.solution import ColumnGroup, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.training.report import Report
from gpy_iterative.training.surrogate import surrogate


class Estimate(Protocol):
    """The log density of N(0, H) at a residual: what a step reports of it, and its gradient."""

    @property
    def value_sem(self) -> Tensor:
        """The value's standard error, [*b], not divided by n."""
        ...

    @property
    def status(self) -> SolveStatus:
        """How the solve ended."""
        ...

    @property
    def stats(self) -> SolveStats:
        """What the solve took."""
        ...

    @property
    def truncation(self) -> Report | None:
        """What was drawn, of the methods that truncate at random."""
        ...

    @property
    def probe_jitter(self) -> float | None:
        """How far the jitter of the probes' covariance was raised; None where it was not."""
        ...

    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        """The value [*b], connected with the parameters behind H and the residual."""
        ...


@dataclass(frozen=True)
class DensityEstimate:
    """log N(residual; 0, H), whose derivative is `sum_k left_k^T dH right_k` (see `gpy_iterative.training.surrogate`).

    Attributes:
        value: [*b], not divided by n.
        value_sem: [*b], its standard error.
        weights: a = H^-1 residual, [*b, n].
        left, right: [*b, n, k]; the exact estimate has the weights of all entries of dH, [*b, n, n], and None.
        solutions: [*b, n, 1 + s], the solves as a warm start wants them; None for the exact estimate.
        status, stats: of the solve.
        truncation: what was drawn, of a randomly truncated series.
        probe_jitter: how far the jitter of the probes' covariance was raised; None where it was not.

    Raises:
        NonFiniteError: value or weights are not finite.
    """

    value: Tensor
    value_sem: Tensor
    weights: Tensor
    left: Tensor
    right: Tensor | None
    solutions: Tensor | None
    status: SolveStatus
    stats: SolveStats
    truncation: Report | None = None
    probe_jitter: float | None = None

    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        """The value [*b], connected with the parameters behind H and the residual."""
        return surrogate(operator, self.value, self.left, self.right, self.weights, residual)

    def __post_init__(self) -> None:
        check_estimated("value", self.value)
        check_estimated("solve for y - mean", self.weights)


def check_estimated(name: str, tensor: Tensor) -> None:
    """NonFiniteError where a part of an estimate is not finite."""
    if not torch.isfinite(tensor).all():
        raise NonFiniteError(
            f"The log marginal likelihood's {name} is not finite: data or hyperparameters are too large for "
            f"{tensor.dtype}. Standardise the targets, bound the hyperparameters, or use float64."
        )


def exact_estimate(operator: LinearOperator, residual: Tensor, solver: Cholesky) -> DensityEstimate:
    """Value and gradient without any randomness, by a Cholesky factor of the dense H.

    Cost O(n^3) time and, with the backward pass, up to 9 n^2 float64 numbers of memory; `operator` [*b, n, n],
    `residual` [*b, n]. Raises NotPositiveDefiniteError when H has no factor even after the jitter ladder.
    """
    start = time.perf_counter()
    factor = solver.factorize(operator)
    column = factor.solve(residual.unsqueeze(-1))
    weights = column.squeeze(-1)
    num_data = residual.shape[-1]
    value = -0.5 * ((residual * weights).sum(-1) + factor.logdet() + num_data * math.log(2 * math.pi))
    error = torch.linalg.vector_norm(residual - operator._matmul(column).squeeze(-1), dim=-1)
    norms = torch.linalg.vector_norm(residual, dim=-1).clamp_min(torch.finfo(error.dtype).tiny)
    relative = float((error / norms).max())
    return DensityEstimate(
        value=value,
        value_sem=torch.zeros_like(value),
        weights=weights,
        left=(column @ column.mT).sub_(factor.inverse()).mul_(0.5),
        right=None,
        solutions=None,
        status=SolveStatus.CONVERGED if relative <= solver.tolerance else SolveStatus.STAGNATED,
        stats=SolveStats(0, 0.0, 1.0, {"targets": relative}, time.perf_counter() - start),
    )


def stochastic_estimate(
    operator: LinearOperator,
    residual: Tensor,
    probes: Probes,
    log_determinant: LogDeterminant,
    solver: Solver,
    *,
    tolerances: tuple[float, float],
    initial_guess: Tensor | None,
    guess_product: Tensor | None,
    generator: torch.Generator,
    callback: Callable[[SolveProgress], None] | None,
) -> DensityEstimate:
    """Value and gradient from one block solve.

    Args:
        operator: H [*b, n, n].
        residual: y - mean [*b, n].
        probes: xi and S^-1 xi [*b, n, s], see `gpy_iterative.exact.probes`.
        log_determinant: an estimate of log det H.
        solver: an iterative solver.
        tolerances: relative residuals for the target and for the probes.
        initial_guess: [*b, n, 1 + s] or None.
        guess_product: H times it, or None where it is not known.
        generator: for solvers that draw.
        callback: told of the solve's progress.

    The quadratic term is `a^T (r + (r - H a))`: its error is of second order in the solver's.
    """
    num_probes = probes.vectors.shape[-1]
    groups = (ColumnGroup("targets", 1, tolerances[0]), ColumnGroup("probes", num_probes, tolerances[1]))
    rhs = torch.cat([residual.unsqueeze(-1), probes.vectors], dim=-1)
    solution = solver.solve(
        operator,
        rhs,
        groups=groups,
        initial_guess=initial_guess,
        guess_product=guess_product,
        generator=generator,
        callback=callback,
    )
    weights, solved = solution.value[..., 0], solution.value[..., 1:]
    quadratic = (weights * (residual + solution.residual[..., 0])).sum(-1)
    num_data = residual.shape[-1]
    value = -0.5 * (quadratic + log_determinant.mean + num_data * math.log(2 * math.pi))
    coefficients = rhs.new_full((1 + num_probes,), -0.5 / num_probes)
    coefficients[0] = 0.5
    right = torch.cat([weights.unsqueeze(-1), solved if probes.dual is None else probes.dual], dim=-1)
    return DensityEstimate(
        value=value,
        value_sem=0.5 * log_determinant.sem,
        weights=weights,
        left=coefficients * solution.value,
        right=right,
        solutions=solution.value,
        status=SolveStatus.INDEFINITE if log_determinant.is_indefinite else solution.status,
        stats=solution.stats,
    )


def advice(estimate: DensityEstimate) -> str:
    """One sentence for a user whose solve did not end well."""
    norms = ", ".join(f"{name} {norm:.2g}" for name, norm in estimate.stats.residual_norms.items())
    return (
        f"The linear solve ended with status {estimate.status.name.lower()} after {estimate.stats.epochs:.1f} epochs "
        f"(relative residuals: {norms}). {estimate.status.advice_for(estimate.weights.dtype)}"
    )

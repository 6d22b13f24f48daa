"""The log density of N(0, H) at the residual y - mean, with its gradient: by a Cholesky factor, or by one block solve.

A warm start begins the solve at the last solution, or at the extrapolation 2 V_t - V_{t-1} of the last two (Lin et al.
2024, section 4). The solutions are a part of the run: "latest" and, where they extrapolate, "before".
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.exact.probes import Probes
from gpy_iterative.linear_solvers.base import IterativeSolver, Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.logdet.lanczos import (
    MAX_LOGDET_PRODUCTS,
    BracketPositions,
    LogDeterminant,
    stochastic_logdet,
)
from gpy_iterative.linear_solvers.solution import ColumnGroup, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.training.report import MarginalLogLikelihoodReport, Report
from gpy_iterative.training.run import Part
from gpy_iterative.training.surrogate import surrogate

WarmStart = Literal["extrapolated", "previous", False]


def check_warm_start(mode: WarmStart) -> None:
    """Raises ValueError for any other mode."""
    if not (mode is False or (isinstance(mode, str) and mode in get_args(WarmStart))):  # 0 == False
        raise ValueError(f"warm_start must be 'extrapolated', 'previous' or False, got {mode!r}.")


def initial_guess(mode: WarmStart, part: Part | None) -> Tensor | None:
    """Where the next solve of the same system starts, [*b, n, s]; None is zero."""
    if mode is False or part is None:
        return None
    if mode == "extrapolated" and "before" in part:
        return 2 * part["latest"] - part["before"]
    return part["latest"]


def updated(mode: WarmStart, part: Part | None, solutions: Tensor) -> Part:
    """The part after a solve with these solutions [*b, n, s], which the caller leaves unchanged."""
    if mode == "extrapolated" and part is not None:
        return {"latest": solutions, "before": part["latest"]}
    return {"latest": solutions}


class Estimate(Protocol):
    """A log density with its gradient and the figures of its report."""

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
        """Cost and residuals of the solve."""
        ...

    @property
    def truncation(self) -> Report | None:
        """The draws of a method that truncates at random."""
        ...

    @property
    def probe_jitter(self) -> float | None:
        """The jitter of the probes' covariance; None where there is none."""
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
        status, stats: of the solve.
        truncation: the draws of a randomly truncated series.
        probe_jitter: the jitter of the probes' covariance; None where there is none.

    Raises:
        NonFiniteError: value or weights are not finite.
    """

    value: Tensor
    value_sem: Tensor
    weights: Tensor
    left: Tensor
    right: Tensor | None
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


def report_of(estimate: Estimate, value: Tensor, num_data: int, seconds: float) -> MarginalLogLikelihoodReport:
    """The report of a step that returned this value."""
    norms = estimate.stats.residual_norms
    return MarginalLogLikelihoodReport(
        status=estimate.status,
        iterations=estimate.stats.iterations,
        epochs=estimate.stats.epochs,
        residual_targets=norms["targets"],
        residual_probes=norms.get("probes"),
        value=value.detach().clone(),
        value_sem=estimate.value_sem / num_data,
        seconds=seconds,
        truncation=estimate.truncation,
        probe_jitter=estimate.probe_jitter,
    )


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
        status=SolveStatus.CONVERGED if relative <= solver.tolerance else SolveStatus.STAGNATED,
        stats=SolveStats(0, 0.0, 1.0, {"targets": relative}, time.perf_counter() - start),
    )


def first_products(
    operator: LinearOperator, guess: Tensor | None, probes: Probes
) -> tuple[Tensor | None, Tensor | None]:
    """H times the guess and H times the probes' duals in one product, which reads the tiles once; None without a guess."""
    if guess is None:
        return None, None
    duals = probes.covariance.solve(probes.vectors)
    guess_product, dual_product = operator._matmul(torch.cat([guess, duals], dim=-1)).tensor_split(
        [guess.shape[-1]], dim=-1
    )
    return guess_product, dual_product


def estimated_logdet(
    operator: LinearOperator, probes: Probes, dual_product: Tensor | None, solver: Solver, learned: Part | None
) -> LogDeterminant:
    """Log det H within the solver's budget: the value must not cost more passes over the matrix than the gradient may."""
    budget = solver.max_epochs if isinstance(solver, IterativeSolver) else MAX_LOGDET_PRODUCTS
    return stochastic_logdet(
        operator,
        probes.vectors,
        preconditioner=probes.covariance,
        max_iterations=min(MAX_LOGDET_PRODUCTS, int(budget)),
        positions=None if learned is None else BracketPositions(**learned),
        first_product=dual_product,
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
    probe_jitter: float | None,
) -> tuple[DensityEstimate, Tensor]:
    """Value and gradient from one block solve, and its solutions [*b, n, 1 + s].

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
        callback: gets the solve's progress.
        probe_jitter: see `DensityEstimate`.

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
    estimate = DensityEstimate(
        value=value,
        value_sem=0.5 * log_determinant.sem,
        weights=weights,
        left=coefficients * solution.value,
        right=right,
        status=SolveStatus.INDEFINITE if log_determinant.is_indefinite else solution.status,
        stats=solution.stats,
        probe_jitter=probe_jitter,
    )
    return estimate, solution.value


def advice(estimate: DensityEstimate) -> str:
    """The warning about a solve that has not converged."""
    norms = ", ".join(f"{name} {norm:.2g}" for name, norm in estimate.stats.residual_norms.items())
    return (
        f"The linear solve ended with status {estimate.status.name.lower()} after {estimate.stats.epochs:.1f} epochs "
        f"(relative residuals: {norms}). {estimate.status.advice_for(estimate.weights.dtype)}"
    )

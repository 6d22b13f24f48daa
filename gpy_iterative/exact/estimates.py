"""Log density of N(0, H) at y - mean, by a Cholesky factor or one block solve.

Warm starts follow Lin et al. 2024, section 4.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, float64_first
from gpy_iterative.exact.control_variate import ControlVariate
from gpy_iterative.exact.probes import Probes
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_solvers.base import IterativeSolver, Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky, ExactFactor
from gpy_iterative.linear_solvers.exact_factors import structure
from gpy_iterative.linear_solvers.logdet.lanczos import (
    MAX_LOGDET_PRODUCTS,
    BracketPositions,
    LogDeterminantQuadrature,
    SharedProducts,
)
from gpy_iterative.linear_solvers.solution import ColumnGroup, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.preconditioners.preconditioner import Preconditioner
from gpy_iterative.training.report import Report
from gpy_iterative.training.run import Part
from gpy_iterative.training.surrogate import surrogate, with_derivatives

WarmStart = Literal["extrapolated", "previous", False]


def check_warm_start(mode: WarmStart) -> None:
    if not (mode is False or (isinstance(mode, str) and mode in get_args(WarmStart))):  # 0 == False
        raise ValueError(f"warm_start must be 'extrapolated', 'previous' or False, got {mode!r}.")


def warm_start_after(mode: WarmStart, before: Part | None, solutions: Tensor) -> Part:
    """Solutions [*b, n, s], which must not change later, and the next guess where it is another."""
    if mode == "extrapolated" and before is not None:
        return {"latest": solutions, "guess": 2 * solutions - before["latest"]}
    return {"latest": solutions}


@dataclass(frozen=True, kw_only=True)
class Estimate(ABC):
    value: Tensor  # [*b], not divided by n
    value_sem: Tensor  # [*b], standard error
    status: SolveStatus
    stats: SolveStats
    truncation: Report | None = None
    far_field_error: float | None = None

    @abstractmethod
    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        """The value [*b], with the graph to H and residual."""


@dataclass(frozen=True, kw_only=True)
class DensityEstimate(Estimate):
    """log N(residual; 0, H), whose derivative is `sum_k left_k^T dH right_k`."""

    weights: Tensor  # a = H^-1 residual, [*b, n]
    left: Tensor  # [*b, n, k]
    right: Tensor  # [*b, n, k]
    preconditioner: Preconditioner | None = None
    control: ControlVariate | None = None

    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        check_estimated("solve for y - mean", self.weights)
        result = surrogate(operator, self.value, self.left, self.right)
        pairs = [(residual, -self.weights)] if residual.requires_grad else []
        moving = [tensor for tensor in operator.representation() if tensor.requires_grad]
        if self.control is not None and moving:
            # Not in the backward pass, which would keep the control variate's factors as long as the loss.
            pairs += zip(moving, self.control.mean_score(operator), strict=True)
        return with_derivatives(result, pairs) if pairs else result


@dataclass(frozen=True, kw_only=True)
class ExactEstimate(Estimate):
    """log N(residual; 0, H) by a factor of H."""

    weights: Tensor  # a = H^-1 residual, [*b, n]
    factor: ExactFactor
    score: tuple[Tensor, ...]  # derivatives by H, or by the parts of its structure

    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        check_estimated("solve for y - mean", self.weights)
        found, result = structure(operator), self.value
        parts = (operator,) if found is None else found[1]
        pairs = [(residual, -self.weights)]
        for part, derivative in zip(parts, self.score, strict=True):
            if isinstance(part, Tensor):
                pairs.append((part, derivative))
            else:
                result = surrogate(part, result, derivative)
        return with_derivatives(result, pairs)


def check_estimated(name: str, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise NonFiniteError(
            f"The log marginal likelihood's {name} is not finite: data or hyperparameters are too large for "
            f"{tensor.dtype}. To avoid this {float64_first(tensor.dtype)}standardise the targets, or constrain the "
            "hyperparameters."
        )


def exact_estimate(operator: LinearOperator, residual: Tensor, solver: Cholesky) -> ExactEstimate:
    """Cost: that of the factor, which is O(n^3), with 9 n^2 float64 numbers in the backward pass, for a dense matrix."""
    start = time.perf_counter()
    matrix = operator.to_dense() if structure(operator) is None else operator
    factor = solver.factorize(matrix)
    column = factor.solve(residual.unsqueeze(-1))
    weights = column.squeeze(-1)
    num_data = residual.shape[-1]
    value = -0.5 * ((residual * weights).sum(-1) + factor.logdet() + num_data * math.log(2 * math.pi))
    error = torch.linalg.vector_norm(residual - (matrix @ column).squeeze(-1), dim=-1)
    del matrix  # before the inverse
    norms = torch.linalg.vector_norm(residual, dim=-1).clamp_min(torch.finfo(error.dtype).tiny)
    relative = float((error / norms).max())
    return ExactEstimate(
        value=value,
        value_sem=torch.zeros_like(value),
        weights=weights,
        factor=factor,
        score=factor.score(column),
        status=SolveStatus.CONVERGED if relative <= solver.tolerance else SolveStatus.STAGNATED,
        stats=SolveStats(0, 0.0, 1.0, {"targets": relative}, time.perf_counter() - start),
    )


def stochastic_estimate(
    operator: LinearOperator,
    residual: Tensor,
    probes: Probes,
    logdet_probes: Probes,
    solver: Solver,
    *,
    control: ControlVariate | None,
    preconditioner: Preconditioner | None,
    tolerances: tuple[float, float],
    initial_guess: Tensor | None,
    positions: BracketPositions | None,
    generator: torch.Generator,
    callback: Callable[[SolveProgress], None] | None,
) -> tuple[DensityEstimate, Tensor, BracketPositions]:
    """The estimate, its solutions [*b, n, 1 + s], and the next positions of the quadrature.

    `probes` and `control` are for the gradient, `logdet_probes` for the value, `preconditioner` for the solver (None: its
    own), `tolerances` for target and probes.
    """
    # The value must not cost more products than the gradient.
    budget = solver.max_epochs if isinstance(solver, IterativeSolver) else MAX_LOGDET_PRODUCTS
    quadrature = LogDeterminantQuadrature(
        operator,
        logdet_probes.vectors,
        logdet_probes.covariance,
        max_iterations=int(min(MAX_LOGDET_PRODUCTS, budget)),
        positions=positions,
    )
    num_probes = probes.vectors.shape[-1]
    groups = (ColumnGroup("targets", 1, tolerances[0]), ColumnGroup("probes", num_probes, tolerances[1]))
    rhs = torch.cat([residual.unsqueeze(-1), probes.vectors], dim=-1)
    solution = solver.solve(
        SharedProducts.of(operator, quadrature),
        rhs,
        groups=groups,
        preconditioner=preconditioner,
        norm=logdet_probes.covariance,
        initial_guess=initial_guess,
        generator=generator,
        callback=callback,
    )
    log_determinant = quadrature.finished()
    weights, solved = solution.value[..., 0], solution.value[..., 1:]
    # The residual r makes its error of second order in the solver's: r^T H^-1 r, which P estimates.
    missed, covariance = solution.residual[..., :1], logdet_probes.covariance
    assert covariance is not None
    second = (missed * covariance.solve(missed)).sum((-2, -1))
    quadratic = (weights * (residual + missed.squeeze(-1))).sum(-1) + second
    coefficients = rhs.new_full((1 + num_probes,), -0.5 / num_probes)
    coefficients[0] = 0.5
    estimate = DensityEstimate(
        value=-0.5 * (quadratic + log_determinant.mean + residual.shape[-1] * math.log(2 * math.pi)),
        value_sem=0.5 * torch.hypot(log_determinant.sem, second),
        weights=weights,
        left=coefficients * solution.value,
        right=torch.cat([weights.unsqueeze(-1), solved if probes.dual is None else probes.dual], dim=-1),
        preconditioner=solution.preconditioner,
        control=control,
        status=solution.status,
        stats=solution.stats,
        far_field_error=far_field_error(operator),
    )
    return estimate, solution.value, log_determinant.positions

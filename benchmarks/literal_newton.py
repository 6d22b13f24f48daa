"""IterNCGP's algorithms 1 to 3 as printed, for comparisons: the naive twin of `LaplaceNewton`.

Undamped Newton steps on K + W^+ in the full space, each solved by IterGP with the plain residual as action and its
relative 2-norm as criterion; two kernel products an action; recycling by a virtual solver run. The steps are numbered as
in the paper: Tatzel, Wenger, Schneider and Hennig, "Accelerating Non-Conjugate Gaussian Processes By Trading Off
Computation For Uncertainty".
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR
from gpy_iterative.laplace.newton.base import Iterate, LaplaceSolution, LaplaceSolver, Problem, StepSolver
from gpy_iterative.laplace.newton.newton import Subspace
from gpy_iterative.linear_solvers.solution import SolveProgress, SolveStats, SolveStatus

#: Absolute and relative residual at which IterGP stops.
RESIDUAL_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class LiteralNewton(LaplaceSolver):
    """Algorithm 1. `tolerance` is its delta, the relative change of f - m.

    Args:
        max_inner: j_max, actions of a Newton step at the most.
        max_rank: R, actions that are kept.

    Raises NonFiniteError where the iteration overflows, which nothing in it prevents.
    """

    max_inner: int = 20
    max_rank: int = 300

    def _find_mode(self, problem: Problem) -> LaplaceSolution:
        return literal_solve(problem, self)

    def _step_solver(self, problem: Problem) -> StepSolver:
        raise NotImplementedError


@dataclass
class _Buffers:
    """S, T = K S, and Q with K_hat^-1 ~ Q Q^T."""

    actions: Tensor
    images: Tensor
    root: Tensor


def literal_solve(problem: Problem, options: LiteralNewton) -> LaplaceSolution:
    """Algorithm 1."""
    start, tolerance = time.perf_counter(), options.tolerance or 1e-2
    size, mean = problem.prior.size, problem.mean
    products, status = 0, SolveStatus.BUDGET_EXHAUSTED
    iterate = problem.evaluated(mean, torch.zeros_like(mean))
    buffers = _Buffers(*(mean.new_empty(size, 0) for _ in range(3)))
    outer = 0
    while outer < options.max_outer:
        curvature = problem.likelihood.curvature(problem.by_point(iterate.f), NO_FLOOR)
        rhs = iterate.f + _noise(curvature, iterate.gradient) - mean  # (2)
        if not torch.isfinite(rhs).all():
            raise NonFiniteError("The pseudo-targets of the undamped Newton step are not finite.")
        buffers = _recycled(buffers, curvature, options.max_rank)  # algorithm 3
        v, inner_products = _itergp(problem, curvature, rhs, buffers, options.max_inner)  # (3)
        f = mean + problem.prior.matmul(v.unsqueeze(-1)).squeeze(-1)  # (4)
        products += inner_products + 1
        outer += 1
        change = torch.linalg.vector_norm(f - iterate.f)
        previous = torch.linalg.vector_norm(iterate.f - mean)
        iterate = problem.evaluated(f, v)
        if problem.callback is not None:
            problem.callback(SolveProgress(outer, products, {"mode": iterate.stationarity}))
        if outer > 1 and change <= tolerance * previous:
            status = SolveStatus.CONVERGED
            break
    # The covariance is that of the last step: the paper does not factor anew at the mode.
    curvature = problem.likelihood.curvature(problem.by_point(iterate.f), NO_FLOOR)
    return _solution(problem, iterate, status, outer, products, curvature, buffers, start)


def _itergp(
    problem: Problem, curvature: Curvature, rhs: Tensor, buffers: _Buffers, max_inner: int
) -> tuple[Tensor, int]:
    """Algorithm 2 on (K + W^+) v = rhs: v and the number of kernel products; the buffers grow."""
    v = buffers.root @ (buffers.root.mT @ rhs)  # (1)
    threshold = max(RESIDUAL_TOLERANCE, RESIDUAL_TOLERANCE * float(torch.linalg.vector_norm(rhs)))
    products = 0
    for _ in range(max_inner):
        residual = rhs - problem.prior.matmul(v.unsqueeze(-1)).squeeze(-1) - _noise(curvature, v)  # (2)
        products += 1
        if float(torch.linalg.vector_norm(residual)) < threshold:
            break
        action = residual  # (3)
        image = problem.prior.matmul(action.unsqueeze(-1)).squeeze(-1)  # (4)
        products += 1
        buffers.actions = torch.cat([buffers.actions, action.unsqueeze(-1)], dim=-1)
        buffers.images = torch.cat([buffers.images, image.unsqueeze(-1)], dim=-1)
        conjugate = image + _noise(curvature, action)  # (5)
        direction = action - buffers.root @ (buffers.root.mT @ conjugate)  # (6)
        length = float(conjugate @ direction)  # (7)
        if not length > 0:
            break
        buffers.root = torch.cat([buffers.root, direction.unsqueeze(-1) / length**0.5], dim=-1)  # (8)
        v = v + direction * (action @ residual) / length  # (9)
    return v, products


def _recycled(buffers: _Buffers, curvature: Curvature, max_rank: int) -> _Buffers:
    """Algorithm 3: a virtual run on the old actions, and truncation to the largest eigenvalues of M."""
    if not buffers.actions.shape[-1]:
        return buffers
    matrix = buffers.actions.mT @ (buffers.images + curvature.pinv(buffers.actions))
    if not torch.isfinite(matrix).all():
        raise NonFiniteError("The recycled buffers are not finite.")
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    values, vectors = values[-max_rank:], vectors[:, -max_rank:]
    positive = values > 1e-13 * values[-1]
    values, vectors = values[positive], vectors[:, positive]
    actions = buffers.actions @ vectors
    return _Buffers(actions, buffers.images @ vectors, actions / values.sqrt())


def _noise(curvature: Curvature, column: Tensor) -> Tensor:
    return curvature.pinv(column.unsqueeze(-1)).squeeze(-1)


def _solution(
    problem: Problem,
    iterate: Iterate,
    status: SolveStatus,
    outer: int,
    products: int,
    curvature: Curvature,
    buffers: _Buffers,
    start: float,
) -> LaplaceSolution:
    # Q = S A for some A: the least squares solution is exact, but for what rounding has put outside the span.
    root = buffers.root
    transform = torch.linalg.lstsq(buffers.actions, root).solution if root.shape[-1] else root.new_zeros(0, 0)
    return LaplaceSolution(
        value=problem.by_point(iterate.v),
        residual=problem.by_point(iterate.error),
        status=status,
        stats=SolveStats(outer, float(products), 0.0, {"mode": iterate.stationarity}, time.perf_counter() - start),
        latent=problem.by_point(iterate.f),
        curvature=curvature,
        inverse=Subspace(buffers.actions, buffers.images, transform),
        log_joint=iterate.log_joint,
    )

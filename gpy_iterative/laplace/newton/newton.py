"""Computation-aware Newton steps.

Tatzel, Wenger, Schneider and Hennig, "Accelerating Non-Conjugate Gaussian Processes By Trading Off Computation For
Uncertainty", algorithms 1 to 3; docs/laplace.md lists differences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gpy_iterative.checks import check_count, check_instance
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import COVARIANCE_FLOOR, COVARIANCE_FLOOR_FLOAT32, CurvatureFloor
from gpy_iterative.laplace.newton.base import Inverse, Iterate, LaplaceSolver, Problem, StepSolver
from gpy_iterative.laplace.newton.basis import ActionBasis, GalerkinSystem
from gpy_iterative.laplace.newton.dense import LaplaceCholesky
from gpy_iterative.laplace.newton.preconditioning import LatentFactor, NewtonPreconditioner, latent_factor
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankRecipe
from gpy_iterative.random_numbers import given_or_seeded, normal
from gpy_iterative.worker_threads import divided

EXACT_LATENTS = 2000
#: Relative weighted residual that ends a step's solve.
FORCING = 0.1
#: Default covariance actions of predictions: most, least, and bytes that allow those between.
MOST_PREDICTED, LEAST_PREDICTED, PREDICTED_BYTES = 400, 100, 2**29
#: Covariance actions: relative residual that draws new right-hand sides, number of products.
REFINED, REFINED_DEPTH = 1e-3, 10
#: Largest inner product of orthonormal actions.
LARGEST_OVERLAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class LaplaceNewton(LaplaceSolver):
    """Computation-aware Newton steps in a subspace of actions that all steps share.

    An action costs a kernel product and six passes over n C numbers per kept action.

    Args:
        max_inner: most actions per Newton step.
        preconditioner: recipe for a low-rank factor of K with k columns per function (in total for coupled functions), for
            fewer actions to the mode; None is conjugate gradients on I + R^T K R. A Newton step costs
            n C^2 k^2 + (C k)^3 / 3 multiply-adds; memory n k (n C k without a shared kernel) plus (C k)^2.
        max_rank: actions kept between Newton steps; each of max_rank + max_inner + num_covariance_actions takes 16 n C
            bytes.
        num_covariance_actions: further actions at the mode, for the variance; ten products. None is none in training, and
            400 in predictions, or as many as 0.5 GB allow, at least 100.

    Other options: see `LaplaceSolver`; the default tolerance is 1e-5 (float32 kernels: 1e-3).
    """

    max_inner: int = 20
    preconditioner: LowRankRecipe | None = None
    max_rank: int = 300
    num_covariance_actions: int | None = None

    _tolerances: ClassVar[tuple[float, float]] = (1e-5, 1e-3)
    _floors: ClassVar[tuple[CurvatureFloor, CurvatureFloor]] = (COVARIANCE_FLOOR, COVARIANCE_FLOOR_FLOAT32)
    _budget: ClassVar[str] = "max_outer or max_inner"
    _room: ClassVar[str] = "raise its max_rank, "

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_inner", self.max_inner)
        check_count("max_rank", self.max_rank)
        check_count("num_covariance_actions", self.num_covariance_actions, optional=True, least=0)
        check_instance("preconditioner", self.preconditioner, LowRankRecipe, "RandomlyPivotedCholesky(rank=100)")

    def for_predictions(self, size: int) -> LaplaceSolver:
        if self.num_covariance_actions is not None:
            return self
        allowed = PREDICTED_BYTES // (16 * size)
        return replace(self, num_covariance_actions=min(MOST_PREDICTED, max(LEAST_PREDICTED, allowed)))

    def _step_solver(self, problem: Problem) -> StepSolver:
        return _SubspaceSteps(problem, self)


def chosen_solver(given: LaplaceSolver | None, size: int) -> LaplaceSolver:
    """For n C = `size` latent values."""
    return given or (LaplaceCholesky() if size <= EXACT_LATENTS else LaplaceNewton())


@dataclass(frozen=True)
class Subspace(Inverse):
    """In the span of few actions."""

    actions: Tensor
    images: Tensor
    transform: Tensor  # A [B, r], A A^T = (S^T (K + W^+) S)^-1

    @property
    def root(self) -> Tensor:
        return self.actions @ self.transform

    @property
    def image_of_root(self) -> Tensor:
        return self.images @ self.transform


class _SubspaceSteps(StepSolver):
    def __init__(self, problem: Problem, options: LaplaceNewton) -> None:
        self._problem, self._options = problem, options
        self._generator = given_or_seeded(problem.generator)
        self._num_further = options.num_covariance_actions or 0
        known = 0 if problem.initial_solution is None else problem.initial_solution.inverse.rank
        capacity = max(options.max_rank, known) + options.max_inner + self._num_further
        self.basis = ActionBasis(problem.prior.size, capacity, problem.mean)
        self._factor: LatentFactor | None = None
        if problem.initial_solution is not None:
            actions, images = problem.initial_solution.inverse.actions, problem.initial_solution.inverse.images
            rounding = (actions.mT @ actions).fill_diagonal_(0).abs().amax() if actions.numel() else 0.0
            if rounding > LARGEST_OVERLAP:
                raise ValueError("The initial solution's actions are not orthonormal: it must come from this solver.")
            self.basis.replace(actions, images)

    @divided()
    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        self._keep_warm_start(iterate, curvature)
        options, system = self._options, GalerkinSystem(self.basis, curvature)
        v, image = self._solved(system, iterate, options.max_inner)
        dv, df = v - iterate.v, self._problem.mean + image - iterate.f
        if not float(iterate.error @ df) > 0:  # a reused subspace may give no ascent direction
            dv, df = self._steepest(curvature, iterate.error)
        if self.basis.count > options.max_rank:
            system.compress(self._rhs(iterate, curvature), options.max_rank)
        return dv, df

    @divided()
    def finish(self, iterate: Iterate, curvature: Curvature) -> Inverse:
        options, system = self._options, GalerkinSystem(self.basis, curvature)
        if not self.basis.count:  # a start at the mode
            self._solved(system, iterate, min(options.max_inner, options.max_rank))
        self._refine(system, curvature, self._num_further)
        # without spare rows
        return Subspace(self.basis.actions.clone(), self.basis.images.clone(), system.transform)

    def _keep_warm_start(self, iterate: Iterate, curvature: Curvature) -> None:
        """Makes v the first action of predictions: few others would not span it, and full steps would leave the mode.

        Training without covariance actions needs the other actions, which reduce the noise of its probes.
        """
        size = torch.linalg.vector_norm(iterate.v)
        if self.basis.count or not self._num_further or not size > 0:
            return
        action = iterate.v / size
        if torch.linalg.vector_norm(action - _apply(curvature.project, action)) <= LARGEST_OVERLAP:
            self.basis.append(action, (iterate.f - self._problem.mean) / size)

    def _rhs(self, iterate: Iterate, curvature: Curvature) -> Tensor:
        return iterate.f - self._problem.mean + _apply(curvature.pinv, iterate.gradient)

    def _solved(self, system: GalerkinSystem, iterate: Iterate, limit: int) -> tuple[Tensor, Tensor]:
        """Solution v and K v."""
        curvature, rhs = system.curvature, self._rhs(iterate, system.curvature)
        target = FORCING * _whitened_norm(curvature, iterate.error)  # residual of v
        v, image = (part.squeeze(-1) for part in self._galerkin(system, rhs.unsqueeze(-1)))
        preconditioner: NewtonPreconditioner | None = None
        for inner in range(limit):
            # W r without W^+, which cancels.
            weighted = _apply(curvature.matmul, iterate.f - self._problem.mean - image)
            weighted = weighted + _apply(curvature.project, iterate.gradient - v)
            if _whitened_norm(curvature, weighted) <= target:
                break
            if self._options.preconditioner is None:
                action = weighted if inner else iterate.error
            else:
                preconditioner = preconditioner or NewtonPreconditioner(self._latent_factor(curvature), curvature)
                action = preconditioner.solve(weighted)
            change = self._act(system, action.unsqueeze(-1), rhs.unsqueeze(-1))
            if change is None:
                break
            v, image = v + change[0].squeeze(-1), image + change[1].squeeze(-1)
        return v, image

    def _refine(self, system: GalerkinSystem, curvature: Curvature, count: int) -> None:
        # From random right-hand sides: the mode's residual is zero.
        width = math.ceil(count / REFINED_DEPTH)
        while count > 0:
            taken = self._refined(system, curvature, min(width, count), count)
            if not taken:
                break  # the subspace is the range of W
            count -= taken

    def _refined(self, system: GalerkinSystem, curvature: Curvature, width: int, limit: int) -> int:
        """Returns the number of new actions."""
        base = normal((curvature.num_columns, width), self._generator, self._problem.mean.device)
        rhs = curvature.pinv(curvature.root(base))
        v, image = self._galerkin(system, rhs)
        start, before = None, self.basis.count
        while (taken := self.basis.count - before) < limit:
            weighted = curvature.matmul(rhs - image) - curvature.project(v)
            norms = torch.linalg.vector_norm(weighted, dim=0)
            start = norms if start is None else start
            if taken and (norms <= REFINED * start).all():
                break
            change = self._act(system, weighted[:, : limit - taken], rhs)
            if change is None:
                break
            v, image = v + change[0], image + change[1]
        return taken

    def _latent_factor(self, curvature: Curvature) -> LatentFactor:
        if self._factor is None:
            self._factor = latent_factor(self._options.preconditioner, self._problem.prior, curvature, self._generator)
            self.overhead += self._factor.build_epochs
        return self._factor

    def _act(self, system: GalerkinSystem, actions: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Adds actions [N, b]; changes of v and K v [N, c], or None."""
        directions: list[Tensor] = []
        for action in actions.unbind(-1):
            direction = self.basis.orthonormalised(action, system.curvature, directions)
            if direction is not None:
                directions.append(direction)
        if not directions:
            return None
        self.num_products += 1
        images = self._problem.prior.matmul(torch.stack(directions, dim=-1))
        coefficients = rhs.new_zeros(self.basis.count, rhs.shape[-1])
        for direction, image in zip(directions, images.unbind(-1), strict=True):
            change = system.append(direction, image, rhs)
            coefficients = torch.cat([coefficients, torch.zeros_like(change[:1])]) + change
        return self.basis.actions @ coefficients, self.basis.images @ coefficients

    def _galerkin(self, system: GalerkinSystem, rhs: Tensor) -> tuple[Tensor, Tensor]:
        v, image = torch.zeros_like(rhs), torch.zeros_like(rhs)
        for _ in range(2):  # float32 products leave S^T K S asymmetric: one solve leaves a residual within the span
            coefficients = system.solve(rhs - image - system.curvature.pinv(v))
            v, image = v + self.basis.actions @ coefficients, image + self.basis.images @ coefficients
        return v, image

    def _steepest(self, curvature: Curvature, error: Tensor) -> tuple[Tensor, Tensor]:
        self.num_products += 1
        image, noise = _apply(self._problem.prior.matmul, error), _apply(curvature.pinv, error)
        length = (error @ noise) / (error @ (image + noise))
        return length * error, length * image


def _apply(function: Callable[[Tensor], Tensor], column: Tensor) -> Tensor:
    return function(column.unsqueeze(-1)).squeeze(-1)


def _whitened_norm(curvature: Curvature, column: Tensor) -> float:
    return float((column @ _apply(curvature.pinv, column)).clamp_min(0).sqrt())

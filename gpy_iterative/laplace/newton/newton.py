"""Computation-aware Newton steps: each is solved as far as needed, with one kernel product an action.

Every Newton step is a Gaussian process regression on pseudo-targets with noise W^+. It is solved in a subspace of
actions; the part outside of the subspace stays in the predictive variance as computational uncertainty. K does not change
between Newton steps, so that all products are used again.

Tatzel, Wenger, Schneider and Hennig, "Accelerating Non-Conjugate Gaussian Processes By Trading Off Computation For
Uncertainty", algorithms 1 to 3; docs/laplace.md lists what differs and why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gpy_iterative.checks import check_count, check_fraction, check_instance
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import COVARIANCE_FLOOR, COVARIANCE_FLOOR_FLOAT32, CurvatureFloor
from gpy_iterative.laplace.newton.base import Iterate, LaplaceSolution, LaplaceSolver, Problem, StepSolver
from gpy_iterative.laplace.newton.basis import ActionBasis, GalerkinSystem
from gpy_iterative.laplace.newton.cholesky import LaplaceCholesky
from gpy_iterative.laplace.newton.preconditioning import LatentFactor, NewtonPreconditioner, latent_factor
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankRecipe
from gpy_iterative.worker_threads import divided

#: Up to so many latent values (points times functions) dense factors cost little, and are exact.
EXACT_LATENTS = 2000
#: Random right-hand sides are solved to this relative residual before others are drawn for the covariance.
REFINED = 1e-3
#: Products of the covariance actions; each has several actions where there are more of them.
REFINED_DEPTH = 10
#: Inner products of orthonormal actions that are more than rounding.
LARGEST_OVERLAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class LaplaceNewton(LaplaceSolver):
    """Computation-aware Newton steps in a subspace that grows, and that all steps share.

    Args:
        max_inner: actions (kernel products) of a Newton step at the most.
        forcing: a step is solved until its weighted residual is smaller than at its start by this factor.
        preconditioner: a recipe for a low-rank factor of K, of k columns for each function (of functions that the prior
            couples, k in all). None takes weighted residuals W r as actions: conjugate gradients on I + R^T K R. With a
            factor far fewer products find the mode, and so far fewer actions are there for the variance
            (`num_covariance_actions` adds some). It costs n C^2 k^2 + (C k)^3 / 3 multiply-adds a Newton step and memory
            n k, for functions with kernels of their own n C k, and (C k)^2.
        max_rank: actions that are kept from one Newton step to the next; clamped at n C. Beyond, the mean's direction and
            the largest reductions of the variance are kept. Memory: 16 n C bytes for each of them, of max_inner and of
            num_covariance_actions.
        num_covariance_actions: further actions when the mode is found, which only make the variance smaller; ten products.

    Further options are those of `LaplaceSolver`. The default tolerance is 1e-5, for kernel products in float32 1e-3.
    Everything but the kernel products is float64.

    Cost of an action: one kernel product and about six passes over n C numbers for each action that is kept.

    Raises:
        ValueError: an option outside its range.
    """

    max_inner: int = 20
    forcing: float = 0.1
    preconditioner: LowRankRecipe | None = None
    max_rank: int = 300
    num_covariance_actions: int = 0

    _tolerances: ClassVar[tuple[float, float]] = (1e-5, 1e-3)
    _floors: ClassVar[tuple[CurvatureFloor, CurvatureFloor]] = (COVARIANCE_FLOOR, COVARIANCE_FLOOR_FLOAT32)
    _budget: ClassVar[str] = "max_outer or max_inner"
    _room: ClassVar[str] = "raise its max_rank, "

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_inner", self.max_inner)
        check_count("max_rank", self.max_rank)
        check_fraction("forcing", self.forcing)
        check_count("num_covariance_actions", self.num_covariance_actions, least=0)
        check_instance("preconditioner", self.preconditioner, LowRankRecipe, "RandomlyPivotedCholesky(rank=100)")

    def _step_solver(self, problem: Problem) -> StepSolver:
        return _SubspaceSteps(problem, self)


def default_laplace_solver(size: int) -> LaplaceSolver:
    """Dense factors up to 2,000 latent values, computation-aware Newton steps beyond."""
    return LaplaceCholesky() if size <= EXACT_LATENTS else LaplaceNewton()


class _SubspaceSteps(StepSolver):
    """Newton systems in the span of the actions so far, and of those that each adds."""

    def __init__(self, problem: Problem, options: LaplaceNewton) -> None:
        self._problem, self._options = problem, options
        self._generator = torch.Generator().manual_seed(0) if problem.generator is None else problem.generator
        capacity = min(options.max_rank, problem.prior.size) + options.max_inner + 2 + options.num_covariance_actions
        self.basis = ActionBasis(problem.prior.size, capacity, problem.mean)
        self._factor: LatentFactor | None = None
        self._preconditioner: NewtonPreconditioner | None = None
        if problem.initial_solution is not None:
            self._begin_with(problem.initial_solution)

    def _begin_with(self, solution: LaplaceSolution) -> None:
        actions = solution.actions
        rounding = (actions.mT @ actions).fill_diagonal_(0).abs().amax() if actions.numel() else 0.0
        if rounding > LARGEST_OVERLAP:
            raise ValueError("The initial solution's actions are not orthonormal: it must come from this solver.")
        self.basis.replace(actions, solution.images)

    @divided()
    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        options, system = self._options, GalerkinSystem.of(self.basis, curvature)
        # A reused subspace's solution need not be a direction in which psi rises; its gradient always is.
        first = iterate.error.unsqueeze(-1) if options.preconditioner is None else None
        v, image = self._solved(system, iterate, options.max_inner, first)
        dv, df = v - iterate.v, self._problem.mean + image - iterate.f
        if not float(iterate.error @ df) > 0:
            dv, df = self._steepest(curvature, iterate.error)
        if self.basis.count > options.max_rank:
            system.compress(self._rhs(iterate, curvature), options.max_rank)
        return dv, df

    @divided()
    def finish(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor, Tensor]:
        options, system = self._options, GalerkinSystem.of(self.basis, curvature)
        if not self.basis.count:  # a start at the mode took no step, and the covariance would be the prior's
            self._solved(system, iterate, min(options.max_inner, options.max_rank))
        if options.num_covariance_actions:
            self._refine(system, curvature, options.num_covariance_actions)
        # Copies without the buffer's spare rows.
        return self.basis.actions.clone(), self.basis.images.clone(), system.transform

    def _rhs(self, iterate: Iterate, curvature: Curvature) -> Tensor:
        """F - m + W^+ g, the right-hand side of the Newton system."""
        return iterate.f - self._problem.mean + _apply(curvature.pinv, iterate.gradient)

    def _solved(
        self, system: GalerkinSystem, iterate: Iterate, limit: int, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """V and K v of the Newton system at an iterate, after up to `limit` products, the first with actions `first`."""
        curvature, rhs = system.curvature, self._rhs(iterate, system.curvature)
        target = self._options.forcing * _whitened_norm(curvature, iterate.error)  # the residual of v itself
        v, image = self._galerkin(system, rhs)
        for inner in range(limit):
            # W r without a division by W: W^+ cancels.
            weighted = _apply(curvature.matmul, iterate.f - self._problem.mean - image)
            weighted = weighted + _apply(curvature.project, iterate.gradient - v)
            ascends = inner > 0 or float(iterate.error @ (self._problem.mean + image - iterate.f)) > 0
            if ascends and _whitened_norm(curvature, weighted) <= target:
                break
            is_given = inner == 0 and first is not None
            actions = first if is_given else self._actions(weighted, curvature, None if ascends else iterate.error)
            change = self._act(system, actions, rhs.unsqueeze(-1))
            if change is None:
                break  # the subspace has everything that further actions could add
            v, image = v + change[0].squeeze(-1), image + change[1].squeeze(-1)
        return v, image

    def _refine(self, system: GalerkinSystem, curvature: Curvature, count: int) -> None:
        """Further actions for the covariance: the mode's own residual is zero, so those of random right-hand sides.

        Several right-hand sides share each product, which costs far less than one for each.
        """
        width = math.ceil(count / REFINED_DEPTH)
        while count > 0:
            taken = self._refined(system, curvature, min(width, count), count)
            if not taken:
                break  # the subspace is everything that the likelihood sees
            count -= taken

    def _refined(self, system: GalerkinSystem, curvature: Curvature, width: int, limit: int) -> int:
        """The number of actions, at most `limit`, that `width` random right-hand sides have added."""
        shape = (curvature.num_columns, width)
        base = torch.randn(shape, generator=self._generator, dtype=torch.float64, device=self._generator.device)
        rhs = curvature.pinv(curvature.root(base.to(self._problem.mean)))
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

    def _actions(self, weighted: Tensor, curvature: Curvature, error: Tensor | None) -> Tensor:
        """Actions [N, b] from a weighted residual [N]; a preconditioned one comes beside `error`."""
        recipe = self._options.preconditioner
        if recipe is None:
            return weighted.unsqueeze(-1)
        if self._factor is None:
            self._factor = latent_factor(recipe, self._problem.prior, curvature, self._generator)
            self.overhead += self._factor.build_epochs
        if self._preconditioner is None or self._preconditioner.curvature is not curvature:
            self._preconditioner = NewtonPreconditioner.of(self._factor, curvature)
        direction = self._preconditioner.solve(weighted)
        return torch.stack([direction] if error is None else [direction, error], dim=-1)

    def _act(self, system: GalerkinSystem, actions: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor] | None:
        """One product with actions [N, b]: their changes of v and K v [N, c] of right-hand sides [N, c].

        None where they add nothing to the subspace.
        """
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
        coefficients = system.solve(rhs)
        return self.basis.actions @ coefficients, self.basis.images @ coefficients

    def _steepest(self, curvature: Curvature, error: Tensor) -> tuple[Tensor, Tensor]:
        """Along the gradient, by the length that a quadratic model says: always upwards."""
        self.num_products += 1
        image, noise = _apply(self._problem.prior.matmul, error), _apply(curvature.pinv, error)
        length = (error @ noise) / (error @ (image + noise))
        return length * error, length * image


def _apply(function: Callable[[Tensor], Tensor], column: Tensor) -> Tensor:
    """A function of columns [N, b], of one column [N]."""
    return function(column.unsqueeze(-1)).squeeze(-1)


def _whitened_norm(curvature: Curvature, column: Tensor) -> float:
    """sqrt(x^T W^+ x)."""
    return float((column @ _apply(curvature.pinv, column)).clamp_min(0).sqrt())

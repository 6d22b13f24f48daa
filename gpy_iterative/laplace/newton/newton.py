"""Newton's method whose steps are solved as far as they are worth it, with one kernel product an action.

Every Newton step is a Gaussian process regression on pseudo-targets with noise W^+. It is solved in a subspace of
actions; what the subspace does not see stays in the predictive variance as computational uncertainty. K does not change
between Newton steps, so that all products are used again.

Tatzel, Wenger, Schneider and Hennig, "Accelerating Non-Conjugate Gaussian Processes By Trading Off Computation For
Uncertainty", algorithms 1 to 3; what differs, and why, is in the documentation (`literal=True` runs them as printed).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag, check_fraction, check_instance
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import COVARIANCE_FLOOR, COVARIANCE_FLOOR_FLOAT32, CurvatureFloor
from gpy_iterative.laplace.newton.actions import ActionState, Policy, PolicyName, policy_of
from gpy_iterative.laplace.newton.base import Iterate, LaplaceSolver, Problem, StepSolver
from gpy_iterative.laplace.newton.basis import ActionBasis, GalerkinSystem
from gpy_iterative.laplace.newton.compression import Compression, check_compression, compress
from gpy_iterative.laplace.newton.literal import LiteralOptions, literal_solve
from gpy_iterative.laplace.newton.preconditioning import LatentFactor, NewtonPreconditioner, latent_factor
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.preconditioners.low_rank_plus_diagonal import PreconditionerRecipe
from gpy_iterative.worker_threads import divided

#: Relative change of f - m at which the paper's algorithm stops.
LITERAL_TOLERANCE = 1e-2
#: Where random right-hand sides are solved so far, others tell more about the covariance.
REFINED = 1e-3
#: Products that covariance actions are spread over, several actions a product, where there are more of them.
REFINED_DEPTH = 10
#: Newton steps between two checks that T is still K S, and the relative drift at which it is computed anew.
CHECK_EVERY, LARGEST_DRIFT = 20, 1e-4
#: Of orthonormal actions, inner products beyond rounding.
LARGEST_OVERLAP = 1e-6


@dataclass(frozen=True, kw_only=True)
class LaplaceNewton(LaplaceSolver):
    """Computation-aware Newton steps in a subspace that grows, and that all steps share.

    Args:
        max_inner: actions (kernel products) of a Newton step at the most.
        forcing: a step is solved until its weighted residual is so much smaller than at its start.
        policy: "weighted_residual" (few products, and stays in the range of W), "residual" (the paper's), "unit" (one
            value after the other, by what is left of its variance), or a function of an `ActionState` that returns
            actions [n, C] or, for one product with b columns, [n, C, b].
        preconditioner: a recipe for a low-rank factor of K, of k columns for each function (of functions that the prior
            couples, k in all); None for none. Actions are then the policy's "weighted_residual", preconditioned: far fewer
            products find the mode, and so far fewer actions are there for the variance (`num_covariance_actions` adds
            some). It costs n C^2 k^2 + (C k)^3 / 3 multiply-adds a Newton step and memory n k, for functions with kernels
            of their own n C k, and (C k)^2.
        max_rank: actions that are kept from one Newton step to the next; clamped at n C. Memory: 16 n C bytes for each of
            them, of max_inner and of num_covariance_actions.
        compression: how the rank is kept: "keep_mean", "variance", "paper" (see
            `gpy_iterative.laplace.newton.compression`), or None, which starts anew where the rank is exceeded.
        recycle: keep actions between Newton steps.
        num_covariance_actions: further actions when the mode is found, which only make the variance smaller; ten products.
        literal: the paper's algorithms as printed: no damping, the plain residual, K + W^+ in the full space (also where
            W is singular), two products an action. For comparisons; it does not converge on hard data. The tolerance is
            then that of the relative change of f - m, 1e-2 by default.

    Further options are those of `LaplaceSolver`. The default tolerance is 1e-5, for kernel products in float32 1e-3.
    Everything but the kernel products is float64.

    Cost of an action: one kernel product and about six passes over n C numbers for each action that is kept.

    Raises:
        ValueError: an option outside its range.
    """

    max_inner: int = 20
    forcing: float = 0.1
    policy: PolicyName | Policy = "weighted_residual"
    preconditioner: PreconditionerRecipe | None = None
    max_rank: int = 300
    compression: Compression | None = "keep_mean"
    recycle: bool = True
    num_covariance_actions: int = 0
    literal: bool = False

    _budget: ClassVar[str] = "max_outer or max_inner"
    _room: ClassVar[str] = "raise its max_rank, "

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_inner", self.max_inner)
        check_count("max_rank", self.max_rank)
        check_fraction("forcing", self.forcing)
        check_count("num_covariance_actions", self.num_covariance_actions, least=0)
        check_flag("recycle", self.recycle)
        check_flag("literal", self.literal)
        check_compression(self.compression)
        policy_of(self.policy)
        check_instance("preconditioner", self.preconditioner, PreconditionerRecipe, "RandomlyPivotedCholesky(rank=100)")
        if self.preconditioner is not None and (self.literal or self.policy != "weighted_residual"):
            raise ValueError(
                "A preconditioner is for the policy 'weighted_residual' and literal=False, "
                f"got policy={self.policy!r} and literal={self.literal}."
            )
        if self.literal and self.num_covariance_actions:
            raise ValueError("num_covariance_actions is not of the published algorithms, literal=True.")

    def _find_mode(self, problem: Problem) -> LaplaceSolution:
        if not self.literal:
            return super()._find_mode(problem)
        tolerance = LITERAL_TOLERANCE if self.tolerance is None else self.tolerance
        options = LiteralOptions(self.max_outer, self.max_inner, self.max_rank, tolerance, self.recycle, self.curvature)
        return literal_solve(problem, options)

    def _step_solver(self, problem: Problem) -> StepSolver:
        return _SubspaceSteps(problem, self)

    def _final_floor(self, dtype: torch.dtype) -> CurvatureFloor:
        return COVARIANCE_FLOOR if dtype == torch.float64 else COVARIANCE_FLOOR_FLOAT32

    def _default_tolerance(self, dtype: torch.dtype) -> float:
        return 1e-5 if dtype == torch.float64 else 1e-3


class _SubspaceSteps(StepSolver):
    """Newton systems in the span of the actions so far, and of those that each adds."""

    def __init__(self, problem: Problem, options: LaplaceNewton) -> None:
        self._problem, self._options = problem, options
        self._generator = torch.Generator().manual_seed(0) if problem.generator is None else problem.generator
        self._policy = policy_of(options.policy)
        capacity = min(options.max_rank, problem.prior.size) + options.max_inner + 2 + options.num_covariance_actions
        self.basis = ActionBasis(problem.prior.size, capacity, problem.mean)
        self._used: set[int] = set()
        self._steps = 0
        self._factor: LatentFactor | None = None

    def recall(self, solution: LaplaceSolution) -> None:
        actions = solution.actions
        rounding = (actions.mT @ actions).fill_diagonal_(0).abs().amax() if actions.numel() else 0.0
        if rounding > LARGEST_OVERLAP:
            raise ValueError("The initial solution's actions are not orthonormal: it must come from this solver.")
        self.basis.replace(actions, solution.images)

    @divided()
    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        options, error = self._options, iterate.error
        if not options.recycle:
            self._forget()
        self._steps += 1
        if self._steps % CHECK_EVERY == 0:
            self._check_images()
        system = GalerkinSystem.of(self.basis, curvature)
        # The policy's own residual may be no direction in which psi rises; its gradient always is.
        is_plain = options.policy == "weighted_residual" and options.preconditioner is None
        first = error.unsqueeze(-1) if is_plain else None
        v, image = self._solved(system, iterate, options.max_inner, first)
        dv, df = v - iterate.v, self._problem.mean + image - iterate.f
        if not float(error @ df) > 0:
            dv, df = self._steepest(curvature, error)
        if self.basis.count > options.max_rank:
            if options.compression is None:
                self._forget()
            else:
                compress(system, self._rhs(iterate, curvature), options.max_rank, options.compression)
                self._used.clear()  # what was dropped may be taken again
        return dv, df

    @divided()
    def finish(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor, Tensor]:
        options, system = self._options, GalerkinSystem.of(self.basis, curvature)
        if not self.basis.count:
            # A start at the mode took no step, or the rank was exceeded in the last one. Without the directions of the mean
            # the covariance would be the prior's, however much is known.
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
        """V and K v of the Newton system at an iterate, after up to `limit` products with further actions.

        Args:
            system: K + W^+ in the subspace, which grows.
            iterate: what is left of its own residual says how far the system is solved.
            limit: products.
            first: the first actions [N, b], in the place of the policy's.
        """
        options, curvature, error = self._options, system.curvature, iterate.error
        centred, rhs = iterate.f - self._problem.mean, self._rhs(iterate, curvature)
        # Whitened: sqrt(e^T W^+ e) is the residual of v itself.
        scale = float((error @ _apply(curvature.pinv, error)).clamp_min(0).sqrt())
        v, image = self._galerkin(system, rhs)
        preconditioner = None
        for inner in range(limit):
            ascends = inner > 0 or self._is_ascent(iterate, v, image)
            residual = rhs - image - _apply(curvature.pinv, v)
            # W r without a division by W: what r has of W^+ is multiplied out.
            weighted = (
                _apply(curvature.matmul, centred - image)
                + _apply(curvature.project, iterate.gradient)
                - _apply(curvature.project, v)
            )
            norm = float((weighted @ _apply(curvature.pinv, weighted)).clamp_min(0).sqrt())
            if norm <= options.forcing * scale and ascends:
                break
            if inner == 0 and first is not None:
                actions = first
            elif options.preconditioner is not None:
                preconditioner = preconditioner or self._preconditioned(options.preconditioner, curvature)
                actions = preconditioner.solve(weighted).unsqueeze(-1)
                if not ascends:
                    actions = torch.cat([actions, error.unsqueeze(-1)], dim=-1)
            else:
                actions = self._chosen(iterate, curvature, residual, weighted, system)
            change = self._act(system, actions, rhs.unsqueeze(-1))
            # Unit vectors are taken one after the other, whatever became of the last: one that adds nothing is no end.
            while change is None and options.policy == "unit" and actions.any():
                actions = self._chosen(iterate, curvature, residual, weighted, system)
                change = self._act(system, actions, rhs.unsqueeze(-1))
            if change is None:
                break  # the subspace has everything that this policy can add
            v, image = v + change[0].squeeze(-1), image + change[1].squeeze(-1)
        return v, image

    def _refine(self, system: GalerkinSystem, curvature: Curvature, count: int) -> None:
        """Further actions for the covariance: the mode's own residual is zero, so those of random right-hand sides.

        Several right-hand sides share each product, which costs far less than one for each.
        """
        size = curvature.num_points * curvature.root_size
        width = math.ceil(count / REFINED_DEPTH)
        while count > 0:
            shape = (size, min(width, count))
            base = torch.randn(shape, generator=self._generator, dtype=torch.float64, device=self._generator.device)
            rhs = curvature.pinv(curvature.root(base.to(self._problem.mean)))
            v, image = self._galerkin(system, rhs)
            start, taken = None, 0
            while taken < count:
                weighted = curvature.matmul(rhs - image) - curvature.project(v)
                norms = torch.linalg.vector_norm(weighted, dim=0)
                start = norms if start is None else start
                if taken and (norms <= REFINED * start).all():
                    break
                before = self.basis.count
                change = self._act(system, weighted[:, : count - taken], rhs)
                if change is None:
                    break
                v, image, taken = v + change[0], image + change[1], taken + self.basis.count - before
            if not taken:
                break  # the subspace is everything that the likelihood sees
            count -= taken

    def _preconditioned(self, recipe: PreconditionerRecipe, curvature: Curvature) -> NewtonPreconditioner:
        if self._factor is None:
            self._factor = latent_factor(recipe, self._problem.prior, curvature, self._generator)
            self.overhead += self._factor.build_epochs
        return NewtonPreconditioner.of(self._factor, curvature)

    def _is_ascent(self, iterate: Iterate, v: Tensor, image: Tensor) -> bool:
        return float(iterate.error @ (self._problem.mean + image - iterate.f)) > 0

    def _chosen(
        self, iterate: Iterate, curvature: Curvature, residual: Tensor, weighted: Tensor, system: GalerkinSystem
    ) -> Tensor:
        """The policy's actions [N, b]. Raises ValueError for actions of another shape."""
        by_point = self._problem.by_point
        state = ActionState(
            by_point(residual),
            by_point(weighted),
            by_point(iterate.error),
            by_point(iterate.f),
            curvature,
            lambda: self._variance(system),
            self._used,
        )
        actions = self._policy(state)
        shape = state.residual.shape
        if not isinstance(actions, Tensor) or actions.shape[:2] != shape or actions.dim() not in (2, 3):
            found = tuple(actions.shape) if isinstance(actions, Tensor) else type(actions).__name__
            raise ValueError(f"A policy must return actions {tuple(shape)}, or {(*shape, 'b')}; got {found}.")
        return actions.to(residual).reshape(len(residual), -1)

    def _act(self, system: GalerkinSystem, actions: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor] | None:
        """One product with actions [N, b]: what they add to v and K v [N, c] of right-hand sides [N, c].

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
        image = self._product(error)
        noise = _apply(curvature.pinv, error)
        length = (error @ noise) / (error @ (image + noise))
        return length * error, length * image

    def _variance(self, system: GalerkinSystem) -> Tensor:
        """diag(K - K S A A^T S^T K), [n, C]."""
        diagonal = self._problem.prior.operator.diagonal(dim1=-1, dim2=-2).detach().double()
        return self._problem.by_point(diagonal - (self.basis.images @ system.transform).square().sum(-1))

    def _check_images(self) -> None:
        """T is compared with K S on one random combination, and computed anew where it has drifted."""
        if not self.basis.count:
            return
        device = self._generator.device
        base = torch.randn(self.basis.count, generator=self._generator, dtype=torch.float64, device=device)
        base = base.to(self._problem.mean)
        direction = self.basis.actions @ base
        image = self._product(direction)
        drift = torch.linalg.vector_norm(self.basis.images @ base - image) / torch.linalg.vector_norm(image)
        if drift > LARGEST_DRIFT:
            actions = self.basis.actions.clone()
            self.num_products += actions.shape[-1]
            self.basis.replace(actions, self._problem.prior.matmul(actions))

    def _product(self, column: Tensor) -> Tensor:
        self.num_products += 1
        return self._problem.prior.matmul(column.unsqueeze(-1)).squeeze(-1)

    def _forget(self) -> None:
        self.basis.clear()
        self._used.clear()


def _apply(function: Callable[[Tensor], Tensor], column: Tensor) -> Tensor:
    """A function of columns [N, b], of one column [N]."""
    return function(column.unsqueeze(-1)).squeeze(-1)

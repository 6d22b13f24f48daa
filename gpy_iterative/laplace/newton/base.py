"""The damped Newton loop that all mode solvers share.

The mode of psi(f) = log p(y | f) - (f - m)^T K^-1 (f - m) / 2 is where v = K^-1 (f - m) equals g = d log p(y | f) / df.
Every iterate keeps f = m + K v, so that psi and its gradient g - v cost no kernel product. A Newton step is a Gaussian
process regression with noise W^+; how it is solved is what the solvers differ in (`StepSolver`).

Tatzel, Wenger, Schneider and Hennig, "Accelerating Non-Conjugate Gaussian Processes By Trading Off Computation For
Uncertainty"; Rasmussen and Williams 2006, section 3.4, for the dense form.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag, check_fraction
from gpy_iterative.errors import NonFiniteError, float64_first
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import (
    STEP_FLOOR,
    CurvatureFloor,
    CurvatureKind,
    PointwiseLikelihood,
    check_curvature_kind,
)
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.solution import SolveProgress, SolveStats, SolveStatus

#: A step is halved until psi rises by this share of what its slope promises, or its length is below the least: from the
#: prior mean, the first step for counts of 1e9 with a log link is some 1e9 times too long.
ARMIJO, SHORTEST_STEP = 1e-4, torch.finfo(torch.float64).eps
#: Psi tells steps apart whose promise is so many times its rounding, unless its terms are large and cancel: a difference
#: of this part of it may be rounding, too.
TOLD, UNTOLD = 100, 1e-6
#: Steps in a row that improve neither psi nor its gradient: the arithmetic allows no more.
PATIENCE = 3
#: An improvement of the gradient's norm that counts.
LEAST_PROGRESS = 0.01


@dataclass(frozen=True)
class Problem:
    """What is solved, and what a solver is given for it.

    Attributes:
        prior: m and K.
        likelihood: log p(y | f).
        initial_weights, initial_solution, generator, callback: as in `LaplaceSolver.solve`.
    """

    prior: LatentPrior
    likelihood: PointwiseLikelihood
    initial_weights: Tensor | None = None
    initial_solution: LaplaceSolution | None = None
    generator: torch.Generator | None = None
    callback: Callable[[SolveProgress], None] | None = None

    @property
    def mean(self) -> Tensor:
        """The prior mean m [n C], float64."""
        return self.prior.mean.detach().double().flatten()

    def by_point(self, flat: Tensor) -> Tensor:
        """[n C] as [n, C]."""
        return flat.view(self.prior.num_points, self.prior.num_latents)


@dataclass(frozen=True)
class Iterate:
    """Where Newton's method stands.

    Attributes:
        f, v, gradient: [n C], with f = m + K v and the gradient of log p(y | f).
        log_joint: psi.
    """

    f: Tensor
    v: Tensor
    gradient: Tensor
    log_joint: float

    @property
    def error(self) -> Tensor:
        """The gradient of psi in dual coordinates, g - v."""
        return self.gradient - self.v

    @property
    def stationarity(self) -> float:
        """|g - v| / |g|; absolute where g is zero."""
        return float(torch.linalg.vector_norm(self.error)) / (float(torch.linalg.vector_norm(self.gradient)) or 1.0)


class StepSolver(ABC):
    """Solves the Newton systems of one mode, and keeps what they have in common.

    Attributes:
        num_products: kernel products so far; one with several actions counts once.
        overhead: passes over the kernel matrix that set the solver up.
    """

    num_products: int = 0
    overhead: float = 0.0

    @abstractmethod
    def recall(self, solution: LaplaceSolution) -> None:
        """Takes over what was computed for the same prior. Raises ValueError where that is not this solver's kind."""

    @abstractmethod
    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        """The direction (dv, df = K dv), [n C] each, in which psi rises."""

    @abstractmethod
    def finish(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor, Tensor]:
        """S, T and A for the covariance at the mode."""


@dataclass(frozen=True, kw_only=True)
class LaplaceSolver(ABC):
    """Options of a mode solver.

    Args:
        max_outer: Newton steps at the most.
        tolerance: the mode is reached when |g - v| <= tolerance |g|; None lets the solver choose by dtype.
        line_search: halve steps that do not raise the log joint density enough. Without it counts overflow.
        curvature: "auto" is the negative Hessian where the likelihood is log-concave, else the Fisher information where
            one is registered, else the Hessian's absolute value, which Newton steps towards a mode take in both cases;
            "hessian", "fisher", "abs" insist.

    Raises:
        ValueError: an option outside its range.
    """

    max_outer: int = 50
    tolerance: float | None = None
    line_search: bool = True
    curvature: CurvatureKind = "auto"

    #: What lets a mode take longer, and what besides lets a subspace do more.
    _budget: ClassVar[str] = "max_outer"
    _room: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_count("max_outer", self.max_outer)
        check_flag("line_search", self.line_search)
        if self.tolerance is not None:
            check_fraction("tolerance", self.tolerance)
        check_curvature_kind(self.curvature)

    @abstractmethod
    def _step_solver(self, problem: Problem) -> StepSolver:
        """What solves the Newton systems of one problem."""

    @abstractmethod
    def _final_floor(self, dtype: torch.dtype) -> CurvatureFloor:
        """Of the curvature in the covariance."""

    @abstractmethod
    def _default_tolerance(self, dtype: torch.dtype) -> float:
        """Where `tolerance` is None."""

    def advice(self, solution: LaplaceSolution, dtype: torch.dtype) -> str:
        """One or two sentences for a user whose mode was not reached, with kernel products in a dtype."""
        name = type(self).__name__
        if solution.status is SolveStatus.BUDGET_EXHAUSTED:
            lever = f"Raise {self._budget} of {name}, or loosen its tolerance."
        else:
            lever = (
                f"The arithmetic{self._room and ', or the subspace,'} allows no more: {float64_first(dtype)}loosen the "
                f"tolerance of {name}, {self._room}or keep outputscale and likelihood parameters in bounds."
            )
        return (
            f"The mode was not reached in {solution.num_outer} Newton steps and {solution.num_kernel_products} kernel "
            f"products: relative gradient {solution.stationarity:.2g}, status {solution.status.name.lower()}. {lever}"
        )

    @torch.no_grad()
    def solve(
        self,
        prior: LatentPrior,
        likelihood: PointwiseLikelihood,
        *,
        initial_weights: Tensor | None = None,
        initial_solution: LaplaceSolution | None = None,
        generator: torch.Generator | None = None,
        callback: Callable[[SolveProgress], None] | None = None,
    ) -> LaplaceSolution:
        """Finds the mode.

        Args:
            prior: of n points and C functions.
            likelihood: with its targets.
            initial_weights: v [n, C] of a similar problem, where this one starts (one product). Bad ones cost nothing but
                that product: the better of them and v = 0 is taken. Good ones save Newton steps, not the actions that the
                covariance needs.
            initial_solution: of this solver for the same prior and another likelihood, whose W has the same range: where
                this one starts, with all actions and at no product. In the place of initial_weights.
            generator: for the actions that refine a covariance.
            callback: told of every Newton step; `epochs` are kernel products.

        Returns:
            A LaplaceSolution. What was not reached within the budget is a status there, not an exception.

        Raises:
            ValueError: no points; an initial solution of another solver or another size.
            NonFiniteError: a NaN or an infinity appeared; nothing of the caller's was changed.
        """
        if not prior.size:
            raise ValueError("There are no observed targets: without any there is no mode to find, only the prior.")
        return self._find_mode(Problem(prior, likelihood, initial_weights, initial_solution, generator, callback))

    def _find_mode(self, problem: Problem) -> LaplaceSolution:
        start = time.perf_counter()
        dtype, likelihood, callback = problem.prior.operator.dtype, problem.likelihood, problem.callback
        tolerance = self.tolerance or self._default_tolerance(dtype)
        steps = self._step_solver(problem)
        iterate = self._start(problem, steps)
        status, outer, patience = SolveStatus.BUDGET_EXHAUSTED, 0, PATIENCE
        best_error, best_joint = iterate.stationarity, iterate.log_joint
        while True:
            if iterate.stationarity <= tolerance:
                status = SolveStatus.CONVERGED
                break
            if outer == self.max_outer:
                break
            weights = likelihood.curvature(
                problem.by_point(iterate.f), likelihood.step_kind(self.curvature), STEP_FLOOR
            )
            following = self._damped(problem, iterate, *steps.step(iterate, weights))
            outer += 1
            if following is None:
                status = SolveStatus.STAGNATED
                break
            iterate = following
            if callback is not None:
                callback(SolveProgress(outer, steps.num_products, {"mode": iterate.stationarity}))
            rises = iterate.log_joint > best_joint + 10 * torch.finfo(torch.float64).eps * abs(best_joint)
            improves = iterate.stationarity < (1 - LEAST_PROGRESS) * best_error
            patience = PATIENCE if rises or improves else patience - 1
            best_error, best_joint = min(best_error, iterate.stationarity), max(best_joint, iterate.log_joint)
            if patience == 0:
                status = SolveStatus.STAGNATED
                break
        final = likelihood.curvature(problem.by_point(iterate.f), self.curvature, self._final_floor(dtype))
        actions, images, transform = steps.finish(iterate, final)
        return LaplaceSolution(
            value=problem.by_point(iterate.v),
            residual=problem.by_point(iterate.error),
            status=status,
            stats=SolveStats(
                iterations=outer,
                epochs=float(steps.num_products),
                overhead=steps.overhead,
                residual_norms={"mode": iterate.stationarity},
                seconds=time.perf_counter() - start,
            ),
            latent=problem.by_point(iterate.f),
            curvature=final,
            actions=actions,
            images=images,
            transform=transform,
            log_joint=iterate.log_joint,
        )

    def _start(self, problem: Problem, steps: StepSolver) -> Iterate:
        weights, solution = problem.initial_weights, problem.initial_solution
        mean, shape = problem.mean, problem.prior.mean.shape
        cold = evaluated(problem, mean, torch.zeros_like(mean))
        if solution is not None:
            if solution.latent.shape != shape:
                raise ValueError(
                    f"The initial solution is for latent values {tuple(solution.latent.shape)}, the prior for "
                    f"{tuple(shape)}."
                )
            steps.recall(solution)
            f, v = solution.latent.flatten(), solution.value.flatten()
        elif weights is not None and weights.shape == shape and torch.isfinite(weights).all():
            v = weights.to(mean).flatten()
            steps.num_products += 1
            f = mean + problem.prior.matmul(v.unsqueeze(-1)).squeeze(-1)
        else:
            return cold
        joint = log_joint(problem, f, v)
        return evaluated(problem, f, v) if math.isfinite(joint) and joint > cold.log_joint else cold

    def _damped(self, problem: Problem, iterate: Iterate, dv: Tensor, df: Tensor) -> Iterate | None:
        """The iterate after the longest step that raises psi enough; None where none does.

        Where psi cannot tell for rounding, its slope at the step's end does (Hager and Zhang 2005, the approximate Wolfe
        condition): a step with a curvature that is not the Hessian may overshoot, and would do so for ever.
        """
        slope = float(iterate.error @ df)
        length, magnitude = 1.0, abs(iterate.log_joint)
        told = 10 * TOLD * torch.finfo(torch.float64).eps * magnitude
        while True:
            f, v = iterate.f + length * df, iterate.v + length * dv
            promise, joint = length * slope, log_joint(problem, f, v)
            rises = promise > told and joint >= iterate.log_joint + ARMIJO * promise
            if rises or not self.line_search:
                return evaluated(problem, f, v)
            if joint >= iterate.log_joint - UNTOLD * magnitude:
                following = evaluated(problem, f, v)
                if float(following.error @ df) >= (2 * ARMIJO - 1) * slope:
                    return following
            length /= 2
            if length < SHORTEST_STEP:
                return None


def log_joint(problem: Problem, f: Tensor, v: Tensor) -> float:
    """Psi up to a constant, minus infinity where f is out of range."""
    value = problem.likelihood.total(problem.by_point(f)) - 0.5 * float(v @ (f - problem.mean))
    return -math.inf if math.isnan(value) else value


def evaluated(problem: Problem, f: Tensor, v: Tensor) -> Iterate:
    """Psi and its gradient at f = m + K v. Raises NonFiniteError where they are not finite."""
    joint = log_joint(problem, f, v)
    if not math.isfinite(joint):
        raise NonFiniteError(
            f"The log density of {problem.likelihood.name} is not finite: check targets, the prior's mean and outputscale."
        )
    return Iterate(f, v, problem.likelihood.gradient(problem.by_point(f)).flatten(), joint)

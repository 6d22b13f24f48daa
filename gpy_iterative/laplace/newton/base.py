"""The damped Newton loop.

At the mode of psi(f) = log p(y | f) - (f - m)^T K^-1 (f - m) / 2, v = K^-1 (f - m) equals g = d log p(y | f) / df. Iterates
keep f = m + K v: psi and g - v cost no kernel product. A step is a Gaussian process regression with noise W^+ (Rasmussen
and Williams 2006, section 3.4).
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor

from gpy_iterative.checks import check_count, check_fraction
from gpy_iterative.errors import NonFiniteError, float64_first
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import STEP_FLOOR, CurvatureFloor, PointwiseLikelihood, check_finite_at
from gpy_iterative.linear_operators.extensions import in_float64
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.solution import Solution, SolveProgress, SolveStats, SolveStatus
from gpy_iterative.training.training_system import MOST_ROWS_IN_FLOAT64, ROUNDING_IN_TRAINING, has_evaluated_matrix

EPS = torch.finfo(torch.float64).eps
#: Share of the promised rise that a step must reach (with less, steps along half of the Hessian reflect at the maximum);
#: shortest step.
ARMIJO, SHORTEST_STEP = 0.1, EPS
#: Psi decides if the promised rise exceeds its rounding TOLD times; a relative fall below UNTOLD may be rounding.
TOLD, UNTOLD = 100, 1e-6
#: Largest floor of a step's curvature, relative to the prior's least precision: it hardly holds a point back. Beside large
#: curvatures the relative floor alone would.
MOST_FLOOR = 0.1


class Inverse:
    """Q Q^T, what a solver has computed of (K + W^+)^-1: (S^T (K + W^+) S)^-1 between actions S; float64."""

    actions: Tensor  # S [n C, B]
    images: Tensor  # T = K S
    root: Tensor  # Q [n C, r]
    image_of_root: Tensor  # K Q

    @property
    def rank(self) -> int:
        """Number of actions, B."""
        return self.actions.shape[-1]

    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        """Blocks [n, C, C] of K - K Q Q^T K."""
        known = self.image_of_root.view(*prior.mean.shape, -1)
        return prior.point_blocks().double() - known @ known.mT


@dataclass(frozen=True)
class LaplaceSolution(Solution):
    """The mode of p(f | y), and the computed part of (K + W^+)^-1; float64.

    `value` is the weights v [n, C], `residual` d log p(y | f) / df - v.

    Attributes:
        latent: f = m + K v [n, C].
        curvature: W at the mode.
        inverse: that part: actions S, images K S, root Q, image_of_root K Q.
        log_joint: sum log p(y | f) - v^T (f - m) / 2.
    """

    latent: Tensor
    curvature: Curvature
    inverse: Inverse
    log_joint: float

    @property
    def converged(self) -> bool:
        """Whether the mode was reached."""
        return self.status is SolveStatus.CONVERGED

    @property
    def num_outer(self) -> int:
        """Newton steps."""
        return self.stats.iterations

    @property
    def num_kernel_products(self) -> int:
        """Kernel products, of any width."""
        return round(self.stats.epochs)

    @property
    def stationarity(self) -> float:
        """Gradient norm of the log joint density, relative to that of the log likelihood."""
        return self.stats.residual_norms["mode"]


@dataclass(frozen=True)
class Problem:
    prior: LatentPrior
    likelihood: PointwiseLikelihood
    initial_weights: Tensor | None = None
    initial_solution: LaplaceSolution | None = None
    generator: torch.Generator | None = None
    callback: Callable[[SolveProgress], None] | None = None

    @property
    def is_single_precision(self) -> bool:
        return self.prior.operator.dtype != torch.float64

    @property
    def mean(self) -> Tensor:
        return self.prior.mean.detach().double().flatten()

    @cached_property
    def prior_blocks(self) -> Tensor:
        """Blocks [n, C, C] of K."""
        return self.prior.point_blocks().detach().double()

    def by_point(self, flat: Tensor) -> Tensor:
        return flat.view(self.prior.num_points, self.prior.num_latents)

    def is_rounded(self, curvature: Curvature) -> bool:
        """Whether rounding K moves the log density by too much, as for exact models, and float64 would not."""
        is_refinement = self.initial_solution is not None  # in the mode's precision
        if is_refinement or not gains_by_float64(self.prior):
            return False
        signal = float((curvature.blocks() * self.prior_blocks).sum())
        return torch.finfo(self.prior.operator.dtype).eps * (self.prior.size + signal) > ROUNDING_IN_TRAINING

    def log_joint(self, f: Tensor, v: Tensor) -> float:
        # Minus infinity for f out of range.
        value = self.likelihood.total(self.by_point(f)) - 0.5 * float(v @ (f - self.mean))
        return -math.inf if math.isnan(value) else value

    def evaluated(self, f: Tensor, v: Tensor) -> "Iterate":
        joint, latent = self.log_joint(f, v), self.by_point(f)
        if not math.isfinite(joint):
            name = f"The log density of {self.likelihood.name}"
            check_finite_at(latent, name, self.likelihood.log_prob(latent))
            raise NonFiniteError(f"{name} is not finite: check targets, the prior's mean and outputscale.")
        return Iterate(f, v, self.likelihood.gradient(latent).flatten(), joint)

    def check_mean(self) -> None:
        unknown = (~torch.isfinite(self.prior.mean)).nonzero()
        if len(unknown):
            index = tuple(unknown[0].tolist())
            raise NonFiniteError(
                f"The prior's mean is {float(self.prior.mean[index])} at datum {index[0]}: check the inputs and the mean's "
                "parameters. If the mean has the logarithm of an exposure, leave out rows whose exposure is not above zero."
            )


@dataclass(frozen=True)
class Iterate:
    """The vectors f, v, g, [n C] each, and psi."""

    f: Tensor
    v: Tensor
    gradient: Tensor
    log_joint: float

    @property
    def error(self) -> Tensor:
        """Psi's gradient."""
        return self.gradient - self.v

    @property
    def stationarity(self) -> float:
        """|g - v| / |g|; |g - v| for g = 0."""
        return float(torch.linalg.vector_norm(self.error)) / (float(torch.linalg.vector_norm(self.gradient)) or 1.0)

    def is_rounding(self, curvature: Curvature) -> bool:
        """Whether the error may come from rounding f, which changes g by W eps f."""
        change = curvature.matmul(self.f.unsqueeze(-1))
        return float(torch.linalg.vector_norm(self.error)) <= EPS * float(torch.linalg.vector_norm(change))


class StepSolver(ABC):
    num_products: int = 0
    #: Passes over the kernel matrix for setup.
    overhead: float = 0.0

    @abstractmethod
    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        """An ascent direction dv and K dv."""

    @abstractmethod
    def finish(self, iterate: Iterate, curvature: Curvature) -> Inverse:
        """The computed part of (K + W^+)^-1 at the mode."""


@dataclass(frozen=True, kw_only=True)
class LaplaceSolver(ABC):
    """Options of a mode solver.

    Args:
        max_outer: most Newton steps.
        tolerance: of |g - v| / |g|, unless rounding hides g - v; None chooses by dtype.
    """

    max_outer: int = 100
    tolerance: float | None = None

    #: For float64 and float32 kernels; floors are the covariance's.
    _tolerances: ClassVar[tuple[float, float]]
    _floors: ClassVar[tuple[CurvatureFloor, CurvatureFloor]]
    #: Words of `advice`.
    _budget: ClassVar[str] = "max_outer"
    _room: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_count("max_outer", self.max_outer)
        if self.tolerance is not None:
            check_fraction("tolerance", self.tolerance)

    @abstractmethod
    def _step_solver(self, problem: Problem) -> StepSolver: ...

    def for_predictions(self, size: int) -> "LaplaceSolver":
        """The solver of predictions from n C = `size` latent values: options left unsaid may differ there."""
        return self

    def prior_for(self, prior: LatentPrior) -> LatentPrior:
        """The prior in the precision in which this solver computes."""
        return prior

    def advice(self, solution: LaplaceSolution, dtype: torch.dtype) -> str:
        """Advice when the mode was not reached."""
        name = type(self).__name__
        if solution.status is SolveStatus.BUDGET_EXHAUSTED:
            lever = f"To reach it {float64_first(dtype)}raise {self._budget} of {name}, or loosen its tolerance."
        else:
            lever = (
                f"The arithmetic{self._room and ', or the subspace,'} allows no more: {float64_first(dtype)}loosen the "
                f"tolerance of {name}, {self._room}or keep outputscale and likelihood parameters in bounds."
            )
        return (
            f"The mode was not reached in {solution.num_outer} Newton steps and {solution.num_kernel_products} kernel "
            f"products: relative gradient {solution.stationarity:.2g}, status {solution.status.name.lower()}. {lever}"
        )

    def mode(
        self,
        prior: LatentPrior,
        likelihood: PointwiseLikelihood,
        *,
        initial_weights: Tensor | None,
        generator: torch.Generator,
        callback: Callable[[SolveProgress], None] | None,
    ) -> tuple[LatentPrior, LaplaceSolution]:
        """The prior in the precision that the mode needs, and the mode; see `solve`."""
        prior = self.prior_for(prior)
        solve = partial(self.solve, likelihood=likelihood, generator=generator, callback=callback)
        solution = solve(prior, initial_weights=initial_weights)
        if solution.status is SolveStatus.STAGNATED and gains_by_float64(prior):
            prior = in_double(prior)
            # A cold search stays cold: it finds the actions that a bound needs.
            solution = solve(prior, initial_weights=None if initial_weights is None else solution.value)
        return prior, solution

    @torch.inference_mode(False)
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
        """Finds the mode; see the solution's status.

        Args:
            initial_weights: warm start v [n, C]; costs one product.
            initial_solution: this solver's, for the same prior and a W of the same range.
            generator: for covariance actions.
            callback: called after every Newton step; `epochs` are kernel products.

        Raises:
            ValueError: no points; an unsuitable initial solution.
            NonFiniteError: a value is not finite.
        """
        if not prior.size:
            raise ValueError("There are no observed targets: without any there is no mode to find, only the prior.")
        if initial_solution is not None and initial_solution.latent.shape != prior.mean.shape:
            raise ValueError(
                f"The initial solution is for latent values {tuple(initial_solution.latent.shape)}, the prior for "
                f"{tuple(prior.mean.shape)}."
            )
        problem = Problem(prior, likelihood, initial_weights, initial_solution, generator, callback)
        problem.check_mean()
        return self._find_mode(problem)

    def _find_mode(self, problem: Problem) -> LaplaceSolution:
        start, steps = time.perf_counter(), self._step_solver(problem)
        iterate, status, outer = self._iterated(problem, steps)
        floor = self._floors[problem.is_single_precision]
        curvature = problem.likelihood.curvature(problem.by_point(iterate.f), floor)
        inverse = steps.finish(iterate, curvature)
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
            curvature=curvature,
            inverse=inverse,
            log_joint=iterate.log_joint,
        )

    def _step_floor(self, problem: Problem) -> CurvatureFloor:
        variances = problem.prior_blocks.diagonal(dim1=-2, dim2=-1)
        return replace(STEP_FLOOR, most=float(MOST_FLOOR / variances.max()))

    def _iterated(self, problem: Problem, steps: StepSolver) -> tuple[Iterate, SolveStatus, int]:
        tolerance = self.tolerance or self._tolerances[problem.is_single_precision]
        iterate = self._start(problem, steps)
        floor = self._step_floor(problem)
        for outer in range(self.max_outer + 1):
            if iterate.stationarity <= tolerance:
                return iterate, SolveStatus.CONVERGED, outer
            curvature = problem.likelihood.step_curvature(problem.by_point(iterate.f), floor)
            if iterate.is_rounding(curvature):
                return iterate, SolveStatus.CONVERGED, outer
            if problem.is_rounded(curvature):
                return iterate, SolveStatus.STAGNATED, outer
            if outer == self.max_outer:
                break
            following = self._damped(problem, iterate, *steps.step(iterate, curvature))
            if following is None:
                return iterate, SolveStatus.STAGNATED, outer + 1
            iterate = following
            if problem.callback is not None:
                problem.callback(SolveProgress(outer + 1, steps.num_products, {"mode": iterate.stationarity}))
        return iterate, SolveStatus.BUDGET_EXHAUSTED, outer

    def _start(self, problem: Problem, steps: StepSolver) -> Iterate:
        weights, solution = problem.initial_weights, problem.initial_solution
        mean, shape = problem.mean, problem.prior.mean.shape
        cold = problem.evaluated(mean, torch.zeros_like(mean))
        if solution is not None:
            f, v = solution.latent.flatten(), solution.value.flatten()
        elif weights is not None and weights.shape == shape and torch.isfinite(weights).all():
            v = weights.to(mean).flatten()
            steps.num_products += 1
            f = mean + problem.prior.matmul(v.unsqueeze(-1)).squeeze(-1)
        else:
            return cold
        joint = problem.log_joint(f, v)
        return problem.evaluated(f, v) if math.isfinite(joint) and joint > cold.log_joint else cold

    def _damped(self, problem: Problem, iterate: Iterate, dv: Tensor, df: Tensor) -> Iterate | None:
        # Where rounding hides the rise, the slope at the step's end decides (approximate Wolfe condition, Hager and Zhang
        # 2005).
        slope = float(iterate.error @ df)
        length, magnitude = 1.0, abs(iterate.log_joint)
        told = 10 * TOLD * EPS * magnitude
        while length >= SHORTEST_STEP:
            f, v = iterate.f + length * df, iterate.v + length * dv
            promise, joint = length * slope, problem.log_joint(f, v)
            if promise > told and joint >= iterate.log_joint + ARMIJO * promise:
                return problem.evaluated(f, v)
            if joint >= iterate.log_joint - UNTOLD * magnitude:
                following = problem.evaluated(f, v)
                if float(following.error @ df) >= (2 * ARMIJO - 1) * slope:
                    return following
            length /= 2
        return None


def gains_by_float64(prior: LatentPrior) -> bool:
    """Whether K can be computed in float64, but is not, and is small enough for it."""
    is_evaluated = has_evaluated_matrix(prior.operator, prior.num_points)
    return prior.operator.dtype != torch.float64 and not is_evaluated and prior.size <= MOST_ROWS_IN_FLOAT64


def in_double(prior: LatentPrior) -> LatentPrior:
    return LatentPrior(in_float64(prior.operator), prior.mean.double())

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import VarianceWarning, warn
from gpy_iterative.exact.prediction.blocks import as_columns, from_columns, scatter_rows
from gpy_iterative.exact.prediction.new_observations import has_grown_from, locally_corrected, new_rows, padded
from gpy_iterative.exact.prediction.projection import (
    ExactProjection,
    GalerkinProjection,
    KroneckerProjection,
    Projection,
    ProjectionRecipe,
)
from gpy_iterative.exact.prediction.variance_error import VarianceError, lower_variance_error
from gpy_iterative.exact.probes import RandomFeatures, frequency_draws
from gpy_iterative.linear_operators.extensions import kernel_inputs
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial_inputs import CENTRE_ROWS
from gpy_iterative.linear_solvers.base import Solver, product_rounding
from gpy_iterative.linear_solvers.cholesky import Cholesky, CholeskyFactor, ExactFactor
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.default import default_solver
from gpy_iterative.linear_solvers.exact_factors import structure
from gpy_iterative.linear_solvers.kronecker import KroneckerFactor
from gpy_iterative.linear_solvers.low_rank import LowRankFactor
from gpy_iterative.linear_solvers.solution import Solution, SolveStats, SolveStatus, warn_of
from gpy_iterative.random_numbers import normal
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.progress import Progress, reporting_solve
from gpy_iterative.training.run import stream_generator
from gpy_iterative.training.snapshot import OwnLock
from gpy_iterative.training.training_system import TrainingSystem

SOLVER, SAMPLE, NOISE = range(3)
#: Largest residual in standard deviations of the noise: per datum, and for conjugate gradients its norm, which bounds
#: errors of means in posterior standard deviations.
NOISE_PART, NOISE_NORM = 0.01, 0.3
#: Least relative residual.
SMALLEST_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
#: Median above which variances are warned of.
LARGE_VARIANCE_ERROR = 0.1
#: Largest growth of a projection's rank, as a factor.
MAX_GROWTH = 2


@dataclass(frozen=True)
class PriorDraws:
    draws: Draws
    solutions: Tensor  # H^-1 xi [*b, m, s], or a start
    num_solved: int | None = None  # rows; None is all

    def for_system(self, system: TrainingSystem) -> "PriorDraws | None":
        """The draws in the system's dtype; None for another shape or device."""
        like = system.residual
        if (self.solutions.shape[:-1], self.solutions.device) != (system.operator.shape[:-1], like.device):
            return None
        own = {name: tensor.to(like.dtype) for name, tensor in self.draws.items() if name in ("weights", "noise_base")}
        return PriorDraws(self.draws | own, self.solutions.to(like.dtype), self.num_solved)

    def extended(self, system: TrainingSystem, seed: int) -> "PriorDraws":
        """With new data at the end, where solutions are zero."""
        shape, base = system.operator.shape[:-1], self.draws["noise_base"]
        generator = stream_generator(seed, NOISE, base.shape[-2])
        noise = normal((shape[-1] - base.shape[-2], base.shape[-1]), generator, base.device, base.dtype)
        noise = noise.expand(*shape[:-1], *noise.shape)
        base = torch.cat([base.expand(*shape[:-1], *base.shape[-2:]), noise], dim=-2)
        solved = self.solutions.shape[-2] if self.num_solved is None else self.num_solved
        return PriorDraws(self.draws | {"noise_base": base}, padded(self.solutions, shape), solved)

    def joined(self, other: "PriorDraws") -> "PriorDraws":
        draws = self.draws | {
            name: torch.cat([tensor, other.draws[name]], dim=-1)
            for name, tensor in self.draws.items()
            if name not in frequency_draws(self.draws)
        }
        return PriorDraws(draws, torch.cat([self.solutions, other.solutions], dim=-1))


def prediction_solver(solver: Solver, operator: LinearOperator, columns: Tensor) -> Solver:
    """The default solver, with the tolerance that these columns [*b, n, s] need.

    It goes on until its residual stops falling: rounding errors of a residual hardly change means.
    """
    if not isinstance(operator, NoisyLinearOperator):
        return solver
    size = operator.shape[-1]
    part = min(NOISE_PART, NOISE_NORM / size**0.5) if isinstance(solver, ConjugateGradients) else NOISE_PART
    wanted = max(part * _least_relative_noise(operator, columns), SMALLEST_TOLERANCE[columns.dtype])
    return replace(solver, tolerance=min(solver.tolerance, wanted))


def _least_relative_noise(operator: NoisyLinearOperator, columns: Tensor) -> float:
    """Standard deviation of the noise over the root mean square of the largest of these columns [*b, n, s]."""
    sizes = columns.square().mean(-2).sqrt()
    # The harmonic mean: data of small noise determine the posterior.
    noise = operator.noise.reciprocal().mean(-1, keepdim=True).reciprocal()
    return float((noise.sqrt() / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)).min())


class TrainingSolves:
    """The linear solves for one set of hyperparameters and training data. Construction solves for the mean.

    Args:
        solver: None is the default, of which a residual that means hardly see gives no warning.
        seed: of all draws; the order of calls does not matter.
        initial_weights, draws: starts; ignored if they do not fit.
        known: solves for the first data at these hyperparameters, to extend; only a start if the new data change the prior
            of the old ones.

    Attributes:
        start: H^-1 (y - mean) [*b, m].
        weights: the same [*b, n], zero for unobserved data.
    """

    def __init__(
        self,
        system: TrainingSystem,
        solver: Solver | None,
        *,
        recipe: ProjectionRecipe,
        is_exact: bool,
        num_frequencies: int,
        seed: int,
        initial_weights: Tensor | None = None,
        draws: PriorDraws | None = None,
        known: "TrainingSolves | None" = None,
        progress: Progress = False,
    ) -> None:
        self.system, self.solver = system, default_solver(system.operator) if solver is None else solver
        self._is_default = solver is None
        self._recipe, self._seed, self._progress = recipe, seed, progress
        self._is_exact, self.is_checked = is_exact or isinstance(self.solver, Cholesky), False
        self._lock = OwnLock()
        self._cholesky: ExactFactor | None = None
        self._projection: Projection | None = None
        self.features = RandomFeatures(num_probes=1, num_frequencies=num_frequencies, corrected=False, widened=True)
        self._has_solved_draws = False
        if known is None:
            self.draws = None if draws is None else draws.for_system(system)
            guess, num_known = _fitting(initial_weights, system), None
        else:
            self.draws = None if known.draws is None else known.draws.extended(system, seed).for_system(system)
            if known.system.operator.dtype == system.operator.dtype and has_grown_from(known.system, system):
                self._carry_over(known)
            guess = padded(known.start.unsqueeze(-1), system.residual.shape).squeeze(-1).to(system.residual)
            num_known = known.system.operator.shape[-1]
        solution, self.status, self.stats = self._solve(
            system.residual.unsqueeze(-1), None if guess is None else guess.unsqueeze(-1), num_known
        )
        self.start, self.weights = solution.squeeze(-1), scatter_rows(solution, system.observed).squeeze(-1)

    @torch.no_grad()
    def _carry_over(self, known: "TrainingSolves") -> None:
        operator, observed, size = self.system.operator, self.system.observed, known.system.operator.shape[-1]
        factor, projection = known._cholesky, known._projection
        if self.system.prior.loc.dtype != torch.float64 and not _are_rounded_alike(known.system, self.system):
            return
        if self._is_exact and factor is not None:
            if structure(operator) is None:
                if not isinstance(factor, CholeskyFactor):  # a batch of new data has no structure
                    factor = Cholesky().factorize(known.system.operator.to_dense())
                self._cholesky = factor.extended(new_rows(operator, size))
        elif not self._is_exact and isinstance(projection, GalerkinProjection) and projection.local is not None:
            rank = projection.basis.shape[-1] + operator.shape[-1] - size
            if rank <= MAX_GROWTH * self._recipe.sizes_for(operator)[0]:
                self._projection = projection.extended(operator, new_rows(operator, size), observed)
                self.is_checked = known.is_checked

    @torch.inference_mode(False)  # later calls may need gradients
    @torch.no_grad()
    def projection(self) -> Projection:
        system = self.system
        with self._lock:
            if self._projection is None and self._is_exact:
                factor = self.cholesky()
                if isinstance(factor, LowRankFactor):
                    self._projection = GalerkinProjection(scatter_rows(factor.basis(), system.observed), None)
                else:
                    kind = KroneckerProjection if isinstance(factor, KroneckerFactor) else ExactProjection
                    self._projection = kind(factor, system.observed)
            elif self._projection is None:
                self._projection = self._recipe.build(system.operator, system.observed)
            return self._projection

    @torch.inference_mode(False)
    @torch.no_grad()
    def check(self, variance: Tensor, prior_variance: Tensor, test_train: LinearOperator) -> None:
        """Warns if the first variances [*batch, t] are far too large, by a few products at eight of them."""
        projection = self.projection()
        if isinstance(projection, GalerkinProjection) and not self.is_checked and variance.numel():
            self.is_checked = True
            error = lower_variance_error(self.system, projection, variance, prior_variance, test_train)
            self.warn_of(error, "at least ")

    def warn_of(self, error: VarianceError, bound: str = "") -> None:
        """VarianceWarning if the error is large."""
        if error.median > LARGE_VARIANCE_ERROR:
            rank, neighbours = self._recipe.sizes_for(self.system.operator)
            warn(
                f"Predictive variances are wrong by a factor of {bound}{math.exp(error.median):.2f} (median of "
                f"{error.num_points}). Raise the posterior's rank (now {rank}) or num_neighbours (now {neighbours}), or "
                f"take solver=gpi.solvers.Cholesky(): exact, {2.4e-8 * self.system.operator.shape.numel():.1f} GB.",
                VarianceWarning,
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def prior_draws(self, count: int) -> PriorDraws:
        with self._lock:
            known = self.draws
            if known is not None and not self._has_solved_draws:
                known = self._solved(known.draws, known.solutions, known.num_solved)
            size = 0 if known is None else known.solutions.shape[-1]
            if known is None or size < count:
                draws = self._drawn(range(size, count), None if known is None else known.draws)
                new = self._solved(draws)
                known = new if known is None else known.joined(new)
            self.draws, self._has_solved_draws = known, True
            return known

    def _drawn(self, numbers: range, known: Draws | None) -> Draws:
        """Each sample has its own seed; all share the known or the first one's frequencies."""
        terms, parts = self.system.terms(), []
        for number in numbers:
            others, generator = parts[0] if parts else known, stream_generator(self._seed, SAMPLE, number)
            parts.append(self.features.draw(self.system.operator, terms, generator, others=others))
        shared = frequency_draws(parts[0])
        own = parts[0].keys() - shared.keys()
        return shared | {name: torch.cat([part[name] for part in parts], dim=-1) for name in own}

    def _solve(
        self, columns: Tensor, guess: Tensor | None = None, num_known: int | None = None
    ) -> tuple[Tensor, SolveStatus, SolveStats]:
        """H^-1 columns [*b, m, s]; `guess` is corrected after the first `num_known` rows."""
        operator, start = self.system.operator, time.perf_counter()
        rhs = as_columns(columns, operator.dim())
        if isinstance(self.solver, Cholesky):
            value = self.cholesky().solve(rhs)
            stats = SolveStats(0, 0.0, 0.0, {}, time.perf_counter() - start)
            return from_columns(value, columns), SolveStatus.CONVERGED, stats
        epochs = 0.0
        if guess is not None:
            guess = as_columns(guess, operator.dim())
            if num_known is not None:
                guess, epochs = locally_corrected(operator, rhs, guess, num_known)
        solver = prediction_solver(self.solver, operator, rhs) if self._is_default else self.solver
        with reporting_solve(self._progress) as callback:
            solution = solver.solve(
                operator, rhs, initial_guess=guess, generator=stream_generator(self._seed, SOLVER), callback=callback
            )
        if solution.status is not SolveStatus.CONVERGED and not self._is_hardly_seen(solution, rhs, solver.tolerance):
            warn_of("A linear solve for predictions", solution.status, solution.stats, rhs.dtype)
        stats = replace(solution.stats, overhead=solution.stats.overhead + epochs, seconds=time.perf_counter() - start)
        return from_columns(solution.value, columns), solution.status, stats

    def _is_hardly_seen(self, solution: Solution, rhs: Tensor, tolerance: float) -> bool:
        """Whether columns missed the tolerance only by rounding, or by a far field's errors below a part of the noise.

        Both are spread over the data, unlike a residual of conjugate gradients.
        """
        if not (self._is_default and solution.status is SolveStatus.STAGNATED):
            return False
        operator, far_field = self.system.operator, solution.stats.far_field
        if far_field is not None:
            is_noisy = isinstance(operator, NoisyLinearOperator)
            if not is_noisy or far_field.residual > NOISE_PART * _least_relative_noise(operator, rhs):
                return False
        norm = partial(torch.linalg.vector_norm, dim=-2)
        limit = product_rounding(operator, torch.finfo(operator.dtype).eps).unsqueeze(-1) * norm(solution.value)
        return bool((norm(solution.residual) <= limit.maximum(tolerance * norm(rhs))).all())

    @torch.inference_mode(False)
    @torch.no_grad()
    def cholesky(self) -> ExactFactor:
        with self._lock:
            if self._cholesky is None:
                solver = self.solver if isinstance(self.solver, Cholesky) else Cholesky()
                self._cholesky = solver.factorize(self.system.operator)
            return self._cholesky

    @torch.no_grad()
    def _solved(self, draws: Draws, guess: Tensor | None = None, num_known: int | None = None) -> PriorDraws:
        vectors = self.features.probes(self.system.operator, self.system.terms(), draws).vectors
        return PriorDraws(draws, self._solve(vectors, guess, num_known)[0])


def _fitting(weights: Tensor | None, system: TrainingSystem) -> Tensor | None:
    if weights is None:
        return None
    if system.observed is not None and weights.shape[-1] == len(system.observed):
        weights = weights[..., system.observed]
    return weights.detach().to(system.residual) if weights.shape == system.residual.shape else None


def _are_rounded_alike(known: TrainingSystem, grown: TrainingSystem) -> bool:
    """Whether new data leave the centre of the inputs, so that K(x, X) rounds the known ones as before."""
    if known.prior.event_shape[0] < CENTRE_ROWS:
        return False
    before, after = kernel_inputs(known.operator), kernel_inputs(grown.operator)
    if before is None or after is None:
        return True
    after = after[..., : before.shape[-2], :]
    return before.shape[-2:] == after.shape[-2:] and bool((before == after).all())

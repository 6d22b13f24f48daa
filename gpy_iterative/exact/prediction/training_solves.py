"""Everything that is solved for one set of hyperparameters and training data, each thing when it is first needed."""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, warn
from gpy_iterative.exact.prediction.enlarged_system import has_grown_from, locally_corrected, new_rows, padded
from gpy_iterative.exact.prediction.projection import (
    Projection,
    ProjectionRecipe,
    exact_projection,
    extended_exact_projection,
    scatter_rows,
)
from gpy_iterative.exact.probes import RandomFeatures
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky, CholeskyFactor
from gpy_iterative.linear_solvers.solution import Solution, SolveStats, SolveStatus
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.own_lock import OwnLock
from gpy_iterative.training.progress import Progress, reporting_solve
from gpy_iterative.training.shared_columns import as_columns, from_columns
from gpy_iterative.training.training_system import TrainingSystem

#: Seeds of the noise that new observations add to old samples, by the number of data before: away from all other draws.
NOISE_STREAM = 2**40
#: A projection grows with new observations up to so many times its recipe's rank, and is then made anew.
MAX_GROWTH = 2


@dataclass(frozen=True)
class PriorDraws:
    """Samples of the prior and its noise, xi = Phi(X) w + sqrt(noise) e, with their solves.

    Attributes:
        distribution: where they come from.
        draws: its frozen randomness.
        solutions: H^-1 xi [*b, m, s], or what it was at other hyperparameters: a start for the next solve.
        num_solved: of the first so many rows; the others came later, and are zero. None is all.
    """

    distribution: RandomFeatures
    draws: Draws
    solutions: Tensor
    num_solved: int | None = None

    def fits(self, system: TrainingSystem) -> bool:
        """Whether the draws have the shape, dtype and device of a system."""
        like, solutions = system.residual, self.solutions
        wanted = system.operator.shape[:-1], like.dtype, like.device
        return (solutions.shape[:-1], solutions.dtype, solutions.device) == wanted

    def extended(self, system: TrainingSystem, seed: int) -> "PriorDraws":
        """The same functions for a system with further data behind the old ones: zeros for what was not solved for."""
        shape, base = system.operator.shape[:-1], self.draws["noise_base"]
        generator = torch.Generator().manual_seed((seed + NOISE_STREAM + base.shape[-2]) % 2**63)
        noise = torch.randn((shape[-1] - base.shape[-2], base.shape[-1]), generator=generator, dtype=base.dtype)
        noise = noise.to(base.device).expand(*shape[:-1], *noise.shape)
        base = torch.cat([base.expand(*shape[:-1], *base.shape[-2:]), noise], dim=-2)
        solved = self.solutions.shape[-2] if self.num_solved is None else self.num_solved
        return PriorDraws(self.distribution, self.draws | {"noise_base": base}, padded(self.solutions, shape), solved)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return self.solutions.shape[-1]


class TrainingSolves:
    """The solves of one training system.

    Args:
        system: at the hyperparameters and training data of now.
        solver: for means and sample paths.
        recipe: of the projection that variances come from.
        exact_below: up to this many data the projection is exact, from a Cholesky factor, whatever the solver.
        seed: of everything that is drawn; the order in which things are asked for does not matter.
        initial_weights: [*b, m] (or [*b, n] with unobserved data), where the solve for the mean starts; ignored where
            it does not fit.
        progress: what is told of every solve.
        known: the solves of the first data of this system, at the same hyperparameters; what they have is carried over,
            or only a start where the prior of these data has changed with the new ones.

    Construction solves for the mean, from what is known of it: at once when that still satisfies the tolerance.

    Attributes:
        weights: H^-1 (y - mean) [*b, n], zero where a datum is not observed.
        status, stats: how that solve ended, and what it took.
    """

    def __init__(
        self,
        system: TrainingSystem,
        solver: Solver,
        *,
        recipe: ProjectionRecipe,
        exact_below: int,
        seed: int,
        initial_weights: Tensor | None = None,
        known: "TrainingSolves | None" = None,
        progress: Progress = False,
    ) -> None:
        self.system, self.solver = system, solver
        self._recipe, self._seed, self._progress = recipe, seed, progress
        self._is_exact = isinstance(solver, Cholesky) or system.operator.shape[-1] <= exact_below
        self._lock = OwnLock()  # what is made when it is first needed, one thread makes for all
        self._cholesky: CholeskyFactor | None = None
        self._projection: Projection | None = None
        self._prior_draws: PriorDraws | None = None
        if known is None:
            guess, num_known = _fitting(initial_weights, system), None
        else:
            if has_grown_from(known.system, system):
                self._carry_over(known)
            guess = padded(known.start.unsqueeze(-1), system.residual.shape).squeeze(-1)
            num_known = known.system.operator.shape[-1]
        self._solution, self.status, self.stats = self._solve(
            system.residual.unsqueeze(-1), None if guess is None else guess.unsqueeze(-1), num_known
        )
        self.weights = scatter_rows(self._solution, system.observed).squeeze(-1)

    @torch.no_grad()
    def _carry_over(self, known: "TrainingSolves") -> None:
        """Factor and projection of the known data, where they were made and growing them is cheaper than new ones."""
        operator, observed, size = self.system.operator, self.system.observed, known.system.operator.shape[-1]
        factor, projection = known._cholesky, known._projection
        if self._is_exact and factor is not None:
            self._cholesky = factor.extended(new_rows(operator, size))
            if self._cholesky is not None and projection is not None:
                self._projection = extended_exact_projection(projection, self._cholesky, observed)
        elif not self._is_exact and projection is not None and not projection.is_exact:
            rank = projection.basis.shape[-1] + operator.shape[-1] - size
            if rank <= MAX_GROWTH * self._recipe.rank:
                self._projection = projection.extended(operator, new_rows(operator, size), observed)

    @property
    def start(self) -> Tensor:
        """Representer weights of the observed data [*b, m], to start a later solve from."""
        return self._solution.squeeze(-1)

    @property
    def known_draws(self) -> PriorDraws | None:
        """Prior samples that were solved for, if any."""
        return self._prior_draws

    @torch.inference_mode(False)  # kept for later calls, which may ask for gradients
    @torch.no_grad()
    def projection(self) -> Projection:
        """Where variances come from; cost see `ProjectionRecipe`, once."""
        with self._lock:
            if self._projection is None:
                if self._is_exact:
                    self._projection = exact_projection(self.cholesky(), self.system.observed)
                else:
                    self._projection = self._recipe.build(self.system.operator, self.system.observed)
            return self._projection

    @torch.inference_mode(False)
    @torch.no_grad()
    def prior_draws(self, count: int, num_frequencies: int, start: PriorDraws | None = None) -> PriorDraws:
        """At least `count` prior samples and their solves, [*b, m, s].

        Args:
            count: samples wanted. Those already solved for are kept, and only the rest is drawn and solved.
            num_frequencies: random frequencies a kernel term, of the first draw; later ones share them.
            start: draws from other hyperparameters. Their randomness is kept, their solutions start the solve; ignored
                where they belong to other data or another dtype.

        Raises:
            SpectralDensityMissingError: a kernel has no random features.
        """
        with self._lock:
            return self._extended_draws(count, num_frequencies, start)

    def _extended_draws(self, count: int, num_frequencies: int, start: PriorDraws | None) -> PriorDraws:
        if self._prior_draws is None and start is not None and start.fits(self.system):
            self._prior_draws = self._solved(start.distribution, start.draws, start)
        known = self._prior_draws
        missing = count - (0 if known is None else known.num_samples)
        if missing > 0:
            frequencies = num_frequencies if known is None else known.distribution.num_frequencies
            distribution = RandomFeatures(num_probes=missing, num_frequencies=frequencies, corrected=False)
            draws = self._drawn(range(count - missing, count), frequencies)
            if known is None:
                known = self._solved(distribution, draws, None)
            else:
                draws |= {name: tensor for name, tensor in known.draws.items() if name.startswith("features.")}
                known = _joined(known, self._solved(distribution, draws, None))
            self._prior_draws = known
        assert known is not None
        return known

    def _drawn(self, numbers: range, num_frequencies: int) -> Draws:
        """The samples of these numbers, each from a stream of its own, with the frequencies of the first."""
        one, terms = RandomFeatures(num_probes=1, num_frequencies=num_frequencies, corrected=False), self.system.terms()
        shared: Draws = {}
        own: list[Draws] = []
        for number in numbers:
            drawn = one.draw(self.system.operator, terms, self._generator(1 + number))
            shared = shared or {name: tensor for name, tensor in drawn.items() if name.startswith("features.")}
            own.append({name: tensor for name, tensor in drawn.items() if name not in shared})
        return shared | {name: torch.cat([part[name] for part in own], dim=-1) for name in own[0]}

    def _solve(
        self, columns: Tensor, guess: Tensor | None = None, num_known: int | None = None
    ) -> tuple[Tensor, SolveStatus, SolveStats]:
        """H^-1 columns [*b, m, s], to the solver's tolerance; how that ended, and what it took.

        The guess may be of the first `num_known` rows only, with zeros for the rest.
        """
        operator, start = self.system.operator, time.perf_counter()
        rhs = as_columns(columns, operator)
        if isinstance(self.solver, Cholesky):
            value = self.cholesky().solve(rhs)
            stats = SolveStats(0, 0.0, 0.0, {}, time.perf_counter() - start)
            return from_columns(value, columns), SolveStatus.CONVERGED, stats
        epochs = 0.0
        if guess is not None:
            guess = as_columns(guess, operator)
            if num_known is not None:
                guess, epochs = locally_corrected(operator, rhs, guess, num_known)
        with reporting_solve(self._progress) as callback:
            solution = self.solver.solve(
                operator, rhs, initial_guess=guess, generator=self._generator(0), callback=callback
            )
        warn_unless_converged(solution)
        stats = replace(solution.stats, overhead=solution.stats.overhead + epochs, seconds=time.perf_counter() - start)
        return from_columns(solution.value, columns), solution.status, stats

    @torch.inference_mode(False)
    @torch.no_grad()
    def cholesky(self) -> CholeskyFactor:
        """The dense factor of H, made once."""
        with self._lock:
            if self._cholesky is None:
                solver = self.solver if isinstance(self.solver, Cholesky) else Cholesky()
                self._cholesky = solver.factorize(self.system.operator)
            return self._cholesky

    @torch.no_grad()
    def _solved(self, distribution: RandomFeatures, draws: Draws, start: PriorDraws | None) -> PriorDraws:
        # The solution is wanted, not S^-1 xi, whose cost grows with the square of the frequencies.
        distribution = replace(distribution, corrected=False)
        vectors = distribution.probes(self.system.operator, self.system.terms(), draws).vectors
        guess = () if start is None else (start.solutions, start.num_solved)
        return PriorDraws(distribution, draws, self._solve(vectors, *guess)[0])

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed + stream)


def _joined(first: PriorDraws, second: PriorDraws) -> PriorDraws:
    shared = {name for name in first.draws if name.startswith("features.")}
    draws = {
        name: tensor if name in shared else torch.cat([tensor, second.draws[name]], dim=-1)
        for name, tensor in first.draws.items()
    }
    solutions = torch.cat([first.solutions, second.solutions], dim=-1)
    return PriorDraws(replace(first.distribution, num_probes=solutions.shape[-1]), draws, solutions)


def _fitting(weights: Tensor | None, system: TrainingSystem) -> Tensor | None:
    if weights is None:
        return None
    if system.observed is not None and weights.shape[-1] == system.num_train:
        weights = weights[..., system.observed]
    return weights.detach().to(system.residual) if weights.shape == system.residual.shape else None


def warn_unless_converged(solution: Solution) -> None:
    """A ConvergenceWarning with advice."""
    if solution.status is not SolveStatus.CONVERGED:
        norms = ", ".join(f"{name} {norm:.2g}" for name, norm in solution.stats.residual_norms.items())
        advice = solution.status.advice_for(solution.value.dtype)
        warn(
            f"A linear solve for predictions ended with status {solution.status.name.lower()} after "
            f"{solution.stats.epochs:.1f} epochs (relative residuals: {norms}). {advice}",
            ConvergenceWarning,
        )

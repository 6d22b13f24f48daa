"""Everything that is solved for one set of hyperparameters and training data, each thing when it is first needed."""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.prediction.projection import Projection, ProjectionRecipe, exact_projection, scatter_rows
from gpy_iterative.prediction.training_system import TrainingSystem
from gpy_iterative.probes import RandomFeatures
from gpy_iterative.solvers import Cholesky, CholeskyFactor, Solution, Solver, SolveStatus
from gpy_iterative.spectral import Draws


@dataclass(frozen=True)
class PriorDraws:
    """Samples of the prior and its noise, xi = Phi(X) w + sqrt(noise) e, with their solves.

    Attributes:
        distribution: where they come from.
        draws: its frozen randomness.
        solutions: H^-1 xi [*b, m, s], or what it was at other hyperparameters: a start for the next solve.
    """

    distribution: RandomFeatures
    draws: Draws
    solutions: Tensor

    def fits(self, system: TrainingSystem) -> bool:
        """Whether the draws have the shape, dtype and device of a system."""
        like, solutions = system.residual, self.solutions
        return (solutions.shape[:-1], solutions.dtype, solutions.device) == (like.shape, like.dtype, like.device)

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

    Construction solves for the mean, from the initial weights: at once when they still satisfy the tolerance.

    Attributes:
        weights: H^-1 (y - mean) [*b, n], zero where a datum is not observed.
        mean_solution: how that solve ended, and what it took; None where a Cholesky factor answered.
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
    ) -> None:
        self.system, self.solver = system, solver
        self._recipe, self._seed = recipe, seed
        self._is_exact = isinstance(solver, Cholesky) or system.operator.shape[-1] <= exact_below
        self._cholesky: CholeskyFactor | None = None
        self._projection: Projection | None = None
        self._prior_draws: PriorDraws | None = None
        guess = _fitting(initial_weights, system)
        columns, guess = system.residual.unsqueeze(-1), None if guess is None else guess.unsqueeze(-1)
        self.mean_solution: Solution | None = None
        if isinstance(solver, Cholesky):
            self._solution = self.cholesky().solve(columns)
        else:
            self.mean_solution = self._iterative_solution(solver, columns, guess)
            self._solution = self.mean_solution.value
        self.weights = scatter_rows(self._solution, system.observed).squeeze(-1)

    @property
    def start(self) -> Tensor:
        """Representer weights of the observed data [*b, m], to start a later solve from."""
        return self._solution.squeeze(-1)

    @torch.inference_mode(False)  # kept for later calls, which may ask for gradients
    @torch.no_grad()
    def projection(self) -> Projection:
        """Where variances come from; cost see `ProjectionRecipe`, once."""
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
        if self._prior_draws is None and start is not None and start.fits(self.system):
            self._prior_draws = self._solved(start.distribution, start.draws, start.solutions)
        known = self._prior_draws
        missing = count - (0 if known is None else known.num_samples)
        if missing > 0:
            frequencies = num_frequencies if known is None else known.distribution.num_frequencies
            distribution = RandomFeatures(num_probes=missing, num_frequencies=frequencies, corrected=False)
            generator = self._generator(1 + count - missing)
            draws = distribution.draw(self.system.operator, self.system.terms(), generator)
            if known is None:
                known = self._solved(distribution, draws, None)
            else:
                draws |= {name: tensor for name, tensor in known.draws.items() if name.startswith("features.")}
                known = _joined(known, self._solved(distribution, draws, None))
            self._prior_draws = known
        assert known is not None
        return known

    def solve(self, columns: Tensor, initial_guess: Tensor | None = None) -> Tensor:
        """H^-1 columns [*b, m, s], to the solver's tolerance."""
        if isinstance(self.solver, Cholesky):
            return self.cholesky().solve(columns)
        return self._iterative_solution(self.solver, columns, initial_guess).value

    def _iterative_solution(self, solver: Solver, columns: Tensor, initial_guess: Tensor | None) -> Solution:
        solution = solver.solve(
            self.system.operator, columns, initial_guess=initial_guess, generator=self._generator(0)
        )
        _warn_unless_converged(solution)
        return solution

    @torch.inference_mode(False)
    @torch.no_grad()
    def cholesky(self) -> CholeskyFactor:
        """The dense factor of H, made once."""
        if self._cholesky is None:
            solver = self.solver if isinstance(self.solver, Cholesky) else Cholesky()
            self._cholesky = solver.factorize(self.system.operator)
        return self._cholesky

    @torch.no_grad()
    def _solved(self, distribution: RandomFeatures, draws: Draws, guess: Tensor | None) -> PriorDraws:
        # The solution is wanted, not S^-1 xi, whose cost grows with the square of the frequencies.
        distribution = replace(distribution, corrected=False)
        vectors = distribution.probes(self.system.operator, self.system.terms(), draws).vectors
        return PriorDraws(distribution, draws, self.solve(vectors, guess))

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


def _warn_unless_converged(solution: Solution) -> None:
    if solution.status is not SolveStatus.CONVERGED:
        norms = ", ".join(f"{name} {norm:.2g}" for name, norm in solution.stats.residual_norms.items())
        warnings.warn(
            f"A linear solve for predictions ended with status {solution.status.name.lower()} after "
            f"{solution.stats.epochs:.1f} epochs (relative residuals: {norms}). {solution.status.advice}",
            ConvergenceWarning,
            stacklevel=4,
        )

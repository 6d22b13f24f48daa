"""The mode of a model and its refinements, found again when data or hyperparameters have changed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, warn
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.newton.base import LaplaceSolver
from gpy_iterative.laplace.newton.default import default_laplace_solver
from gpy_iterative.laplace.newton.refinement import refine
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.laplace.prediction.targets import check_targets_fit, observed_params, observed_points
from gpy_iterative.linear_operators.latent import LatentPrior, latent_prior
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.solution import SolveStats
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, reporting_solve
from gpy_iterative.training.snapshot import ModelSnapshot, OwnLock
from gpy_iterative.training.training_system import check_inputs, prior_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaplaceFit:
    """What was solved: the data that were kept, their prior without graph, and the mode or its last refinement.

    Attributes:
        snapshot: what model and likelihood were.
        mode_weights: v [n, C] of the mode.
        stats: of the mode's solve and of each refinement.
        observed: which of the model's data were kept, [n] bool; None for all.
    """

    snapshot: ModelSnapshot
    inputs: list[Tensor]
    targets: Tensor
    prior: LatentPrior
    distribution: MultivariateNormal
    solution: LaplaceSolution
    mode_weights: Tensor
    stats: tuple[SolveStats, ...]
    observed: Tensor | None

    @property
    def num_refinements(self) -> int:
        """How many refinements it has."""
        return len(self.stats) - 1

    def columns(self) -> Tensor:
        """[v, Q] [n C, 1 + B] in the kernel's dtype: what k(x, X) is multiplied with."""
        return torch.cat([self.solution.value.view(-1, 1), self.solution.root], dim=-1).to(self.prior.mean.dtype)


class LaplaceFits:
    """The fits of one model, one after the other; construction finds the mode.

    Arguments are those of `LaplacePosterior`.
    """

    def __init__(
        self,
        model: GP,
        likelihood: Likelihood,
        *,
        solver: LaplaceSolver | None,
        products: KernelProducts,
        seed: int,
        initial_weights: Tensor | None,
        params: Sequence[Any],
        progress: Progress,
    ) -> None:
        self._model, self._likelihood = model, likelihood
        self._solver, self._products = solver, products
        self._seed, self._progress = seed, progress
        self._params = LikelihoodParams.given(params, model)
        self._lock = OwnLock()
        self._fit = self._solved(initial_weights)

    def current(self, num_refinements: int) -> LaplaceFit:
        """The fit at the hyperparameters and data of now, with so many refinements of the mode."""
        with self._lock:
            fit = self._fit
            if not fit.snapshot.describes(self._model, self._likelihood):
                fit = self._solved(fit.mode_weights)
            elif fit.num_refinements > num_refinements:
                fit = self._solved(None)  # cold: a warm start would compute a smaller subspace
            self._fit = self._refined(fit, num_refinements)
            return self._fit

    @torch.inference_mode(False)
    def _refined(self, fit: LaplaceFit, num_refinements: int) -> LaplaceFit:
        while fit.num_refinements < num_refinements:
            with reporting_solve(self._progress, "refinement", "products") as callback:
                solution = refine(
                    self._mode_solver(fit.prior),
                    fit.prior,
                    self._pointwise(fit.snapshot, fit.targets, fit.prior, fit.observed),
                    fit.solution,
                    generator=self._generator(),
                    callback=callback,
                )
            fit = replace(fit, solution=solution, stats=(*fit.stats, solution.stats))
            if not solution.converged:
                advice = self._mode_solver(fit.prior).advice(solution, fit.prior.operator.dtype)
                warn(f"Refinement {fit.num_refinements}: {advice}", ConvergenceWarning)
        return fit

    @torch.inference_mode(False)
    @torch.no_grad()
    def _solved(self, initial_weights: Tensor | None) -> LaplaceFit:
        if self._model.train_inputs is None or self._model.train_targets is None:
            raise ValueError("A posterior needs training data: call model.set_train_data(inputs, targets) first.")
        check_inputs(self._model)
        snapshot = ModelSnapshot.of(self._model, self._likelihood)
        inputs, targets = list(snapshot.model.train_inputs), snapshot.model.train_targets
        observed = observed_points(targets)
        if observed is not None:
            inputs, targets = [x[observed] for x in inputs], targets[observed]
        distribution = prior_at(snapshot.model, inputs)
        check_targets_fit(distribution, targets)
        prior = latent_prior(distribution, self._products)
        prior = LatentPrior(prior.operator.detach(), prior.mean.detach())
        likelihood = self._pointwise(snapshot, targets, prior, observed)
        with reporting_solve(self._progress, "mode", "products") as callback:
            solution = self._mode_solver(prior).solve(
                prior, likelihood, initial_weights=initial_weights, generator=self._generator(), callback=callback
            )
        logger.info("mode of %d data: %s", len(targets), solution.stats)
        if not solution.converged:
            warn(self._mode_solver(prior).advice(solution, prior.operator.dtype), ConvergenceWarning)
        snapshot.hand_back(self._model, self._likelihood)
        return LaplaceFit(
            snapshot, inputs, targets, prior, distribution, solution, solution.value, (solution.stats,), observed
        )

    def _pointwise(
        self, snapshot: ModelSnapshot, targets: Tensor, prior: LatentPrior, observed: Tensor | None
    ) -> PointwiseLikelihood:
        params = () if self._params is None else self._params.current(snapshot.model)
        return PointwiseLikelihood(snapshot.likelihood, targets, prior.num_latents, observed_params(params, observed))

    def _mode_solver(self, prior: LatentPrior) -> LaplaceSolver:
        return default_laplace_solver(prior.size) if self._solver is None else self._solver

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)

"""The mode of a model and its refinements, found again when data or hyperparameters have changed.

Where the mode saturates the likelihood, the curvature is nearly zero and the covariance nearly the prior's, though the
likelihood rules out much of what that covariance allows. A refinement takes gradient and curvature as averages over the
marginals of the last approximation (`gpy_iterative.likelihoods.SmoothedLikelihood`). Its fixed point is a Gaussian at which
the variational bound is stationary; one or two refinements are most of the way.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, warn
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.smoothed import SmoothedLikelihood
from gpy_iterative.laplace.newton.base import LaplaceSolution, LaplaceSolver
from gpy_iterative.laplace.newton.newton import default_laplace_solver
from gpy_iterative.laplace.report import ModeReport
from gpy_iterative.linear_operators.latent import LatentPrior, latent_prior, num_latents
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.solution import SolveProgress, SolveStats
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, reporting_solve
from gpy_iterative.training.snapshot import ModelSnapshot, OwnLock
from gpy_iterative.training.training_system import check_inputs, prior_at

logger = logging.getLogger(__name__)

#: Points whose share of K Q is held at a time.
CHUNK_POINTS = 4096


@dataclass(frozen=True)
class LaplaceFit:
    """The data that were kept, their prior without graph, and the mode or its last refinement.

    Attributes:
        snapshot: of model and likelihood.
        params: of the likelihood's `forward`, at the data that were kept.
        mode_weights: v [n, C] of the mode.
        stats: of the mode's solve and of each refinement.
    """

    snapshot: ModelSnapshot
    inputs: list[Tensor]
    targets: Tensor
    params: tuple[Any, ...]
    prior: LatentPrior
    distribution: MultivariateNormal
    solution: LaplaceSolution
    mode_weights: Tensor
    stats: tuple[SolveStats, ...]

    @property
    def num_refinements(self) -> int:
        """The number of refinements."""
        return len(self.stats) - 1

    @property
    def report(self) -> ModeReport:
        """The figures of all solves together."""
        return ModeReport(
            status=self.solution.status,
            iterations=sum(stats.iterations for stats in self.stats),
            epochs=sum(stats.epochs for stats in self.stats),
            num_refinements=self.num_refinements,
            stationarity=self.solution.stationarity,
            rank=self.solution.actions.shape[-1],
            seconds=sum(stats.seconds for stats in self.stats),
        )

    @property
    def is_single(self) -> bool:
        """Whether answers have no dimension of latent functions."""
        return self.prior.num_latents == 1 and not isinstance(self.distribution, MultitaskMultivariateNormal)

    @property
    def likelihood(self) -> PointwiseLikelihood:
        """The likelihood with its targets."""
        return PointwiseLikelihood(self.snapshot.likelihood, self.targets, self.prior.num_latents, self.params)

    def columns(self) -> Tensor:
        """[v, Q] [n C, 1 + B] in the kernel's dtype: the right-hand sides of k(x, X)."""
        return torch.cat([self.solution.value.view(-1, 1), self.solution.root], dim=-1).to(self.prior.mean.dtype)


@dataclass
class LaplaceFits:
    """The last fit of a model; the fields are arguments of `LaplacePosterior`."""

    model: GP
    likelihood: Likelihood
    solver: LaplaceSolver | None
    products: KernelProducts
    seed: int
    params: LikelihoodParams | None
    progress: Progress
    _fit: LaplaceFit | None = None
    _lock: OwnLock = field(default_factory=OwnLock)

    def current(self, num_refinements: int, initial_weights: Tensor | None = None) -> LaplaceFit:
        """The fit at the present hyperparameters and data, with so many refinements of the mode."""
        with self._lock:
            fit = self._fit
            if fit is None:
                fit = self._solved(initial_weights)
            elif not fit.snapshot.describes(self.model, self.likelihood):
                fit = self._solved(fit.mode_weights)
            elif fit.num_refinements > num_refinements:
                fit = self._solved(None)  # cold: a warm start would compute a smaller subspace
            self._fit = self._refined(fit, num_refinements)
            return self._fit

    @torch.inference_mode(False)
    def _refined(self, fit: LaplaceFit, num_refinements: int) -> LaplaceFit:
        solver, likelihood = self._mode_solver(fit.prior), fit.likelihood
        while fit.num_refinements < num_refinements:
            with reporting_solve(self.progress, "refinement", "products") as callback:
                options = {"generator": self._generator(), "callback": callback}
                solution = refine(solver, fit.prior, likelihood, fit.solution, **options)
            fit = replace(fit, solution=solution, stats=(*fit.stats, solution.stats))
            if not solution.converged:
                advice = solver.advice(solution, fit.prior.operator.dtype)
                warn(f"Refinement {fit.num_refinements}: {advice}", ConvergenceWarning)
        return fit

    @torch.inference_mode(False)
    @torch.no_grad()
    def _solved(self, initial_weights: Tensor | None) -> LaplaceFit:
        if self.model.train_inputs is None or self.model.train_targets is None:
            raise ValueError("A posterior needs training data: call model.set_train_data(inputs, targets) first.")
        check_inputs(self.model)
        snapshot = ModelSnapshot.of(self.model, self.likelihood)
        inputs, targets = list(snapshot.model.train_inputs), snapshot.model.train_targets
        observed = observed_points(targets)
        params = observed_params(() if self.params is None else self.params.current(snapshot.model), observed)
        if observed is not None:
            inputs, targets = [x[observed] for x in inputs], targets[observed]
        distribution = prior_at(snapshot.model, inputs)
        check_targets_fit(distribution, targets)
        prior = latent_prior(distribution, self.products)
        prior = LatentPrior(prior.operator.detach(), prior.mean.detach())
        likelihood = PointwiseLikelihood(snapshot.likelihood, targets, prior.num_latents, params)
        solver = self._mode_solver(prior)
        with reporting_solve(self.progress, "mode", "products") as callback:
            options = {"generator": self._generator(), "callback": callback}
            solution = solver.solve(prior, likelihood, initial_weights=initial_weights, **options)
        logger.info("mode of %d data: %s", len(targets), solution.stats)
        if not solution.converged:
            warn(solver.advice(solution, prior.operator.dtype), ConvergenceWarning)
        snapshot.hand_back(self.model, self.likelihood)
        found = solution, solution.value, (solution.stats,)
        return LaplaceFit(snapshot, inputs, targets, params, prior, distribution, *found)

    def _mode_solver(self, prior: LatentPrior) -> LaplaceSolver:
        return default_laplace_solver(prior.size) if self.solver is None else self.solver

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@torch.no_grad()
def refine(
    solver: LaplaceSolver,
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    *,
    generator: torch.Generator | None = None,
    callback: Callable[[SolveProgress], None] | None = None,
) -> LaplaceSolution:
    """The mode under the likelihood that is averaged over a solution's marginals, and the covariance around it.

    Args:
        solver: of the solution.
        prior: of the solution.
        likelihood: itself, not averaged.
        solution: Laplace's, or of a refinement; its kernel products are used again.
        generator, callback: see `LaplaceSolver.solve`, which also says what this raises.
    """
    smoothed = SmoothedLikelihood(likelihood, marginal_blocks(prior, solution))
    return solver.solve(prior, smoothed, initial_solution=solution, generator=generator, callback=callback)


@torch.no_grad()
def marginal_blocks(prior: LatentPrior, solution: LaplaceSolution) -> Tensor:
    """The covariance blocks [n, C, C] of a solution at the training points, computational uncertainty included.

    Cost O(n C^2 B), no kernel product.
    """
    blocks = prior.point_blocks().double().clone()
    images = solution.images.view(*prior.mean.shape, solution.images.shape[-1])
    for start in range(0, prior.num_points, CHUNK_POINTS):
        known = images[start : start + CHUNK_POINTS] @ solution.transform
        blocks[start : start + CHUNK_POINTS] -= known @ known.mT
    return blocks


def observed_points(targets: Tensor) -> Tensor | None:
    """Which points have targets, [n] bool, under GPyTorch's `observation_nan_policy` "mask"; None when all have.

    Raises ValueError under the policy "fill", which has no meaning for a likelihood that is not Gaussian.
    """
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy == "fill":
        raise ValueError("observation_nan_policy('fill') has no meaning here; use 'mask', which drops the points.")
    if policy == "ignore" or not targets.is_floating_point():
        return None
    observed = ~torch.isnan(targets).flatten(1).any(-1) if targets.dim() > 1 else ~torch.isnan(targets)
    return None if bool(observed.all()) else observed


def observed_params(params: Sequence[Any], observed: Tensor | None) -> tuple[Any, ...]:
    """The likelihood's arguments at the observed points: tensors with an entry for each point lose the others."""
    if observed is None:
        return tuple(params)
    has_rows = lambda value: isinstance(value, Tensor) and value.shape[:1] == observed.shape
    return tuple(value[observed] if has_rows(value) else value for value in params)


def check_targets_fit(distribution: MultivariateNormal, targets: Tensor) -> None:
    """Raises ValueError unless there is one target, or one row of them, for each of the prior's points."""
    latents = num_latents(distribution)
    points = distribution.mean.numel() // latents
    if not isinstance(targets, Tensor):
        raise ValueError(f"The targets must be a tensor [n], got {type(targets).__name__}.")
    if targets.shape[:1] != (points,) or targets.dim() > 2 or (targets.dim() == 2 and targets.shape[1] != latents):
        hint = " Use targets.squeeze(-1)." if targets.shape[-1:] == (1,) else ""
        raise ValueError(
            f"Laplace's method takes one problem with targets [{points}]; their shape is {tuple(targets.shape)}.{hint}"
        )
    if targets.dim() == 2 and not isinstance(distribution, MultitaskMultivariateNormal):
        hint = "Use targets.squeeze(-1)." if targets.shape[-1] == 1 else "Batches need one model for each problem."
        raise ValueError(f"The targets must be [n], got {tuple(targets.shape)}. {hint}")
    if targets.device != distribution.mean.device:
        raise ValueError(f"The targets are on {targets.device}, the model's output on {distribution.mean.device}.")

"""The latent posterior: mean k(x, X) v, covariance k(x, x) - k(x, X) Q Q^T k(X, x)."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import RootLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, check_instance, checked_seed
from gpy_iterative.errors import ConvergenceWarning, VarianceWarning, float64_first, warn
from gpy_iterative.exact.prediction.blocks import converted, product
from gpy_iterative.exact.prediction.joint_prior import checked_inputs, graph_for
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.smoothed import SmoothedLikelihood
from gpy_iterative.laplace.mode import LaplaceFit, ModeReport, check_targets_fit, observed_data
from gpy_iterative.laplace.newton.base import LaplaceSolution, LaplaceSolver
from gpy_iterative.laplace.newton.newton import chosen_solver
from gpy_iterative.laplace.newton.whitened import WhitenedSystem
from gpy_iterative.laplace.paths import LaplaceSamplePaths, PriorFunctions, latent_blocks
from gpy_iterative.linear_operators.extensions import principal_blocks
from gpy_iterative.linear_operators.latent import LatentPrior, latent_prior, point_blocks
from gpy_iterative.linear_operators.predicted import CovarianceSumLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.solution import Solution, SolveStatus
from gpy_iterative.random_numbers import normal
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress, reporting_solve
from gpy_iterative.training.snapshot import ModelSnapshot, OwnLock
from gpy_iterative.training.training_system import check_has_data, check_inputs, check_order, prior_at

logger = logging.getLogger(__name__)

CHUNK_POINTS = 1024
#: Relative residual of solves at the mode; how many times as large rounding may leave it without a warning.
TOLERANCE, ROUNDED = 1e-4, 10
#: Relative size of negative variances from rounding.
NEGATIVE_VARIANCE = 1e-6


@dataclass(frozen=True)
class VarianceSplit:
    """A posterior variance, float64.

    Attributes:
        total: mathematical + computational, [*b, t] or [*b, t, C].
        mathematical: variance of exact computation at the same curvature.
        computational: what more computation would remove.
    """

    total: Tensor
    mathematical: Tensor
    computational: Tensor


class LaplacePosterior:
    """The latent posterior at x is `posterior(x)`.

    Changed hyperparameters or data start another search from the old mode.

    Args:
        model: with training data; its `forward` returns the prior.
        likelihood, solver, seed: as in `IterativeLaplaceGP`.
        num_refinements: as there; may be changed later.
        initial_weights, params, progress: as in `IterativeLaplaceGP.posterior`.

    Raises:
        ValueError: data are not finite, do not fit, or have changed while params are given.
        NonFiniteError: from the solver.

    Warns:
        ConvergenceWarning: the mode or a refinement was not reached.
    """

    def __init__(
        self,
        model: GP,
        likelihood: Likelihood,
        *,
        solver: LaplaceSolver | None = None,
        products: KernelProducts | None = None,
        seed: int = 0,
        initial_weights: Tensor | None = None,
        params: Sequence[Any] = (),
        progress: Progress = False,
        num_refinements: int = 0,
    ) -> None:
        check_order(model, likelihood)
        self.model, self.likelihood = model, likelihood
        check_progress(progress)
        check_instance("solver", solver, LaplaceSolver, "LaplaceNewton()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        check_instance("initial_weights", initial_weights, Tensor, "torch.zeros(n)")
        self._solver, self._seed, self._progress = solver, checked_seed(seed), progress
        self.num_refinements = num_refinements
        self._products = KernelProducts() if products is None else products
        self._params = LikelihoodParams.given(params, model)
        self._fit: LaplaceFit | None = None
        self._lock = OwnLock()
        self._current(initial_weights)

    @property
    def solution(self) -> LaplaceSolution:
        """The mode, after all refinements."""
        return self._current().solution

    @property
    def report(self) -> ModeReport:
        """Report on the mode and its refinements."""
        return self._current().report

    def __call__(self, *inputs: Tensor) -> MultivariateNormal:
        """The latent posterior [*b, t] or, for several functions, [*b, t, C] at test inputs [*b, t, d].

        Only inputs receive gradients. Raises ValueError for inputs that are not finite or do not fit.
        """
        fit = self._current()
        with graph_for(inputs):
            points = checked_inputs(fit.inputs, inputs)
            batch, count, latents = points[0].shape[:-2], points[0].shape[-2], fit.prior.num_latents
            mean, root, prior = self._conditioned(fit, fit.columns(), [x.flatten(0, -2) for x in points])
            mean, root = mean.view(*batch, count, latents), root.view(*batch, count * latents, root.shape[-1])
            if batch:
                rows = torch.arange(prior.shape[-1], device=prior.device).view(batch.numel(), count * latents)
                blocks = principal_blocks(prior, rows)
                prior = to_linear_operator(blocks.view(*batch, *blocks.shape[1:]))
            mean, root = mean.to(prior.dtype), root.to(prior.dtype)
            covariance = CovarianceSumLinearOperator(prior.clone(), -1 * RootLinearOperator(root))
            if fit.is_single:
                return MultivariateNormal(mean.squeeze(-1), covariance)
            return MultitaskMultivariateNormal(mean, covariance)

    def moments(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means [*b, t, C] and covariances [*b, t, C, C] of single points, float64."""
        fit = self._current()
        with torch.no_grad():
            points = checked_inputs(fit.inputs, inputs)
            columns, latents, means, blocks = fit.columns(), fit.prior.num_latents, [], []
            for chunk in _chunks(points):
                mean, root, prior = self._conditioned(fit, columns, chunk)
                known = root.double().view(-1, latents, root.shape[-1])
                before = point_blocks(converted(prior, mean.dtype), latents).double()
                means.append(mean.double().view(-1, latents))
                blocks.append(_clamped(before - known @ known.mT, before, fit.prior.operator.dtype))
            shape = (*points[0].shape[:-1], latents)
            return torch.cat(means).view(shape), torch.cat(blocks).view(*shape, latents)

    def split_variance(self, *inputs: Tensor) -> VarianceSplit:
        """The variance at test inputs [*b, t, d] and its parts.

        Solves with t C columns, or warns with ConvergenceWarning.
        """
        total = self.moments(*inputs)[1].diagonal(dim1=-2, dim2=-1)
        fit = self._current()
        with torch.no_grad():
            points = checked_inputs(fit.inputs, inputs)
            parts = [self._exact_variance(fit, chunk) for chunk in _chunks(points)]
        mathematical = torch.minimum(torch.cat(parts).view(total.shape), total)
        if fit.is_single:
            total, mathematical = total.squeeze(-1), mathematical.squeeze(-1)
        return VarianceSplit(total, mathematical, total - mathematical)

    def sample_paths(self, num_paths: int, *, num_frequencies: int = 4096) -> LaplaceSamplePaths:
        """Draws posterior functions, without computational uncertainty, by one solve for all.

        Raises SpectralDensityMissingError; warns with ConvergenceWarning.
        """
        fit = self._current()
        with torch.inference_mode(False), torch.no_grad():  # differentiable later
            generator = torch.Generator().manual_seed(self._seed + 1)
            functions = PriorFunctions(fit.distribution, num_paths, num_frequencies, generator)
            curvature = fit.solution.curvature
            noise = normal((curvature.num_columns, num_paths), generator, fit.solution.value.device)
            whitened = curvature.root_t(functions(fit.distribution).double().flatten(0, 1)) + noise
            update = fit.solution.value.view(-1, 1) - curvature.root(self._solve(fit, whitened).value.double())
        return LaplaceSamplePaths(fit.snapshot, functions, fit.inputs, update.to(fit.prior.mean.dtype), self._products)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _current(self, initial_weights: Tensor | None = None) -> LaplaceFit:
        check_count("num_refinements", self.num_refinements, least=0)
        with self._lock:
            fit = self._fit
            if fit is not None and not fit.snapshot.describes(self.model, self.likelihood):
                fit, initial_weights = None, fit.mode_weights
            elif fit is not None and len(fit.stats) - 1 > self.num_refinements:
                fit = None  # a warm start would keep fewer actions
            self._fit = self._refined(self._found(initial_weights) if fit is None else fit)
            return self._fit

    def _refined(self, fit: LaplaceFit) -> LaplaceFit:
        solver = self._mode_solver(fit.prior)
        for number in range(len(fit.stats), self.num_refinements + 1):
            smoothed = SmoothedLikelihood(fit.likelihood, fit.solution.inverse.covariance_blocks(fit.prior))
            with reporting_solve(self._progress, "refinement", "products") as callback:
                options = {"generator": self._generator(), "callback": callback}
                solution = solver.solve(fit.prior, smoothed, initial_solution=fit.solution, **options)
            fit = replace(fit, solution=solution, stats=(*fit.stats, solution.stats))
            if not solution.converged:
                warn(f"Refinement {number}: {solver.advice(solution, fit.prior.operator.dtype)}", ConvergenceWarning)
        return fit

    def _found(self, initial_weights: Tensor | None) -> LaplaceFit:
        check_has_data(self.model)
        check_inputs(self.model)
        snapshot = ModelSnapshot.of(self.model, self.likelihood)
        inputs, targets = list(snapshot.model.train_inputs), snapshot.model.train_targets
        params = () if self._params is None else self._params.current(snapshot.model)[0]
        observed, targets, params = observed_data(targets, params)
        if observed is not None:
            inputs = [x[observed] for x in inputs]
        distribution = prior_at(snapshot.model, inputs)
        check_targets_fit(distribution, targets)
        prior = latent_prior(distribution, self._products)
        solver = self._mode_solver(prior)
        prior = LatentPrior(prior.operator.detach(), prior.mean.detach())
        likelihood = PointwiseLikelihood(snapshot.likelihood, targets, prior.num_latents, params)
        with reporting_solve(self._progress, "mode", "products") as callback:
            options = {"generator": self._generator(), "callback": callback}
            prior, solution = solver.mode(prior, likelihood, initial_weights=initial_weights, **options)
        logger.info("mode of %d data: %s", len(targets), solution.stats)
        if not solution.converged:
            warn(solver.advice(solution, prior.operator.dtype), ConvergenceWarning)
        snapshot.hand_back(self.model, self.likelihood)
        is_single = prior.num_latents == 1 and not isinstance(distribution, MultitaskMultivariateNormal)
        found = solution, solution.value, (solution.stats,)
        return LaplaceFit(snapshot, inputs, prior, likelihood, distribution, is_single, *found)

    def _mode_solver(self, prior: LatentPrior) -> LaplaceSolver:
        return chosen_solver(self._solver, prior.size).for_predictions(prior.size)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed)

    def _conditioned(
        self, fit: LaplaceFit, columns: Tensor, points: list[Tensor]
    ) -> tuple[Tensor, Tensor, LinearOperator]:
        """Means [t C], K(x, X) Q [t C, B], K(x, x)."""
        mean, test_train, test_test = latent_blocks(fit.snapshot.model_copy(), fit.inputs, points, self._products)
        found = product(test_train, columns)
        return mean.reshape(-1) + found[:, 0], found[:, 1:], test_test

    def _exact_variance(self, fit: LaplaceFit, points: list[Tensor]) -> Tensor:
        latents = fit.prior.num_latents
        _, test_train, test_test = latent_blocks(fit.snapshot.model_copy(), fit.inputs, points, self._products)
        test_train, test_test = (converted(block, fit.prior.mean.dtype) for block in (test_train, test_test))
        whitened = fit.solution.curvature.root_t(test_train.to_dense().double().mT)
        solution = self._solve(fit, whitened)
        # The residual makes the error second order in the solve's: large terms cancel.
        known = (solution.value.double() * (whitened + solution.residual.double())).sum(0).view(-1, latents)
        return (point_blocks(test_test, latents).double().diagonal(dim1=-2, dim2=-1) - known).clamp_min(0)

    def _solve(self, fit: LaplaceFit, columns: Tensor) -> Solution:
        dtype, system = fit.prior.operator.dtype, WhitenedSystem.at(fit.prior.operator, fit.solution)
        with reporting_solve(self._progress) as callback:
            found = system.solve(columns, TOLERANCE, callback)
        largest = max(found.stats.residual_norms.values())
        is_rounding = found.status is SolveStatus.STAGNATED and largest <= ROUNDED * TOLERANCE
        if found.status is not SolveStatus.CONVERGED and not is_rounding:
            warn(
                f"A solve at the mode ended with status {found.status.name.lower()}: {float64_first(dtype)}keep "
                "outputscale and likelihood parameters in bounds.",
                ConvergenceWarning,
            )
        return found


def _chunks(points: list[Tensor]) -> Iterator[list[Tensor]]:
    flat = [x.flatten(0, -2) for x in points]
    for start in range(0, max(len(flat[0]), 1), CHUNK_POINTS):  # at least one chunk
        yield [x[start : start + CHUNK_POINTS] for x in flat]


def _clamped(blocks: Tensor, prior: Tensor, dtype: torch.dtype) -> Tensor:
    variances, scale = (part.diagonal(dim1=-2, dim2=-1) for part in (blocks, prior))
    if (variances < -NEGATIVE_VARIANCE * scale).any():
        warn(
            f"A posterior variance was negative beyond rounding and was set to zero: {float64_first(dtype)}bound the "
            "outputscale, or leave near-duplicates out.",
            VarianceWarning,
        )
    return blocks + torch.diag_embed((-variances).clamp_min(0))

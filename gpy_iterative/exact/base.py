"""One training step of a Gaussian marginal log likelihood. H is the prior covariance plus noise."""

import copy
import logging
import math
import time
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_autocast, check_instance
from gpy_iterative.errors import DataWarning, warn
from gpy_iterative.exact.control_variate import MOST_INPUTS, ControlVariate
from gpy_iterative.exact.estimates import (
    DensityEstimate,
    Estimate,
    ExactEstimate,
    WarmStart,
    check_estimated,
    check_warm_start,
    exact_estimate,
    stochastic_estimate,
    warm_start_after,
)
from gpy_iterative.exact.prediction.posterior import PathwisePosterior
from gpy_iterative.exact.probes import Preconditioned, ProbeDistribution, Probes, suited_to
from gpy_iterative.exact.validation import LineSearchWatch, check_likelihood, checked_system
from gpy_iterative.linear_operators.extensions import kernel_inputs
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_solvers.alternating_projections import AlternatingProjections
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.default import default_solver
from gpy_iterative.linear_solvers.logdet.lanczos import BracketPositions
from gpy_iterative.linear_solvers.solution import SOLVED, SolveStatus, warn_of
from gpy_iterative.preconditioners.low_rank_plus_vecchia import LowRankPlusVecchia, has_neighbours, largest_left
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholeskyFactor
from gpy_iterative.preconditioners.task_noise import WhitenedTasks, of_independent_noise
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress, reporting_solve
from gpy_iterative.training.report import MarginalLogLikelihoodReport
from gpy_iterative.training.run import Resumable, Run
from gpy_iterative.training.surrogate import with_checked_gradient
from gpy_iterative.training.training_system import (
    MOST_ROWS_IN_FLOAT64,
    ROUNDING_IN_TRAINING,
    TrainingSystem,
    check_inputs,
)
from gpy_iterative.worker_threads import divided

logger = logging.getLogger(__name__)

#: The gradient does not use them.
NUM_LOGDET_PROBES = 4
#: See `largest_left`: beyond it the default is conjugate gradients with neighbours.
MOST_LEFT = 500.0
#: On tiles, for inputs with a control variate, which leaves the noise that neighbours leave.
NEIGHBOURS_ON_MAPS = 80
#: Beside a control variate, which leaves little noise: the largest default tolerance, and the least of the probes.
CONTROLLED_TOLERANCE = 0.004


@dataclass(frozen=True)
class Evaluation:
    value: Tensor  # [*b], in the dtype of the system, as gains of steps may be below the rounding of float32
    system: TrainingSystem  # H, y - mean and the prior; float64 where H is factored
    estimate: Estimate  # without priors and added loss terms
    num_data: int  # n


class GaussianMarginalLogLikelihood(Resumable, ExactMarginalLogLikelihood):
    """Base of the marginal log likelihoods."""

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        solver: Solver | None,
        products: KernelProducts | None,
        generator: torch.Generator | int | None,
    ) -> None:
        check_likelihood(likelihood, model, type(self).__name__)
        check_inputs(model)  # GPyTorch would report NaN as "not the training inputs"
        check_instance("solver", solver, Solver, "ConjugateGradients()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        super().__init__(likelihood, model)
        self.solver = solver
        self.products = KernelProducts() if products is None else products
        self.report: MarginalLogLikelihoodReport | None = None
        self.progress: Progress = False
        self._run = Run.begin(generator)
        self._cache = TileCache()
        self.warned_of: set[SolveStatus] = set()
        # None for smooth functions.
        self._line_search: LineSearchWatch | None = LineSearchWatch()

    @abstractmethod
    def _estimate(self, system: TrainingSystem, run: Run) -> tuple[Estimate, Run]:
        """The log density of N(0, H) at y - mean, and the next run."""

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """An estimate of the log marginal likelihood divided by the number of data.

        Args:
            function_dist: the prior `model(train_x)`, [*b, n] or [*b, n, T].
            target: [*b, n] or [*b, n, T].
            params, kwargs: the likelihood's arguments.

        Returns:
            [*b], with priors and added loss terms. `.backward()` estimates the gradient.

        Raises:
            ValueError: wrong shapes, dtypes, devices; non-finite data; non-positive noise.
            RuntimeError: under `torch.autocast`; `function_dist` is no prior.
            NonFiniteError: a non-finite hyperparameter or solve, which changes nothing; from `.backward()` a non-finite
                gradient, which changes no `.grad`.
            NotPositiveDefiniteError: H has no Cholesky factor.
        """
        evaluation = self.evaluate(function_dist, target, *params, **kwargs)
        has_separate_gradient = bool((evaluation.estimate.value_sem != 0).any())
        if self._line_search is not None and has_separate_gradient:
            self._line_search.see(self.model)
        return evaluation.value.to(function_dist.loc.dtype)

    def evaluate(self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any) -> Evaluation:
        """`forward`, with the system and the solves."""
        start = time.perf_counter()
        check_autocast()
        system = checked_system(
            self.likelihood,
            self.model,
            function_dist,
            target,
            params,
            kwargs,
            products=self.products,
            cache=self._cache,
        )
        has_been_in_float64 = self._run.is_in_float64(system.operator)  # and stays there
        in_float64 = has_been_in_float64 or self._is_always_in_float64(system.operator)
        system = system.suited(ROUNDING_IN_TRAINING, in_float64=in_float64)
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.no_grad():  # later steps cannot use inference tensors
            operator = system.operator.clone() if is_inference else system.operator
            estimate, run = self._estimate(
                replace(system, operator=operator, residual=system.residual.detach()), self._run
            )
        result = estimate.with_gradient(system.operator, system.residual)
        num_data = function_dist.event_shape.numel()
        result = self._add_other_terms(result, params).div_(num_data)
        value = result.detach().to(function_dist.loc.dtype, copy=True)
        check_estimated("value", value)
        likelihood_params = LikelihoodParams(params, self.model, kwargs) if params or kwargs else None
        self._warn_once(estimate)
        self.report = MarginalLogLikelihoodReport(
            status=estimate.status,
            iterations=estimate.stats.iterations,
            epochs=estimate.stats.epochs,
            residual_targets=estimate.stats.residual_norms["targets"],
            residual_probes=estimate.stats.residual_norms.get("probes"),
            value=value,
            value_sem=(estimate.value_sem / num_data).to(value.dtype),
            seconds=time.perf_counter() - start,
            truncation=estimate.truncation,
            far_field_error=estimate.far_field_error,
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        self._run, self._params = run, likelihood_params  # last: a failed step changes nothing
        return Evaluation(with_checked_gradient(result, self), system, estimate, num_data)

    def posterior(
        self, *, solver: Solver | None = None, rank: int | None = None, num_neighbours: int | None = None
    ) -> PathwisePosterior:
        """The posterior at the current hyperparameters, from the training solves.

        Puts model and likelihood into evaluation mode; `model(x)` uses it until `model.train()`.

        Args:
            solver: for means and sample paths; None is that of training. After training with few epochs pass more.
            rank, num_neighbours: see `PathwisePosterior`.

        Cost: one product; after a change of hyperparameters one solve with one column.

        Warns:
            DataWarning: the model has another likelihood, so another noise.
        """
        if self.model.likelihood is not self.likelihood:
            warn(
                "The model has another likelihood than this marginal log likelihood (BoTorch's relevance pursuit replaces "
                "it), and the posterior has the noise of the latter. For the model's noise make a new marginal log "
                "likelihood with model.likelihood, or PathwisePosterior(model, model.likelihood).",
                DataWarning,
            )
        solutions = self._run.parts.get("warm_start")
        params, kwargs = ((), {}) if self._params is None else self._params.current(self.model)
        self._cache.clear()  # the posterior keeps tiles of its own
        posterior = PathwisePosterior(
            self.model,
            self.likelihood,
            solver=self.solver if solver is None else solver,
            products=self.products,
            # Predictions do not change the training.
            generator=torch.Generator().manual_seed((self._run.generator().initial_seed() + 1) % 2**64),
            params=params,
            kwargs=kwargs,
            initial_weights=None if solutions is None else solutions["latest"][..., 0],
            rank=rank,
            num_neighbours=num_neighbours,
            progress=self.progress,
        )
        posterior.install()
        return posterior

    def _is_always_in_float64(self, operator: LinearOperator) -> bool:
        """Whether a system is in float64, whatever its rounding."""
        return False

    def _warn_once(self, estimate: Estimate) -> None:
        if estimate.status not in SOLVED and estimate.status not in self.warned_of:
            warn_of("The linear solve", estimate.status, estimate.stats, estimate.value.dtype)
            self.warned_of.add(estimate.status)


class IterativeMarginalLogLikelihood(GaussianMarginalLogLikelihood):
    """Base of the marginal log likelihoods with probes."""

    _described = ("probes", "warm_start")
    _is_for_curvature = False

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        probes: ProbeDistribution,
        solver: Solver | None,
        warm_start: WarmStart,
        products: KernelProducts | None,
        generator: torch.Generator | int | None,
        progress: Progress,
    ) -> None:
        check_warm_start(warm_start)
        super().__init__(likelihood, model, solver=solver, products=products, generator=generator)
        self.probes, self.warm_start = probes, warm_start
        check_progress(progress)
        self.progress = progress
        # Without the missing diagonal 1 bounds the spectrum from below, as the quadrature needs.
        self.logdet_probes = Preconditioned(num_probes=NUM_LOGDET_PROBES, correct_diagonal=False)

    def variant(self, *, num_probes: int | None = None, solver: Solver | None = None, redraws: bool = False) -> Self:
        """A copy for steps with a curvature, which tell the gradient's noise and bear it: no control variate.

        It takes conjugate gradients where the default is another iterative solver. It shares model, likelihood and tiles,
        and with as many probes the run, unless it redraws; else it draws new probes.
        """
        other = copy.copy(self)
        other._is_for_curvature = True
        other.solver = self.solver if solver is None else solver
        if num_probes is not None and num_probes != self.probes.num_probes:
            other.probes, redraws = replace(self.probes, num_probes=num_probes), True
        if redraws:
            other._run = Run(self._run.position, self._run.device)
        return other

    def continue_from(self, variant: Self) -> None:
        """Takes a variant's report and, if it has as many probes, its run."""
        self.report, self._params = variant.report, variant._params
        if variant.probes == self.probes:
            self._run = variant._run

    def _is_always_in_float64(self, operator: LinearOperator) -> bool:
        return isinstance(default_solver(operator) if self.solver is None else self.solver, Cholesky)

    def _estimate(self, system: TrainingSystem, run: Run) -> tuple[DensityEstimate | ExactEstimate, Run]:
        operator = system.operator
        solver = default_solver(operator) if self.solver is None else self.solver
        if isinstance(solver, Cholesky):
            return exact_estimate(operator, system.residual, solver), run
        if self.solver is None and self._is_for_curvature:
            # At equal residuals, errors of alternating projections leave more nats.
            solver = ConjugateGradients()
        run = run.for_system(operator)
        is_open = self.solver is None and isinstance(solver, AlternatingProjections)
        if is_open and "order" in run.parts.get("logdet", ()):
            solver, is_open = _with_neighbours(operator), False  # once chosen, they stay
        drawn = self._draw(system, run, solver)
        if is_open and _is_hard(operator, drawn.logdet):
            solver = _with_neighbours(operator)
            drawn = self._draw(system, run, solver)
        return self._solve(system, drawn, solver)

    def _draw(self, system: TrainingSystem, run: Run, solver: Solver) -> "_Drawn":
        """The probes for a solver; those of the run, unless they were for another one."""
        operator = system.operator
        distribution, for_logdet = (suited_to(each, solver, operator) for each in (self.probes, self.logdet_probes))
        known = run.parts.get("logdet")
        if known is not None and not for_logdet.has_drawn(known):
            run, known = run.having(probes=None, logdet=None, quadrature=None, warm_start=None), None
        generator = run.generator()
        terms = system.terms() if self.probes.needs_terms else None
        draws = run.parts.get("probes") if self.warm_start else None
        draws = distribution.draw(operator, terms, generator, others=known) if draws is None else dict(draws)
        probes = distribution.probes(operator, terms, draws)
        logdet_draws = for_logdet.draw(operator, None, generator, others=draws) if known is None else dict(known)
        is_shared = isinstance(distribution, Preconditioned) and distribution.recipe == for_logdet.recipe
        logdet = for_logdet.probes(operator, None, logdet_draws, others=probes if is_shared else None)
        run = run.having(generator, probes=draws, logdet=logdet_draws)
        return _Drawn(run, distribution, probes, logdet, for_logdet is not self.logdet_probes)

    def _solve(self, system: TrainingSystem, drawn: "_Drawn", solver: Solver) -> tuple[DensityEstimate, Run]:
        run, has_control = drawn.run, drawn.are_whitened and not self._is_for_curvature
        control = ControlVariate.of(drawn.probes, system.operator) if has_control else None
        tolerance, residual_of_one = solver.tolerance, drawn.distribution.residual_of_one
        # Solver errors bias the gradient: keep them below the probes' noise.
        least = 0.0 if residual_of_one is None else min(0.05, residual_of_one / math.sqrt(self.probes.num_probes))
        if control is not None:
            least = CONTROLLED_TOLERANCE
            # Above these rows rounding may leave more.
            if self.solver is None and system.operator.shape[-1] <= MOST_ROWS_IN_FLOAT64:
                tolerance = min(tolerance, least)
        probe_tolerance = solver.probe_tolerance or max(tolerance, least)
        before, learned, generator = run.parts.get("warm_start"), run.parts.get("quadrature"), run.generator()
        with divided(), reporting_solve(self.progress) as callback:
            estimate, solutions, positions = stochastic_estimate(
                system.operator,
                system.residual,
                drawn.probes,
                drawn.logdet,
                solver,
                control=control,
                preconditioner=drawn.logdet.covariance if drawn.are_whitened else None,
                tolerances=(tolerance, probe_tolerance),
                initial_guess=before.get("guess", before["latest"]) if before and self.warm_start else None,
                positions=None if learned is None else BracketPositions(**learned),
                generator=generator,
                callback=callback,
            )
        run = run.having(
            generator,
            quadrature=dict(vars(positions)),
            warm_start=warm_start_after(self.warm_start, before, solutions),
        )
        return estimate, run


@dataclass(frozen=True)
class _Drawn:
    run: Run
    distribution: ProbeDistribution
    probes: Probes
    logdet: Probes
    are_whitened: bool  # by the solver's preconditioner


def _with_neighbours(operator: LinearOperator) -> ConjugateGradients:
    points = kernel_inputs(operator)
    is_map = points is not None and points.shape[-1] <= MOST_INPUTS
    return ConjugateGradients(preconditioner=LowRankPlusVecchia(num_neighbours=NEIGHBOURS_ON_MAPS if is_map else None))


def _is_hard(operator: LinearOperator, probes: Probes) -> bool:
    """Whether the probes' low rank leaves so much that alternating projections are slow and the probes noisy."""
    covariance = probes.covariance
    if isinstance(covariance, WhitenedTasks):
        operator, covariance = of_independent_noise(operator), covariance.inner
    return (
        isinstance(covariance, PivotedCholeskyFactor)
        and has_neighbours(operator)
        and largest_left(operator, covariance.factor) > MOST_LEFT
    )

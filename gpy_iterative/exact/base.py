"""The step that all marginal log likelihoods share, and what those with probes and a solver add to it.

`model(train_x)` gives a prior; its lazy covariance and the likelihood's noise become H; the probes are
drawn or rebuilt from their frozen randomness; one solve answers for the targets and the probes together;
one closed-form derivative pass carries the gradient to the user's own parameters.
"""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_instance
from gpy_iterative.errors import ConvergenceWarning, VarianceWarning, warn
from gpy_iterative.exact.estimates import DensityEstimate, Estimate, advice, exact_estimate, stochastic_estimate
from gpy_iterative.exact.line_search import ADVICE, LineSearchWatch
from gpy_iterative.exact.prediction.posterior import PathwisePosterior
from gpy_iterative.exact.probes import Preconditioned, ProbeDistribution, Probes, RandomFeatures, probe_jitter
from gpy_iterative.exact.validation import check_data, check_likelihood, check_not_empty
from gpy_iterative.linear_operators.from_gpytorch import flat_targets, noisy_operator, observed_data
from gpy_iterative.linear_operators.prior_parts import kernel_terms
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCaches
from gpy_iterative.linear_solvers.base import IterativeSolver, Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.default import EXACT_BELOW, default_solver
from gpy_iterative.linear_solvers.logdet.lanczos import (
    MAX_LOGDET_PRODUCTS,
    BracketPositions,
    LogDeterminant,
    stochastic_logdet,
)
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.finite_checks import check_hyperparameters, with_checked_gradient
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress, reporting_solve
from gpy_iterative.training.report import MarginalLogLikelihoodReport
from gpy_iterative.training.state_description import StateDescription, with_params, without_params
from gpy_iterative.training.training_state import TrainingState
from gpy_iterative.training.training_system import check_inputs
from gpy_iterative.worker_threads import divided

logger = logging.getLogger(__name__)

#: Probes of the log-determinant's quadrature. They serve the reported value alone, never the gradient.
NUM_LOGDET_PROBES = 4


class GaussianMarginalLogLikelihood(ExactMarginalLogLikelihood):
    """Base of the marginal log likelihoods of exact Gaussian processes.

    A subclass estimates the log density of the targets (`_estimate`), and begins the state of a run
    (`gpy_iterative.training.training_state.TrainingState.begin`) with the options that shape what it draws, which a loaded
    state has to fit. Everything else, checks, gradient, report, posterior and resume, is here.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        solver: Solver | None,
        products: KernelProducts | None,
        state: TrainingState,
    ) -> None:
        check_likelihood(likelihood, model, type(self).__name__)
        check_inputs(model)  # now: of NaN inputs GPyTorch says later that they are not the training inputs
        check_instance("solver", solver, Solver, "ConjugateGradients()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        super().__init__(likelihood, model)
        self.solver = solver
        self.products = KernelProducts() if products is None else products
        self.report: MarginalLogLikelihoodReport | None = None
        self.progress: Progress = False
        self._state = state
        self._params: LikelihoodParams | None = None
        # Lives as long as the run, so that every step evaluates its tiles into the same memory.
        self._caches = TileCaches()
        self._warned_of: set[SolveStatus] = set()
        self._line_search: LineSearchWatch | None = LineSearchWatch()  # None once it has warned

    @abstractmethod
    def _estimate(
        self, operator: LinearOperator, prior: MultivariateNormal, observed: Tensor | None, residual: Tensor
    ) -> Estimate:
        """The log density of N(0, H) at the residual [*b, n], and what its gradient needs; called without autograd."""

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """An estimate of the log marginal likelihood divided by the number of data.

        Args:
            function_dist: the prior `model(train_x)`, [*b, n] (or [*b, n, T] for a multitask model).
            target: [*b, n] (or [*b, n, T]).
            params: passed to the likelihood, as with GPyTorch's ExactMarginalLogLikelihood.
            kwargs: likewise.

        Returns:
            [*b]. Priors and added loss terms are included. `.backward()` on it is the method's gradient estimator.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, non-finite data, non-positive noise.
            NonFiniteError: a non-finite hyperparameter, or a non-finite number inside the solver; parameters and
                warm start stay as they were. From `.backward()`, a non-finite gradient: no parameter's `.grad` is changed.
            NotPositiveDefiniteError: H has no Cholesky factor where one is needed.
        """
        start = time.perf_counter()
        check_data(self.model, function_dist, target)
        check_hyperparameters(self.model)
        num_data = function_dist.event_shape.numel()
        observed = observed_data(function_dist, target)
        check_not_empty(num_data if observed is None else int(observed.sum()))
        operator = noisy_operator(
            self.likelihood,
            function_dist,
            *params,
            products=self.products,
            caches=self._caches,
            observed=observed,
            **kwargs,
        )
        residual = flat_targets(function_dist, target) - function_dist.loc
        if observed is not None:
            residual = residual[..., observed]
        batch = torch.broadcast_shapes(residual.shape[:-1], operator.batch_shape)
        residual = residual.expand(*batch, residual.shape[-1])
        if batch != operator.batch_shape:
            operator = operator.expand(*batch, *operator.matrix_shape)

        # What a run keeps (draws, solutions, tiles) must not be inference tensors: later steps could not use them.
        is_inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.no_grad():
            estimate = self._estimate(
                operator.clone() if is_inference else operator, function_dist, observed, residual.detach()
            )
        self._params = LikelihoodParams.given(params, self.model, kwargs)
        result = estimate.with_gradient(operator, residual)
        result = self._add_other_terms(result, params).div_(num_data)
        self._warn_once(estimate)
        self._warn_of_line_search(estimate)
        self.report = MarginalLogLikelihoodReport(
            status=estimate.status,
            iterations=estimate.stats.iterations,
            epochs=estimate.stats.epochs,
            residual_targets=estimate.stats.residual_norms["targets"],
            residual_probes=estimate.stats.residual_norms.get("probes"),
            value=result.detach().clone(),
            value_sem=estimate.value_sem / num_data,
            seconds=time.perf_counter() - start,
            truncation=estimate.truncation,
            probe_jitter=estimate.probe_jitter,
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        return with_checked_gradient(result, self)

    def posterior(
        self, *, solver: Solver | None = None, rank: int = 1024, num_neighbours: int = 128
    ) -> PathwisePosterior:
        """The posterior at the current hyperparameters, warm-started from the training solves.

        Args:
            solver: of means and sample paths; None is training's. After training on a small budget of epochs, one with a
                larger budget: a single column is cheap beside a training step.
            rank: of the variances, see `PathwisePosterior`; they take memory for about four blocks [n, rank].
            num_neighbours: of the variances, likewise.

        Puts model and likelihood into evaluation mode and becomes the model's prediction strategy, so that
        `likelihood(model(x))` answers from the same solves until `model.train()`. Cost: one product when the
        hyperparameters have not moved since the last solve, else one warm-started solve for the targets; what
        variances and sample paths cost is said in `PathwisePosterior`.
        """
        solutions = self._state.warm_start.latest
        self._caches.clear()  # the posterior keeps tiles of its own
        posterior = PathwisePosterior(
            self.model,
            self.likelihood,
            solver=self._prediction_solver() if solver is None else solver,
            products=self.products,
            # Forked, so that looking at predictions in the middle of training does not change the training.
            generator=torch.Generator().manual_seed((self._state.generator.initial_seed() + 1) % 2**64),
            params=() if self._params is None else self._params.current(self.model),
            kwargs=None if self._params is None else self._params.current_kwargs(self.model),
            initial_weights=None if solutions is None else solutions[..., 0],
            prior=self._prior_samples(),
            rank=rank,
            num_neighbours=num_neighbours,
            progress=self.progress,
        )
        posterior.install()
        return posterior

    def _prediction_solver(self) -> Solver | None:
        """Of the posterior's means and sample paths: those of an estimate that has no solves to tolerance of its own."""
        inputs = self.model.train_inputs
        if self.solver is not None or inputs is None or inputs[0].shape[-2] <= EXACT_BELOW:
            return self.solver
        return ConjugateGradients(tolerance=1e-4)

    def _prior_samples(self) -> tuple[RandomFeatures, Draws, Tensor] | None:
        """Prior samples and their solutions that the posterior can go on with."""
        return None

    def training_state(self) -> dict[str, Tensor]:
        """Generator, frozen draws, warm start and the likelihood's arguments as a plain dict of tensors.

        Saved with `torch.save` beside the `state_dict()`s of model and optimiser, it resumes a run exactly. Raises
        ValueError where an argument of the likelihood is no tensor, number or string.
        """
        return self._description().added_to(with_params(self._state.to_dict(), self._params))

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Takes what `training_state()` gave.

        Raises ValueError, which names what differs, and changes nothing, for anything else: another method, other options
        or sizes. The state may come from another device.
        """
        entries, params = without_params(self._description().taken_from(state))
        self._state.load_dict(entries)
        self._params = params
        if self.model.train_inputs:
            device = self.model.train_inputs[0].device
            self._move_run(lambda tensor: tensor.to(device))

    def _description(self) -> StateDescription:
        return StateDescription.of(self, self._state.options)

    def _warn_once(self, estimate: Estimate) -> None:
        is_solved = estimate.status in (SolveStatus.CONVERGED, SolveStatus.TRUNCATED)
        if isinstance(estimate, DensityEstimate) and not is_solved and estimate.status not in self._warned_of:
            warn(advice(estimate), ConvergenceWarning)
            self._warned_of.add(estimate.status)

    def _has_separate_estimates(self, estimate: Estimate) -> bool:
        """Whether the gradient is not that of the value, but another estimate."""
        return bool((estimate.value_sem != 0).any())

    def _warn_of_line_search(self, estimate: Estimate) -> None:
        watch = self._line_search
        if watch is not None and self._has_separate_estimates(estimate) and watch.sees_search(self.model):
            warn(ADVICE, VarianceWarning)
            self._line_search = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GaussianMarginalLogLikelihood":
        super()._apply(fn, recurse)
        self._move_run(fn)
        return self

    def _move_run(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._state.apply(fn)
        if self._params is not None:
            self._params.apply(fn)


class IterativeMarginalLogLikelihood(GaussianMarginalLogLikelihood):
    """Base of the marginal log likelihoods that estimate the gradient's trace term from probes.

    A subclass says where the probes come from.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        probes: ProbeDistribution,
        solver: Solver | None,
        warm_start: Literal["extrapolated", "previous", False],
        products: KernelProducts | None,
        generator: torch.Generator | int | None,
        progress: Progress,
    ) -> None:
        state = TrainingState.begin(generator, {"probes": probes}, warm_start)
        super().__init__(likelihood, model, solver=solver, products=products, state=state)
        self.probes = probes
        check_progress(progress)
        self.progress = progress
        # Without the missing diagonal the spectrum is bounded by 1 from below, which the quadrature makes use of.
        self.logdet_probes = Preconditioned(num_probes=NUM_LOGDET_PROBES, correct_diagonal=False)

    def _prediction_solver(self) -> Solver | None:
        return self.solver

    def _probe_tolerance(self, solver: Solver) -> float:
        """The relative residual to which probes are solved when `solver.probe_tolerance` is None."""
        # What the solver leaves of the probes is a bias, which has to stay below their own noise, of order
        # 1 / sqrt(num_probes). Measured on elevators, n = 14,940, with 16 preconditioned probes: an error of the gradient
        # of 1.9 % where they are solved to .1, .6 % to .05, .35 % to .03, and no less to .02; a warm-started step at .03
        # takes 5 % longer than at .1. Random features, n = 3,724, at .03: a third of their
        # noise on elevators, a fifth on protein.
        if self.probes.resembles_system:
            return max(solver.tolerance, min(0.05, 0.12 / math.sqrt(self.probes.num_probes)))
        return solver.tolerance

    def _prior_samples(self) -> tuple[RandomFeatures, Draws, Tensor] | None:
        """The last step's pathwise probes and their solutions: samples that the posterior can go on with."""
        draws, solutions = self._state.kept_draws("probes"), self._state.warm_start.latest
        if not isinstance(self.probes, RandomFeatures) or draws is None or solutions is None:
            return None
        return self.probes, draws, solutions[..., 1:]

    def _estimate(
        self, operator: LinearOperator, prior: MultivariateNormal, observed: Tensor | None, residual: Tensor
    ) -> DensityEstimate:
        solver = default_solver(operator) if self.solver is None else self.solver
        if isinstance(solver, Cholesky):
            return exact_estimate(operator, residual, solver)

        state, distribution = self._state, self.probes
        terms = kernel_terms(prior.lazy_covariance_matrix, observed) if distribution.needs_terms else None
        randomness = state.draws_for(
            "probes",
            residual,
            operator.shape,
            lambda: distribution.draw(operator, terms, state.generator),
            keep=state.warm_start.mode is not False,
        )
        probes = distribution.probes(operator, terms, randomness)
        with divided():
            logdet_probes = self._logdet_probes(operator, residual, probes)
            guess = state.warm_start.initial_guess(residual, distribution.num_probes + 1)
            guess_image, dual_image = _images(operator, guess, logdet_probes)
            log_determinant = self._log_determinant(operator, logdet_probes, dual_image, solver)
            with reporting_solve(self.progress) as callback:
                estimate = stochastic_estimate(
                    operator,
                    residual,
                    probes,
                    log_determinant,
                    solver,
                    tolerances=(solver.tolerance, solver.probe_tolerance or self._probe_tolerance(solver)),
                    initial_guess=guess,
                    guess_product=guess_image,
                    generator=state.generator,
                    callback=callback,
                )
        # Only now: a step that fails leaves the state as it was.
        state.keep("quadrature", dict(vars(log_determinant.positions)))
        state.warm_start.update(estimate.solutions)
        return replace(estimate, probe_jitter=probe_jitter(probes, logdet_probes))

    def _logdet_probes(self, operator: LinearOperator, residual: Tensor, others: Probes) -> Probes:
        randomness = self._state.draws_for(
            "logdet", residual, operator.shape, lambda: self.logdet_probes.draw(operator, None, self._state.generator)
        )
        return self.logdet_probes.probes(operator, None, randomness, others=others)

    def _log_determinant(
        self, operator: LinearOperator, probes: Probes, dual_image: Tensor | None, solver: Solver
    ) -> LogDeterminant:
        """Within the solver's budget: the value must not cost more passes over the matrix than the gradient may."""
        budget = solver.max_epochs if isinstance(solver, IterativeSolver) else MAX_LOGDET_PRODUCTS
        learned = self._state.kept_draws("quadrature")
        return stochastic_logdet(
            operator,
            probes.vectors,
            preconditioner=probes.covariance,
            max_iterations=min(MAX_LOGDET_PRODUCTS, int(budget)),
            positions=None if learned is None else BracketPositions(**learned),
            first_product=dual_image,
        )


def _images(operator: LinearOperator, guess: Tensor | None, probes: Probes) -> tuple[Tensor | None, Tensor | None]:
    """H times a guess and H times the probes' duals, which two products would begin with, in one; None without a guess.

    Tiles are read, and where they are not kept evaluated, once for both.
    """
    if guess is None:
        return None, None
    duals = probes.covariance.solve(probes.vectors)
    guess_image, dual_image = operator._matmul(torch.cat([guess, duals], dim=-1)).tensor_split(
        [guess.shape[-1]], dim=-1
    )
    return guess_image, dual_image

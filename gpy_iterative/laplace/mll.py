"""Laplace's evidence, or a lower bound."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor

from gpy_iterative.checks import check_autocast, check_choice, check_count, check_fraction, check_instance
from gpy_iterative.errors import ConvergenceWarning, warn
from gpy_iterative.exact.validation import check_layers
from gpy_iterative.laplace.elbo import exact_bound, subspace_bound
from gpy_iterative.laplace.evidence import ObjectiveEstimate, exact_evidence, stochastic_evidence
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.mode import check_targets_fit, observed_data
from gpy_iterative.laplace.model import IterativeLaplaceGP
from gpy_iterative.laplace.newton.base import LaplaceSolution, LaplaceSolver
from gpy_iterative.laplace.newton.dense import LaplaceCholesky
from gpy_iterative.laplace.newton.newton import chosen_solver
from gpy_iterative.laplace.posterior import LaplacePosterior
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.latent import LatentPrior, latent_prior, num_latents
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress, reporting_solve
from gpy_iterative.training.report import Report
from gpy_iterative.training.run import Resumable, Run
from gpy_iterative.training.snapshot import evaluation_copies
from gpy_iterative.training.state_description import StateDescription
from gpy_iterative.training.surrogate import with_checked_gradient
from gpy_iterative.training.training_system import check_hyperparameters, check_inputs, prior_at
from gpy_iterative.worker_threads import CPU

logger = logging.getLogger(__name__)

Objective = Literal["laplace", "elbo"]


@dataclass(frozen=True)
class LaplaceReport(Report):
    """One training step of a LaplaceMarginalLogLikelihood.

    Attributes:
        status: of the mode, the worst solve, or the bound.
        iterations: Newton steps.
        epochs, probe_epochs: kernel products for the mode and for the gradient.
        stationarity: see `LaplaceSolution`.
        rank: number of actions.
        value, value_sem: result of `forward`, and its standard error from probes, [].
        far_field_error: as in `MarginalLogLikelihoodReport`, without exact rows.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    probe_epochs: float
    stationarity: float
    rank: int
    value: Tensor
    value_sem: Tensor
    seconds: float
    far_field_error: float | None = None

    def __str__(self) -> str:
        far = "" if self.far_field_error is None else f"; far field to {self.far_field_error:.1g}"
        return (
            f"mll {self.value.item():.4f} ± {self.value_sem.item():.1g}; {self.status.name.lower()} after "
            f"{self.iterations} Newton steps, {self.epochs:.0f} kernel products and {self.probe_epochs:.0f} with probes; "
            f"relative gradient {self.stationarity:.1g}{far}; {self.seconds:.2f} s"
        )


class LaplaceMarginalLogLikelihood(Resumable, MarginalLogLikelihood):
    """Laplace's approximation of the log marginal likelihood, divided by the number of targets.

    The gradient includes how the mode moves.

    Args:
        likelihood: the model's.
        objective: "laplace", or "elbo" for the largest variational lower bound, without probes. `LaplaceCholesky`
            maximises it over all Gaussians; `LaplaceNewton` in the span of the actions of a cold search, which the gradient
            holds fixed.
        solver: None is `LaplaceCholesky()` (without probes) up to n C = 2,000, else `LaplaceNewton()`.
        num_probes: probe vectors of the gradient's trace.
        tolerance: relative residual of the solves for the gradient.
        products: None takes the model's.
        generator: a seed, or a generator, which is copied.
        progress: True shows bars; a callable gets every `ProgressReport`.

    Raises:
        UnsupportedLikelihoodError: Laplace's method does not suit the likelihood.
        ValueError: an option is out of range, or the likelihood not the model's.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: IterativeLaplaceGP,
        *,
        objective: Objective = "laplace",
        solver: LaplaceSolver | None = None,
        num_probes: int = 16,
        tolerance: float = 0.01,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
        progress: Progress = False,
    ) -> None:
        if not isinstance(model, IterativeLaplaceGP):
            raise TypeError(
                f"LaplaceMarginalLogLikelihood needs a gpy_iterative.models.IterativeLaplaceGP, got {type(model).__name__}."
            )
        if likelihood is not model.likelihood:
            raise ValueError(
                "The likelihood is not the model's own, with which the model predicts: pass model.likelihood, or make the "
                "model with this one."
            )
        check_choice("objective", objective, get_args(Objective))
        check_count("num_probes", num_probes)
        check_fraction("tolerance", tolerance)
        check_instance("solver", solver, LaplaceSolver, "LaplaceNewton()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        check_progress(progress)
        super().__init__(likelihood, model)
        self.objective, self.solver = objective, solver
        self.num_probes, self.tolerance = num_probes, tolerance
        self.products = model.products if products is None else products
        self.report: LaplaceReport | None = None
        self.progress = progress
        self._run = Run.begin(generator)
        self._cache = TileCache()
        self.warned_of: set[SolveStatus] = set()

    _add_other_terms = ExactMarginalLogLikelihood._add_other_terms

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any) -> Tensor:
        """The objective [], with priors and added loss terms, at the mode.

        Args:
            function_dist: the prior `model(train_x)`: [n], [C, n] or, multitask, [n, C].
            target: [n], or multitask [n, C].
            params: for an unregistered likelihood's `forward`.

        Raises:
            ValueError: unsuitable data.
            NonFiniteError: a hyperparameter or value is not finite, or from `.backward()` a gradient; nothing changes.
            RuntimeError: the model is in evaluation mode.
        """
        start = time.perf_counter()
        self._check_problem(function_dist, target)
        observed, targets, known = observed_data(target, params)
        prior = latent_prior(function_dist, self.products, self._cache, observed)
        likelihood = PointwiseLikelihood(self.likelihood, targets, prior.num_latents, known)
        solver = chosen_solver(self.solver, prior.size)
        generator = self._run.generator()
        # A warm start finds fewer actions, whose span bounds less: the value would depend on earlier steps.
        is_cold = self.objective == "elbo" and not isinstance(solver, LaplaceCholesky)
        weights = None if is_cold else self._weights
        if is_cold and "draws" in self._run.parts:  # each bound draws the same: its standard error is zero
            generator.set_state(self._run.parts["draws"]["position"].to(CPU, torch.uint8))
        draws = {"position": generator.get_state()} if is_cold else None
        with reporting_solve(self.progress, "mode", "products") as callback:
            prior, solution = solver.mode(
                prior, likelihood, initial_weights=weights, generator=generator, callback=callback
            )
        with torch.inference_mode(False), torch.no_grad():
            fixed = LatentPrior(prior.operator, prior.mean.detach())
            estimate = self._estimate(fixed, likelihood, solution, solver, generator)
        value = estimate.with_gradient(prior, likelihood).to(function_dist.mean.dtype)
        value = self._add_other_terms(value, params).div_(target.numel())
        self._warn_once(solution, estimate, solver.advice(solution, prior.operator.dtype))
        self.report = LaplaceReport(
            status=estimate.status,
            iterations=solution.num_outer,
            epochs=solution.stats.epochs,
            probe_epochs=estimate.probe_epochs,
            stationarity=solution.stationarity,
            rank=solution.inverse.rank,
            value=value.detach().clone(),
            value_sem=estimate.value_sem / target.numel(),
            seconds=time.perf_counter() - start,
            far_field_error=None if isinstance(solver, LaplaceCholesky) else far_field_error(prior.operator),
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        self._params = LikelihoodParams.given(params, self.model)
        self._run = self._run.having(generator, mode={"weights": solution.value}, draws=draws)
        return with_checked_gradient(value, self)

    def posterior(self) -> LaplacePosterior:
        """The posterior from the last mode, which `model(x)` then uses. Puts model and likelihood into evaluation mode."""
        self.model.eval()
        self.likelihood.eval()
        self._cache.clear()
        return self.model.posterior(self._weights, solver=self.solver, products=self.products, progress=self.progress)

    def has_exact_values(self) -> bool:
        """Whether value and gradient take no probes."""
        if not self.model.train_inputs:  # taken away by hand: `gpi.fit` says so
            return False
        size = self._num_latents() * len(self.model.train_targets)
        return isinstance(chosen_solver(self.solver, size), LaplaceCholesky)

    @property
    def _weights(self) -> Tensor | None:
        mode = self._run.parts.get("mode")
        return None if mode is None else mode["weights"]

    def _description(self) -> StateDescription:
        options = {"likelihood": self.likelihood, "objective": self.objective, "num_probes": self.num_probes}
        return StateDescription.of(self, options | {"number of latent functions": self._num_latents()})

    @property
    def _params(self) -> LikelihoodParams | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.likelihood_params

    @_params.setter
    def _params(self, params: LikelihoodParams | None) -> None:
        self.model.keep_params(params)

    @torch.no_grad()
    def _num_latents(self) -> int:
        inputs = [x[:2] for x in self.model.train_inputs]
        model, _ = evaluation_copies(self.model, self.likelihood)  # a forward pass may change layers
        return num_latents(prior_at(model, inputs))

    def _check_problem(self, function_dist: MultivariateNormal, target: Tensor) -> None:
        if not self.model.training:
            raise RuntimeError(
                "The model is in evaluation mode, where model(x) is a posterior: call model.train() first."
            )
        if not isinstance(function_dist, MultivariateNormal):
            raise RuntimeError(
                f"The first argument must be the MultivariateNormal that model(train_x) returns, got "
                f"{type(function_dist).__name__}."
            )
        check_autocast()
        check_targets_fit(function_dist, target)
        check_inputs(self.model)
        check_layers(self.model, batches=False)
        check_hyperparameters(self.model.named_parameters())

    def _estimate(
        self,
        prior: LatentPrior,
        likelihood: PointwiseLikelihood,
        solution: LaplaceSolution,
        solver: LaplaceSolver,
        generator: torch.Generator,
    ) -> ObjectiveEstimate:
        is_exact = isinstance(solver, LaplaceCholesky)
        if self.objective == "elbo":
            return (exact_bound if is_exact else subspace_bound)(prior, likelihood, solution)
        if is_exact:
            return exact_evidence(prior, likelihood, solution)
        options = {"num_probes": self.num_probes, "tolerance": self.tolerance, "generator": generator}
        return stochastic_evidence(prior, likelihood, solution, **options)

    def _warn_once(self, solution: LaplaceSolution, estimate: ObjectiveEstimate, advice_on_mode: str) -> None:
        status = estimate.status
        if status is SolveStatus.CONVERGED or status in self.warned_of:
            return
        has_mode = solution.converged or self.objective == "elbo"
        warn(estimate.advice if has_mode else advice_on_mode, ConvergenceWarning)
        self.warned_of.add(status)

    def _move_run(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._move_run(function)
        self._run = self._run.mapped(torch.Tensor.double)

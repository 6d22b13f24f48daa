"""The evidence of Laplace's approximation, or a bound on the evidence: how hyperparameters are learned without Gaussian
noise and without inducing points.

Tatzel, Wenger, Schneider and Hennig, "Accelerating Non-Conjugate Gaussian Processes By Trading Off Computation For
Uncertainty", whose hyperparameters are fixed; what learns them here is this package's own.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag, check_fraction, check_instance
from gpy_iterative.errors import ConvergenceWarning, float64_first, warn
from gpy_iterative.laplace.elbo import BoundEstimate, exact_bound, subspace_bound
from gpy_iterative.laplace.evidence import EvidenceEstimate, exact_evidence
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood, check_laplace_likelihood
from gpy_iterative.laplace.model import IterativeLaplaceGP
from gpy_iterative.laplace.newton.base import LaplaceSolver
from gpy_iterative.laplace.newton.cholesky import LaplaceCholesky
from gpy_iterative.laplace.newton.default import default_laplace_solver
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.laplace.prediction.latent_blocks import latent_terms
from gpy_iterative.laplace.prediction.posterior import LaplacePosterior
from gpy_iterative.laplace.prediction.targets import check_targets_fit, observed_params, observed_points
from gpy_iterative.laplace.report import LaplaceReport
from gpy_iterative.laplace.traces import LogDet, Trace, stochastic_evidence
from gpy_iterative.linear_operators.latent import LatentPrior, latent_prior, num_latents
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCaches
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress, reporting_solve
from gpy_iterative.training.run import make_generator
from gpy_iterative.training.snapshot import evaluation_copies
from gpy_iterative.training.state_description import StateDescription, checked_generator, with_params, without_params
from gpy_iterative.training.surrogate import with_checked_gradient
from gpy_iterative.training.training_system import check_hyperparameters, check_inputs, prior_at

logger = logging.getLogger(__name__)

Objective = Literal["laplace", "elbo"]


class LaplaceMarginalLogLikelihood(MarginalLogLikelihood):
    """Laplace's approximation of the log marginal likelihood, divided by the number of targets; made for any likelihood.

    Every call finds the mode, from the last one's; the gradient includes what moves with it.

    Args:
        likelihood: the model's, see `gpy_iterative.likelihoods`: Bernoulli, softmax, Poisson, Student-t, negative binomial,
            beta, Gaussian, registered ones, and any whose `forward` has a smooth `log_prob`.
        model: an `IterativeLaplaceGP`.
        objective: "laplace" is the evidence of Laplace's approximation; "elbo" the largest lower bound on the true log
            marginal likelihood that a Gaussian reaches: any with `LaplaceCholesky`, one in the span of the solver's actions
            with `LaplaceNewton`, where the gradient is that for fixed actions. No probes.
        solver: of the mode. None is exact (dense value, gradient and adjoint, without probes) up to n C = 2,000 and
            `LaplaceNewton()` beyond; `LaplaceCholesky()` insists on the exact one.
        num_probes: probe vectors of the gradient's trace.
        trace: "preconditioned" (probes that know the mode's actions), "standard" (Rademacher), "pathwise" (random
            features, for one or few latent functions), all unbiased.
        deflate: take exactly what the actions know of the trace.
        logdet: "slq", stochastic Lanczos quadrature, or "lowrank", a lower bound; of the value alone.
        tolerance: relative residual of the solves for probes and adjoint.
        num_frequencies: of trace="pathwise".
        products: how kernel products are computed.
        generator: a generator, or the seed of one. The global generator is never touched.
        progress: True shows a bar for every mode; a callable gets every `gpy_iterative.progress.ProgressReport`.

    Raises:
        UnsupportedLikelihoodError: a likelihood for which Laplace's method is meaningless.
        ValueError: an option outside its range, or another likelihood than the model's.
        TypeError: a model that is no IterativeLaplaceGP, a solver or products of another type.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: IterativeLaplaceGP,
        *,
        objective: Objective = "laplace",
        solver: LaplaceSolver | None = None,
        num_probes: int = 16,
        trace: Trace = "preconditioned",
        deflate: bool = True,
        logdet: LogDet = "slq",
        tolerance: float = 0.01,
        num_frequencies: int = 500,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
        progress: Progress = False,
    ) -> None:
        check_laplace_likelihood(likelihood)
        if not isinstance(model, IterativeLaplaceGP):
            raise TypeError(
                f"LaplaceMarginalLogLikelihood needs a gpy_iterative.models.IterativeLaplaceGP, got {type(model).__name__}."
            )
        if likelihood is not model.likelihood:
            raise ValueError(
                "The likelihood is not the model's own, with which the model predicts: pass model.likelihood, or make the "
                "model with this one."
            )
        for name, value, kinds in (
            ("objective", objective, Objective),
            ("trace", trace, Trace),
            ("logdet", logdet, LogDet),
        ):
            if value not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {value!r}.")
        check_count("num_probes", num_probes)
        check_count("num_frequencies", num_frequencies)
        check_fraction("tolerance", tolerance)
        check_flag("deflate", deflate)
        check_instance("solver", solver, LaplaceSolver, "LaplaceNewton()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        super().__init__(likelihood, model)
        self.objective, self.solver, self.num_probes = objective, solver, num_probes
        self.trace, self.deflate, self.logdet = trace, deflate, logdet
        self.tolerance, self.num_frequencies = tolerance, num_frequencies
        self.products = model.products if products is None else products
        self.report: LaplaceReport | None = None
        check_progress(progress)
        self.progress = progress
        self._generator = make_generator(generator)
        self._caches = TileCaches()
        self._weights: Tensor | None = None
        self._warned_of: set[SolveStatus] = set()

    # Priors and added loss terms: read from the model, whatever the mll.
    _add_other_terms = ExactMarginalLogLikelihood._add_other_terms

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any) -> Tensor:
        """The objective, [], divided by the number of targets; priors and added loss terms included.

        Args:
            function_dist: the prior `model(train_x)`: [n], [C, n] or, multitask, [n, C].
            target: [n] ([n, C] for multitask likelihoods).
            params: passed to an unregistered likelihood's `forward`.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, data that are not finite or outside the support.
            NonFiniteError: a non-finite hyperparameter, or a non-finite number in a solver; parameters and warm start stay
                as they were. From `.backward()`, a non-finite gradient: no parameter's `.grad` is changed.
            RuntimeError: the model is in evaluation mode.
        """
        start = time.perf_counter()
        if not self.model.training:
            raise RuntimeError(
                "The model is in evaluation mode, where model(x) is a posterior: call model.train() first."
            )
        if not isinstance(function_dist, MultivariateNormal):
            raise RuntimeError(f"The prior must be a MultivariateNormal, got {type(function_dist).__name__}.")
        check_targets_fit(function_dist, target)
        check_inputs(self.model)
        check_hyperparameters(self.model)
        observed = observed_points(target)
        num_targets = target.numel()
        prior = latent_prior(function_dist, self.products, self._caches, observed)
        if observed is not None:
            target = target[observed]
        likelihood = PointwiseLikelihood(self.likelihood, target, prior.num_latents, observed_params(params, observed))
        solver = self._solver_for(prior)
        position = self._generator.get_state()
        try:
            with torch.inference_mode(False), torch.no_grad():
                with reporting_solve(self.progress, "mode", "products") as callback:
                    solution = solver.solve(
                        _detached(prior),
                        likelihood,
                        initial_weights=self._weights,
                        generator=self._generator,
                        callback=callback,
                    )
                estimate = self._estimate(prior, likelihood, solution, solver, function_dist, observed)
            if isinstance(estimate, BoundEstimate):
                value = estimate.with_gradient(prior, likelihood)
            else:
                value = estimate.with_gradient(prior, likelihood, solver.curvature)
        except BaseException:
            self._generator.set_state(position)  # the next step draws what the failed one did
            raise
        value = self._add_other_terms(value, params).div_(num_targets)
        self._weights = solution.value
        self.model.keep_params(LikelihoodParams.given(params, self.model))
        self._warn_once(solution, estimate, solver, prior.operator.dtype)
        self.report = LaplaceReport(
            status=estimate.status,
            iterations=solution.num_outer,
            epochs=solution.stats.epochs,
            probe_epochs=estimate.probe_epochs,
            stationarity=solution.stationarity,
            rank=solution.actions.shape[-1],
            value=value.detach().clone(),
            value_sem=estimate.value_sem / num_targets,
            seconds=time.perf_counter() - start,
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        return with_checked_gradient(value, self)

    def posterior(self) -> LaplacePosterior:
        """The posterior now, from the last mode and with the solver of this object (the model's, where that is None).

        Puts model and likelihood into evaluation mode, and answers `model(x)` until `model.train()`.
        """
        self.model.eval()
        self.likelihood.eval()
        self._caches.clear()
        return self.model.posterior(self._weights, solver=self.solver, products=self.products, progress=self.progress)

    def training_state(self) -> dict[str, Tensor]:
        """Generator, warm start and the likelihood's arguments as a plain dict of tensors, which resumes a run exactly.

        Raises ValueError where an argument of the likelihood is no tensor, number or string.
        """
        state = {"generator": self._generator.get_state()}
        if self._weights is not None:
            state["weights"] = self._weights.clone()
        return self._description().added_to(with_params(state, self.model.likelihood_params))

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Takes what `training_state()` gave.

        Raises ValueError, which names what differs, and changes nothing, for anything else: another method, other options
        or sizes.
        """
        entries, params = without_params(self._description().taken_from(state))
        position, weights = checked_generator(entries, self._generator), entries.get("weights")
        if entries.keys() - {"generator", "weights"} or not _are_weights(weights):
            raise ValueError(
                "This is no training state of a LaplaceMarginalLogLikelihood: take it from training_state()."
            )
        self._generator.set_state(position)
        self._weights = None if weights is None else weights.clone()
        if params is not None and self.model.train_inputs:
            device = self.model.train_inputs[0].device
            params.apply(lambda tensor: tensor.to(device))
        self.model.keep_params(params)

    def _description(self) -> StateDescription:
        options = {"likelihood": self.likelihood, "objective": self.objective, "num_probes": self.num_probes}
        options |= {"trace": self.trace, "deflate": self.deflate, "logdet": self.logdet}
        options |= {"num_frequencies": self.num_frequencies, "number of latent functions": self._num_latents()}
        return StateDescription.of(self, options)

    @torch.no_grad()
    def _num_latents(self) -> int | None:
        """Of the prior at two of the training inputs; None without any."""
        known: Any = self.model.train_inputs
        if not known:
            return None
        inputs = [x[..., :2, :] for x in known]
        model, _ = evaluation_copies(self.model, self.likelihood)  # layers that learn from what they see do not
        return num_latents(prior_at(model, inputs))

    def _solver_for(self, prior: LatentPrior) -> LaplaceSolver:
        return default_laplace_solver(prior.size) if self.solver is None else self.solver

    def _estimate(
        self,
        prior: LatentPrior,
        likelihood: PointwiseLikelihood,
        solution: LaplaceSolution,
        solver: LaplaceSolver,
        function_dist: MultivariateNormal,
        observed: Tensor | None,
    ) -> EvidenceEstimate | BoundEstimate:
        is_exact = isinstance(solver, LaplaceCholesky)
        if self.objective == "elbo":
            return (exact_bound if is_exact else subspace_bound)(_detached(prior), likelihood, solution)
        if is_exact:
            return exact_evidence(_detached(prior), likelihood, solution, solver.curvature)
        return stochastic_evidence(
            _detached(prior),
            likelihood,
            solution,
            solver.curvature,
            trace=self.trace,
            deflate=self.deflate,
            logdet=self.logdet,
            num_probes=self.num_probes,
            num_frequencies=self.num_frequencies,
            tolerance=self.tolerance,
            terms=latent_terms(function_dist, observed) if self.trace == "pathwise" else None,
            generator=self._generator,
        )

    def _warn_once(
        self,
        solution: LaplaceSolution,
        estimate: EvidenceEstimate | BoundEstimate,
        solver: LaplaceSolver,
        dtype: torch.dtype,
    ) -> None:
        status = estimate.status
        if status is SolveStatus.CONVERGED or status in self._warned_of:
            return
        if isinstance(estimate, BoundEstimate):
            text = (
                f"The search for the largest lower bound ended with status {status.name.lower()}: value and gradient are "
                "those of a smaller one. Bound the outputscale."
            )
        elif solution.converged:
            text = (
                f"A solve for the gradient ended with status {status.name.lower()}: {float64_first(dtype)}loosen the "
                "tolerance of LaplaceMarginalLogLikelihood, or keep outputscale and likelihood parameters in bounds."
            )
        else:
            text = solver.advice(solution, dtype)
        warn(text, ConvergenceWarning)
        self._warned_of.add(status)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LaplaceMarginalLogLikelihood":
        super()._apply(fn, recurse)
        # float64 whatever the model's dtype; the device follows.
        if self._weights is not None:
            self._weights = fn(self._weights).double()
        return self


def _are_weights(value: object) -> bool:
    """Whether a training state's entry is v [n, C], or none."""
    return value is None or (isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2)


def _detached(prior: LatentPrior) -> LatentPrior:
    """Without the graph; the same tensors otherwise, whose tiles are kept."""
    return LatentPrior(prior.operator, prior.mean.detach())

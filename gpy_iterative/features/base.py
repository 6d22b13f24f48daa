"""The step of all mini-batch methods."""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.changes import SeenData
from gpy_iterative.checks import check_autocast, check_count, check_finite
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.exact.validation import LineSearchWatch, check_fit, check_layers, check_likelihood
from gpy_iterative.features.validation import StandstillWatch, check_rows, checked_indices
from gpy_iterative.features.weight_space.posterior import WeightSpacePosterior
from gpy_iterative.features.weight_space.problem import (
    FeatureBatch,
    WeightSpacePrior,
    WeightSpaceProblem,
    check_one_output,
)
from gpy_iterative.features.weight_space.weights import (
    WeightDistribution,
    exact_log_marginal_likelihood,
    exact_statistics,
    log_marginal_likelihood_gap,
)
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress
from gpy_iterative.training.report import Report
from gpy_iterative.training.run import NO_ROWS, Resumable, Run, next_rows
from gpy_iterative.training.surrogate import with_checked_gradient
from gpy_iterative.training.training_system import check_has_data, check_hyperparameters, check_inputs, prior_at
from gpy_iterative.worker_threads import CPU

logger = logging.getLogger(__name__)

BATCH_SIZE = 256


@dataclass(frozen=True)
class MinibatchReport(Report):
    """One mini-batch step; `steps` counts training steps."""

    value: Tensor
    batch_size: int
    num_data: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"mll {self.value.item():.4f} from {self.batch_size} of {self.num_data} data; step {self.steps}; "
            f"{self.seconds:.3f} s"
        )


class FeatureMarginalLogLikelihood(Resumable, ExactMarginalLogLikelihood):
    """Base of the mini-batch marginal log likelihoods.

    The run's parts "weights" and "parameters" (of the module) are float64 and not in `state_dict()`.

    Attributes:
        progress: True shows a bar for passes, a callable gets every `ProgressReport`.
        report: of the last step.
    """

    _described = ("batch_size", "num_features")
    needs_features = True
    #: Weights of the basis, else of scaled features.
    centred = False

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        batch_size: int | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        check_likelihood(likelihood, model, type(self).__name__)
        check_inputs(model)
        check_count("batch_size", batch_size, optional=True)
        super().__init__(likelihood, model)
        zero = torch.tensor(0, device=CPU)  # 0 data: weights are not started
        counts = {"steps": zero, "num_data": zero}
        self._run = Run.begin(generator).having(counts=counts, rows=NO_ROWS, weights={})
        self.batch_size = batch_size
        self.report: MinibatchReport | None = None
        self.progress: Progress = False
        self._seen: SeenData | None = None  # the run's data; None: those of the next call
        self._checked_modes: list[bool] = []
        self._standstill = StandstillWatch(type(self).__name__)
        self._line_search = LineSearchWatch()
        self._current_batch_size()
        self.num_features = self._count_features()

    @abstractmethod
    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        """The run with exact weights."""

    @abstractmethod
    def _step(self, problem: WeightSpaceProblem, rows: Tensor, run: Run) -> tuple[Tensor, Run]:
        """Estimate of -2 log p(y) - n log(2 pi), and the next run."""

    @abstractmethod
    def _weights(self, run: Run) -> WeightDistribution: ...

    def _settle(self, problem: WeightSpaceProblem, run: Run) -> Run:
        """The run with the last step completed."""
        return run

    def forward(
        self,
        function_dist: MultivariateNormal,
        target: Tensor,
        *params: Any,
        indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Estimate of the log marginal likelihood divided by n, with priors and added loss terms, from one batch.

        In training mode with gradients, a call draws a batch and updates the state; else it evaluates the next batch.

        Args:
            function_dist: the prior `model(train_x)` at all training inputs, [n].
            target: [n].
            indices: rows [b]; None draws them.
            params, kwargs: for the likelihood.

        Raises:
            ValueError: unsuitable arguments; a layer that depends on the batch.
            NonFiniteError: a hyperparameter, feature or loss is not finite, or from `.backward()` a gradient; nothing
                changes.
        """
        start = time.perf_counter()
        check_autocast()
        check_fit(self.model, function_dist, target)
        check_hyperparameters(self.named_parameters())
        problem = self._problem(function_dist, target, params, kwargs)
        inputs, num_data = self._train_inputs(), problem.num_data
        if num_data != inputs[0].shape[-2]:
            raise ValueError(
                f"The prior is at {num_data} points, and the model has {inputs[0].shape[-2]} training data: call "
                "mll(model(train_x), train_y) with all of them. Rows are drawn inside, or given as indices=."
            )
        self._check_device(target.device)
        size, trains, data = self._current_batch_size(), self._trains(), (*inputs, target)
        is_known = self._seen is None or self._seen.are(data)
        begun = self._begun(problem, target, is_known=is_known)
        if indices is None:
            rows, run = next_rows(begun, "rows", num_data, size)
        else:
            rows, run = checked_indices(indices, num_data), begun
        loss, after = self._step(problem, rows.to(target.device), self._differentiable(run))
        run = after.having(parameters=run.parts["parameters"])  # which share no memory with the graph
        if not torch.isfinite(loss):
            raise NonFiniteError(
                "The mini-batch's loss is not finite. Standardise the targets, use a smaller learning rate, or bound the "
                "noise, for example with gpytorch.constraints.GreaterThan(1e-4)."
            )
        result = (-0.5 * (loss + num_data * math.log(2 * math.pi))).to(target)
        result = self._add_other_terms(result, params).div(num_data)
        self._params = LikelihoodParams.given(params, self.model, kwargs)
        if trains:
            counts = run.parts["counts"]
            begun = run.having(counts={**counts, "steps": counts["steps"] + 1})
        self._commit(begun, data)
        self.report = MinibatchReport(
            value=result.detach().clone(),
            batch_size=len(rows),
            num_data=num_data,
            steps=num_steps(self._run),
            seconds=time.perf_counter() - start,
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        if torch.is_grad_enabled():
            self._standstill.see(list(self.parameters(recurse=False)), list(self.model.parameters()), trains)
            if indices is None and size < num_data:
                self._line_search.see(self.model)
        return with_checked_gradient(result, self)

    def refresh(self) -> None:
        """Makes the weights exact by one pass, n m^2. Deep kernels need it."""
        problem, target = self._train_problem()
        self._commit(self._begun(problem, target, is_known=False), (*self._train_inputs(), target))

    @torch.inference_mode(False)
    @torch.no_grad()
    def exact_value(self) -> Tensor:
        """The exact value of `forward`; two passes, n m^2."""
        problem, target = self._train_problem()
        value = exact_log_marginal_likelihood(problem).to(target)
        params = () if self._params is None else self._params.current(self.model)[0]
        return self._add_other_terms(value, params).div(problem.num_data)

    @torch.inference_mode(False)
    @torch.no_grad()
    def gap(self) -> Tensor:
        """`exact_value()` minus the bound, float64; one pass, n m^2."""
        check_hyperparameters(self.named_parameters())
        problem, target = self._train_problem()
        run = self._begun(problem, target)
        statistics = exact_statistics(problem, centred=self.centred)
        gap = log_marginal_likelihood_gap(self._weights(run), *statistics) / (2 * problem.num_data)
        self._commit(run)
        return gap

    def posterior(self) -> WeightSpacePosterior:
        """The exact posterior; one pass, n m^2. Puts model and likelihood into evaluation mode."""
        params, kwargs = self._known_params().current(self.model)
        posterior = WeightSpacePosterior(
            self.model,
            self.likelihood,
            params=params,
            kwargs=kwargs,
            seed=(self._run.generator().initial_seed() + 1) % 2**63,
            progress=self.progress,
        )
        self.model.eval()
        self.likelihood.eval()
        return posterior

    def training_state(self) -> dict[str, Tensor]:
        self._run = self._present_run().mapped(torch.detach)
        return super().training_state()

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        super().load_training_state(state)
        self._commit(self._run)
        self._seen = None

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _begun(self, problem: WeightSpaceProblem, target: Tensor, *, is_known: bool = True) -> Run:
        run, num_data = self._present_run(), problem.num_data
        if is_known and int(run.parts["counts"]["num_data"]) == num_data:
            return self._settle(problem, run)
        check_inputs(self.model)
        check_finite("target", target)
        counts = {"steps": run.parts["counts"]["steps"], "num_data": torch.tensor(num_data, device=CPU)}
        return self._start(problem, run.having(counts=counts))

    def _present_run(self) -> Run:
        return self._run.having(parameters=dict(self.named_parameters(recurse=False)))

    def _differentiable(self, run: Run) -> Run:
        # Values of the run, gradients to the module's parameters; copies, as a refresh may come before backward.
        parameters = {}
        for name, value in run.parts["parameters"].items():
            own = self._parameters[name]
            parameters[name] = own.clone() if value is own else value + (own - own.detach())
        return run.having(parameters=parameters)

    @torch.inference_mode(False)
    def _commit(self, run: Run, data: Sequence[Tensor] | None = None) -> None:
        for name, value in run.parts.get("parameters", {}).items():
            if value is not self._parameters[name]:
                self._parameters[name].data = value.detach()
        self._run = run.having(parameters=None)
        if data is not None:
            self._seen = SeenData.of(data)

    def _check_device(self, device: torch.device) -> None:
        run = self._present_run()
        for tensor in (*run.parts["weights"].values(), *run.parts["parameters"].values()):
            if tensor.device != device:
                raise ValueError(
                    f"The data are on {device}, the training state on {tensor.device}: call mll.to({str(device)!r})."
                )

    def _batch(self, problem: WeightSpaceProblem, rows: Tensor) -> FeatureBatch:
        batch = problem.batch(rows)
        if batch.basis.shape[-1] != self.num_features:
            raise ValueError(
                f"The kernel had {self.num_features} features when the marginal log likelihood was made and has "
                f"{batch.basis.shape[-1]} now: make a new one for another kernel."
            )
        return batch if self.centred else batch.uncentred()

    def _blank_state(self) -> tuple[Tensor, Tensor]:
        options = {"dtype": torch.float64, "device": self._train_inputs()[0].device}
        return torch.zeros(self.num_features, **options), torch.eye(self.num_features, **options)

    def _problem(
        self, function_dist: MultivariateNormal, target: Tensor, params: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> WeightSpaceProblem:
        check_layers(self.model, batches=True)
        problem = WeightSpaceProblem(self.likelihood, function_dist, target, params, kwargs, progress=self.progress)
        modes = [module.training for module in self.model.modules()]
        if modes != self._checked_modes:
            check_rows(self.model, self._first_moments)
            self._checked_modes = modes
        return problem

    def _first_moments(self, count: int) -> tuple[Tensor, Tensor]:
        prior = prior_at(self.model, [x[..., :count, :] for x in self._train_inputs()])
        return prior.mean, WeightSpacePrior(prior).covariance(torch.arange(len(prior.mean), device=prior.mean.device))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _train_problem(self) -> tuple[WeightSpaceProblem, Tensor]:
        inputs = self._train_inputs()
        check_hyperparameters(self.model.named_parameters())
        prior = prior_at(self.model, inputs)
        check_fit(self.model, prior, self.model.train_targets)
        target = self.model.train_targets
        return self._problem(prior, target, *self._known_params().current(self.model)), target

    def _known_params(self) -> LikelihoodParams:
        return LikelihoodParams((), self.model) if self._params is None else self._params

    def _train_inputs(self) -> list[Tensor]:
        check_has_data(self.model)
        return list(self.model.train_inputs)

    def _current_batch_size(self) -> int:
        num_data = self._train_inputs()[0].shape[-2]
        if num_data < 1:
            raise ValueError("There are no training data.")
        if self.batch_size is not None and self.batch_size > num_data:
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are {num_data} data: use at most {num_data}, or None."
            )
        return min(BATCH_SIZE, num_data) if self.batch_size is None else self.batch_size

    @torch.inference_mode(False)
    @torch.no_grad()
    def _count_features(self) -> int:
        # An RFFKernel draws its frequencies here: saved states have them.
        if self.needs_features:
            check_layers(self.model, batches=True)
        prior = prior_at(self.model, [x[..., :2, :] for x in self._train_inputs()])
        if self.needs_features:
            check_one_output(prior)
            count = WeightSpacePrior(prior).features().basis.shape[-1]
            if not count:
                raise ValueError("The kernel has no features at these inputs: pass inputs with at least one column.")
            return count
        prior.lazy_covariance_matrix.to_dense()  # GPyTorch takes the diagonals of as many dimensions as rows for a matrix
        return 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FeatureMarginalLogLikelihood":
        self._run = self._present_run().mapped(torch.detach)
        super()._apply(fn, recurse)
        self._commit(self._run)
        return self

    def _move_run(self, function: Callable[[Tensor], Tensor]) -> None:
        # Weights and parameters stay float64, counts and rows on their device.
        device = self._train_inputs()[0].device
        parts = {name: self._run.parts.get(name, {}) for name in ("weights", "parameters")}
        moved = {name: {key: tensor.to(device) for key, tensor in part.items()} for name, part in parts.items()}
        self._run = self._run.having(**moved)
        if self._params is not None:
            self._params.apply(function)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Saves nothing, like GPyTorch's classes."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing was saved."""


def num_steps(run: Run) -> int:
    return int(run.parts["counts"]["steps"])

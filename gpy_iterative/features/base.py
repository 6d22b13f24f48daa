"""The step that all mini-batch marginal log likelihoods share.

`model(train_x)` gives a prior whose kernel nobody has evaluated; a batch of rows is drawn; features, noise and residuals
are evaluated at these rows alone; a subclass turns them into an estimate of the log marginal likelihood and moves what it
keeps about the weights.
"""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.checks import check_count, check_finite
from gpy_iterative.errors import BiasWarning, NonFiniteError, warn
from gpy_iterative.exact.validation import check_fit, check_likelihood
from gpy_iterative.features.minibatch_run import MinibatchRun
from gpy_iterative.features.minibatch_state import MinibatchState
from gpy_iterative.features.report import MinibatchReport
from gpy_iterative.features.seen_data import SeenData
from gpy_iterative.features.standstill import StandstillWatch
from gpy_iterative.features.validation import check_features, check_rows
from gpy_iterative.features.weight_space.bound import log_marginal_likelihood_gap
from gpy_iterative.features.weight_space.posterior import WeightSpacePosterior
from gpy_iterative.features.weight_space.problem import FeatureBatch, WeightSpacePrior, WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import (
    WeightDistribution,
    exact_log_marginal_likelihood,
    exact_statistics,
)
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress
from gpy_iterative.training.run import make_generator
from gpy_iterative.training.state_description import StateDescription, with_params, without_params
from gpy_iterative.training.surrogate import with_checked_gradient
from gpy_iterative.training.training_system import check_hyperparameters, check_inputs, prior_at

logger = logging.getLogger(__name__)

#: Rows of a step where nothing else is said.
BATCH_SIZE = 256


class FeatureMarginalLogLikelihood(MinibatchRun):
    """Base of the marginal log likelihoods that see a mini-batch a step.

    A subclass keeps what it knows about the weights in the tensors of a run: `_start` fills them from all data, `_step`
    estimates from a batch and says how they move.

    Attributes:
        progress: True shows a bar for every pass over all data (`refresh`, `exact_value`, `gap`, `posterior`); a callable
            gets every `gpy_iterative.progress.ProgressReport`.
        report: of the last step.
    """

    needs_features = True
    #: Whether weights are those of the basis (prior variances c), or of scaled features (prior variances 1).
    centred = False

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        batch_size: int | None,
        generator: torch.Generator | int | None,
        options: Mapping[str, Any],
    ) -> None:
        check_likelihood(likelihood, model, type(self).__name__)
        check_inputs(model)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        super().__init__(likelihood, model, MinibatchState(make_generator(generator)))
        self.batch_size, self._options = batch_size, dict(options)
        self.report: MinibatchReport | None = None
        self.progress: Progress = False
        self._params: LikelihoodParams | None = None
        self._checked_modes: list[bool] = []
        self._standstill = StandstillWatch(type(self).__name__)
        self._size_of(self._train_size())
        self.num_features = self._count_features() if self.needs_features else 0

    @abstractmethod
    def _start(self, problem: WeightSpaceProblem, chunk_size: int) -> None:
        """Replaces the state by the exact one; without autograd."""

    @abstractmethod
    def _step(self, problem: WeightSpaceProblem, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """An estimate of -2 log p(y) - n log(2 pi) with the method's gradient, and what a training step moves."""

    @abstractmethod
    def _weights(self) -> WeightDistribution:
        """The distribution of the weights that the state describes."""

    def _settle(self, problem: WeightSpaceProblem) -> None:
        """What the last training step left to do after the optimiser's step; without autograd."""

    def _trains(self) -> bool:
        """Whether a call now is a training step."""
        return self.training and torch.is_grad_enabled()

    def _has_unsettled(self) -> bool:
        return False

    def _blank_state(self) -> tuple[Tensor, Tensor]:
        """Zeros [m] and an identity [m, m] in float64 on the data's device, until `_start` has better ones."""
        like = self._train_inputs()[0]
        options = {"dtype": torch.float64, "device": like.device}
        return torch.zeros(self.num_features, **options), torch.eye(self.num_features, **options)

    def _batch(self, problem: WeightSpaceProblem, rows: Tensor) -> FeatureBatch:
        batch = problem.batch(rows)
        self._check_state_fits(batch)
        return batch if self.centred else batch.uncentred()

    def forward(
        self,
        function_dist: MultivariateNormal,
        target: Tensor,
        *params: Any,
        indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """An estimate of the log marginal likelihood divided by the number of data, from one batch of rows.

        Args:
            function_dist: the prior `model(train_x)` at all training inputs, [n].
            target: [n].
            params: passed to the likelihood, as with GPyTorch's ExactMarginalLogLikelihood.
            indices: [b] row numbers of this step's batch, for loops over a DataLoader (of indices); None draws them.
            kwargs: passed to the likelihood.

        Returns:
            A scalar. Priors and added loss terms are included. `.backward()` on it is the method's gradient estimator.
            In training mode with gradients on, a call is a step: it draws a batch and moves the state. Without
            gradients, or in evaluation mode of this module, it looks at the next batch and moves nothing. Data other
            than at the last call (`set_train_data`, other targets) start the state anew, with a pass over all of them.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, a prior at some of the training data, data that are
                not finite, noise that is not positive, a prior that is no sum of kernels with finite feature maps, layers
                whose output depends on the batch, row numbers outside of the data, another number of features than at
                the start.
            NonFiniteError: a hyperparameter, feature or loss that is not finite; parameters and state stay as they were.
                From `.backward()`, a non-finite gradient: no parameter's `.grad` is changed.
        """
        start = time.perf_counter()
        check_fit(self.model, function_dist, target)
        check_hyperparameters(self)
        problem = self._problem(function_dist, target, *params, **kwargs)
        num_data = problem.num_data
        if num_data != self._train_size():
            raise ValueError(
                f"The prior is at {num_data} points, and the model has {self._train_size()} training data: call "
                "mll(model(train_x), train_y) with all of them. Rows are drawn inside, or given as indices=."
            )
        size = self._size_of(num_data)
        trains = self._trains()
        data = (*self._train_inputs(), target)
        with self._unchanged_by_failure():  # a failed step takes back a start or a settlement before it, too
            with torch.inference_mode(False), torch.no_grad():
                if self._state.started_for != num_data or not self._state.data.may_be(data):
                    self._restart(problem, target)
                elif self._has_unsettled():
                    self._settle(problem)
                self._state.data = SeenData.of(data)
            with nullcontext() if trains else self._unchanged_by_failure(always=True):
                rows = self._state.rows.draw(num_data, size) if indices is None else _checked(indices, num_data)
                loss, moved = self._step(problem, rows.to(target.device))
                if not torch.isfinite(loss):
                    raise NonFiniteError(
                        "The mini-batch's loss is not finite. A smaller learning rate, or a bound on the noise such as "
                        "gpytorch.constraints.GreaterThan(1e-4), keeps the optimiser from leaving the domain."
                    )
                if trains:
                    for name, tensor in moved.items():
                        self._replace(name, tensor.detach())
                    self._state.steps += 1
            result = (-0.5 * (loss + num_data * math.log(2 * math.pi))).to(target)
            result = self._add_other_terms(result, params).div(num_data)
        if torch.is_grad_enabled():
            self._warn_of_standstill(trains)
        self._params = LikelihoodParams.given(params, self.model, kwargs)
        self.report = MinibatchReport(
            value=result.detach().clone(),
            batch_size=len(rows),
            num_data=num_data,
            steps=self._state.steps,
            seconds=time.perf_counter() - start,
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        return with_checked_gradient(result, self)

    def refresh(self, chunk_size: int = 4096) -> None:
        """Makes the state exact at the current hyperparameters: one pass over the training data, n m^2.

        Call it every few epochs where features move fast (deep kernels), and before `gap()` where the state, and not the
        way to it, is of interest. Predictions and `exact_value()` make their own pass and need none.
        """
        check_count("chunk_size", chunk_size)
        with torch.inference_mode(False), torch.no_grad(), self._unchanged_by_failure():
            problem, target = self._train_problem()
            self._restart(problem, target, chunk_size)

    def exact_value(self, chunk_size: int = 4096) -> Tensor:
        """The log marginal likelihood divided by n, with priors and added loss terms: two passes, n m^2; no gradient."""
        check_count("chunk_size", chunk_size)
        with torch.inference_mode(False), torch.no_grad():
            problem, target = self._train_problem()
            value = exact_log_marginal_likelihood(problem, chunk_size=chunk_size).to(target)
            params = () if self._params is None else self._params.current(self.model)
            return self._add_other_terms(value, params).div(problem.num_data)

    def gap(self, chunk_size: int = 4096) -> Tensor:
        """How far the bound that the state's weights give lies below `exact_value()`: at least 0, a float64 scalar.

        (J - l) / (2 n) in the notation of `gpy_iterative.features.weight_space.bound`; one pass, n m^2.
        """
        check_count("chunk_size", chunk_size)
        with torch.inference_mode(False), torch.no_grad(), self._unchanged_by_failure():
            check_hyperparameters(self)
            problem, target = self._train_problem()
            if self._state.started_for != problem.num_data:
                self._restart(problem, target, chunk_size)
            elif self._has_unsettled():
                self._settle(problem)
            statistics = exact_statistics(problem, centred=self.centred, chunk_size=chunk_size)
            return log_marginal_likelihood_gap(self._weights(), *statistics) / (2 * problem.num_data)

    def posterior(self, *inputs: Tensor) -> WeightSpacePosterior | MultivariateNormal:
        """The exact posterior at the current hyperparameters; one pass over the training data, n m^2.

        Args:
            inputs: test inputs [*b, t, d], or none.

        Returns:
            Without inputs, a `WeightSpacePosterior`: a function of test inputs, with `sample_paths`. With inputs, its
            MultivariateNormal there. Training state and modes stay as they are.
        """
        params = self._known_params()
        posterior = WeightSpacePosterior(
            self.model,
            self.likelihood,
            params=params.current(self.model),
            kwargs=params.current_kwargs(self.model),
            seed=(self._state.generator.initial_seed() + 1) % 2**63,
            progress=self.progress,
        )
        return posterior(*inputs) if inputs else posterior

    def training_state(self) -> dict[str, Tensor]:
        """State, generator, order of rows and the likelihood's arguments as a plain dict of tensors.

        Saved with `torch.save` beside the `state_dict()`s of model and optimiser, it resumes a run bit for bit. Raises
        ValueError where an argument of the likelihood is no tensor, number or string.
        """
        if self._has_unsettled():
            with torch.inference_mode(False), torch.no_grad(), self._unchanged_by_failure():
                self._settle(self._train_problem()[0])
        state = with_params(self._state.to_dict(dict(self._own_tensors())), self._params)
        return self._description().added_to(state)

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Takes what `training_state()` gave.

        Raises ValueError, which names what differs, and changes nothing, for anything else: another method or option, other
        numbers of features or data.
        """
        entries, params = without_params(self._description().taken_from(state))
        for name, tensor in self._state.load_dict(entries, dict(self._own_tensors())).items():
            self._replace(name, tensor)
        self._params = params
        if params is not None:
            device = self._train_inputs()[0].device
            params.apply(lambda tensor: tensor.to(device))

    def _description(self) -> StateDescription:
        sizes = {"batch_size": self.batch_size, "num_features": self.num_features}
        return StateDescription.of(self, sizes | self._options)

    def _warn_of_standstill(self, trains: bool) -> None:
        advice = self._standstill.sees(self._parameters.values(), self.model.parameters(), trains)
        if advice is not None:
            warn(advice, BiasWarning)

    def _restart(self, problem: WeightSpaceProblem, target: Tensor, chunk_size: int = 4096) -> None:
        check_inputs(self.model)
        check_finite("target", target)
        self._start(problem, chunk_size)
        self._state.started_for = problem.num_data
        self._state.data = SeenData.of((*self._train_inputs(), target))

    def _problem(
        self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any
    ) -> WeightSpaceProblem:
        check_features(self.model)
        problem = WeightSpaceProblem(self.likelihood, function_dist, target, *params, **kwargs)
        problem.progress = self.progress
        if self.needs_features:
            problem.prior.check_kernels()
        modes = [module.training for module in self.model.modules()]
        if modes != self._checked_modes:
            check_rows(self.model, self._first_moments)
            self._checked_modes = modes
        return problem

    def _first_moments(self, count: int) -> tuple[Tensor, Tensor]:
        prior = prior_at(self.model, [x[..., :count, :] for x in self._train_inputs()])
        return prior.mean, WeightSpacePrior(prior).covariance(torch.arange(len(prior.mean), device=prior.mean.device))

    def _train_problem(self) -> tuple[WeightSpaceProblem, Tensor]:
        """The problem at the model's own training data and current hyperparameters."""
        inputs = self._train_inputs()
        check_hyperparameters(self.model)
        prior = prior_at(self.model, inputs)
        check_fit(self.model, prior, self.model.train_targets)
        known, target = self._known_params(), self.model.train_targets
        params, kwargs = known.current(self.model), known.current_kwargs(self.model)
        return self._problem(prior, target, *params, **kwargs), target

    def _known_params(self) -> LikelihoodParams:
        """The likelihood's arguments of the last call, which are the training inputs where there were none."""
        return LikelihoodParams((), self.model) if self._params is None else self._params

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FeatureMarginalLogLikelihood":
        super()._apply(fn, recurse)
        if self._params is not None:
            self._params.apply(fn)
        return self

    def _train_size(self) -> int:
        return self._train_inputs()[0].shape[-2]

    def _train_inputs(self) -> list[Tensor]:
        if not self.model.train_inputs or self.model.train_targets is None:
            raise ValueError(
                f"{type(self).__name__} needs a model with training data: call model.set_train_data first."
            )
        return list(self.model.train_inputs)

    def _size_of(self, num_data: int) -> int:
        """The batch size. Raises ValueError where there are fewer data."""
        if num_data < 1:
            raise ValueError("There are no training data.")
        if self.batch_size is not None and self.batch_size > num_data:
            raise ValueError(
                f"batch_size is {self.batch_size}, but there are {num_data} data: take at most these, or None."
            )
        return min(BATCH_SIZE, num_data) if self.batch_size is None else self.batch_size

    @torch.no_grad()
    def _count_features(self) -> int:
        """m, from features of two rows. Raises ValueError where a kernel has no feature map."""
        check_features(self.model)
        with torch.inference_mode(False):
            prior = WeightSpacePrior(prior_at(self.model, [x[..., :2, :] for x in self._train_inputs()]))
            prior.check_kernels()
            return prior.features().basis.shape[-1]

    def _check_state_fits(self, batch: FeatureBatch) -> None:
        if batch.basis.shape[-1] != self.num_features:
            raise ValueError(
                f"The kernel had {self.num_features} features when the marginal log likelihood was made and has "
                f"{batch.basis.shape[-1]} now: make a new one for another kernel."
            )
        for name, tensor in self._own_tensors():
            if tensor.device != batch.residual.device:
                raise ValueError(
                    f"The data are on {batch.residual.device}, the training state ({name}) on {tensor.device}: call "
                    f"mll.to({str(batch.residual.device)!r})."
                )


def _checked(indices: Tensor, num_data: int) -> Tensor:
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32) or indices.dim() != 1:
        what = f"{tuple(indices.shape)}, {indices.dtype}" if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices must be a tensor of whole row numbers [b], got {what}.")
    if not len(indices):
        raise ValueError("indices must name at least one row.")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_data:
        raise ValueError(f"indices must lie between 0 and {num_data - 1}; the smallest is {low}, the largest {high}.")
    return indices.long()

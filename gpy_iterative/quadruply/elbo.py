"""Evidence lower bound of a Gaussian process in weight space."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpy_iterative.checks import check_flag
from gpy_iterative.errors import NonFiniteError, UnsupportedLikelihoodError
from gpy_iterative.quadruply.data_terms import Call, Rows, begin, gaussian_term, initialization_undone, site_bound
from gpy_iterative.quadruply.known_points import KnownPoints
from gpy_iterative.quadruply.model import DeferredPrediction, QuadruplyStochasticGP
from gpy_iterative.quadruply.optimizers import QuadruplyStochasticOptimizer
from gpy_iterative.quadruply.samples import KnownValues, Sample, draw_set, twice_divergence
from gpy_iterative.quadruply.sizes import FEATURE_SAMPLES, TrainingData, group_samples
from gpy_iterative.training.likelihood_forms import check_support, is_log_concave
from gpy_iterative.training.report import Report
from gpy_iterative.training.run import Resumable, Run
from gpy_iterative.training.state_description import StateDescription
from gpy_iterative.training.surrogate import with_checked_gradient
from gpy_iterative.training.training_system import check_hyperparameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuadruplyStochasticReport(Report):
    """One step.

    Attributes:
        value: of `forward`, [].
        is_unbiased: whether it estimates the rows' evidence lower bound, not a lower bound of it.
        num_features: m.
        num_feature_samples: without the head.
        num_steps_per_batch: with the same rows.
        seconds: of `forward`.
    """

    value: Tensor
    is_unbiased: bool
    num_rows: int
    num_features: int
    num_feature_samples: int
    num_control_points: int
    num_steps_per_batch: int
    seconds: float

    def __str__(self) -> str:
        kind = "elbo" if self.is_unbiased else "bound"
        return (
            f"{kind} {self.value.item():.4f} from {self.num_rows} rows and {self.num_feature_samples} of "
            f"{self.num_features} features; {self.seconds:.2f} s"
        )


class QuadruplyStochasticELBO(Resumable, MarginalLogLikelihood):
    """Estimate of the evidence lower bound from samples of data and features.

    Every call samples features, and rows of its data: unbiased for Gaussian noise, else a lower bound.

    Args:
        likelihood: Gaussian, or log-concave (Bernoulli, Laplace, Poisson, registered by `register_curvature`).
        model: a QuadruplyStochasticGP.
        num_data: n. None: every call passes all data.
        num_feature_samples: features of a sample; None is up to 10,000.
        num_data_samples: rows of a step; None is up to 500.
        num_steps_per_batch: steps with the same rows, where the predictions of all features are known; the value becomes
            optimistic. More than 1 needs fixed kernel hyperparameters, inputs without gradient, and all data in every
            call. None samples each feature four times on average, and is 1 where this is impossible, with a head, or if
            num_control_points is given.
        num_control_points: of a control variate for steps that draw rows. None is 500 with Gaussian noise and sampled
            features.
        sparse_gradients: where steps sample features, gradients hold only their rows, for Adagrad, SGD and SparseAdam;
            False for other optimisers.
        generator: of samples, or its seed.

    Attributes:
        is_unbiased: the noise is Gaussian.
        report: of the last evaluation.

    Raises:
        ValueError, TypeError: an invalid option or model.
        UnsupportedLikelihoodError: not Gaussian or known to be log-concave.

    Cost of a step: up to 2 (b + p) t (1 + k) for b rows, p control points and t sampled features; m (1 + k) more for rows
    that are kept.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: QuadruplyStochasticGP,
        *,
        num_data: int | None = None,
        num_feature_samples: int | None = None,
        num_data_samples: int | None = None,
        num_steps_per_batch: int | None = None,
        num_control_points: int | None = None,
        sparse_gradients: bool = True,
        generator: torch.Generator | int | None = None,
    ) -> None:
        if not isinstance(model, QuadruplyStochasticGP):
            raise TypeError(
                f"QuadruplyStochasticELBO(likelihood, model) needs a QuadruplyStochasticGP as model, got "
                f"{type(model).__name__}."
            )
        self.is_unbiased = isinstance(likelihood, GaussianLikelihood | FixedNoiseGaussianLikelihood)
        if not self.is_unbiased and not is_log_concave(likelihood):
            raise UnsupportedLikelihoodError(
                "QuadruplyStochasticELBO needs a GaussianLikelihood, a FixedNoiseGaussianLikelihood or a log-concave "
                f"likelihood; {type(likelihood).__name__} is not known to be log-concave. If it is, "
                "register it by register_curvature; else use a variational model with gpytorch.mlls.VariationalELBO."
            )
        if self.is_unbiased and likelihood.noise.shape[:-1].numel() != 1:
            raise ValueError(
                f"A batch of models is not supported: the likelihood has noise variances of shape "
                f"{tuple(likelihood.noise.shape)}."
            )
        check_flag("sparse_gradients", sparse_gradients)
        super().__init__(likelihood, model)
        self.num_group_samples = group_samples(model, num_feature_samples)
        self._data = TrainingData(num_data, num_data_samples)
        self._points = KnownPoints(
            model,
            self._data,
            self.num_group_samples,
            num_steps_per_batch=num_steps_per_batch,
            num_control_points=num_control_points,
            is_gaussian=self.is_unbiased,
        )
        self.sparse_gradients = sparse_gradients
        self.report: QuadruplyStochasticReport | None = None
        self._run = Run.begin(generator)
        looks = self._run.generator()
        self._looks = looks.manual_seed((looks.initial_seed() + 1) % 2**63)

    def make_optimizer(self, num_steps: int, num_data: int) -> QuadruplyStochasticOptimizer:
        """Optimiser for `num_steps` steps; uses `num_data` if this object has none."""
        num_data = self._data.num_data_of(num_data)
        return QuadruplyStochasticOptimizer(self.model, self.likelihood, num_data=num_data, num_steps=num_steps)

    def forward(self, function_dist: DeferredPrediction, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """Estimate of the evidence lower bound, divided by the number of data, with priors and added loss terms: [].

        Args:
            function_dist: `model(x)` in train mode, at all data or a batch.
            target: [n] or [b].
            params, kwargs: of the likelihood (`noise=` of a FixedNoiseGaussianLikelihood).

        Under `torch.no_grad()` a call does not change the training.

        Raises:
            ValueError: unfit or non-finite data, targets outside the likelihood's support.
            NonFiniteError: a hyperparameter, the estimate or (from `.backward()`) a gradient is not finite.
        """
        start, tracks = time.perf_counter(), torch.is_grad_enabled()
        x = self._inputs_of(function_dist)
        call = self._checked_call(x, target, params, kwargs, self._run.generator() if tracks else self._looks)
        weights = self.model.weights
        # Later steps could not use inference tensors.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(tracks),
            initialization_undone(weights, always=not tracks),
        ):
            if not weights.initialized:
                self.model.basis.settle()
            value, run = self._estimate(call)
        if tracks:
            self._run = run.having(call.generator, data=run.parts.get("data") or self._data.marks(x, target))
        self.report = self._report_of(value, run, x, time.perf_counter() - start)
        logger.info("%s: %s", type(self).__name__, self.report)
        return with_checked_gradient(value, self)

    def exact_value(self, x: Tensor, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """The bound from all data and features, divided by n: []; memory and time O(n m)."""
        x = self.model.check_inputs(x)
        call = self._checked_call(x, target, params, kwargs, self._looks)
        if len(x) != call.num_data:
            raise ValueError(f"num_data is {call.num_data}, but {len(x)} rows were passed: pass all data.")
        sample = Sample(self.model, torch.arange(self.model.num_tail_groups, device=x.device), sparse=False)
        rows = call.rows(self.model, torch.arange(len(x), device=x.device), is_gaussian=self.is_unbiased)
        return self._value(call, self._data_term(rows, sample, sample, kwargs, None), sample, sample)

    @property
    def num_steps_per_batch(self) -> int:
        """Steps with the same rows."""
        return self._points.num_steps_per_batch

    def refresh(self) -> None:
        """Computes known latent values again: m (1 + k) per point."""
        self._run = self._points.refreshed(self._run)

    def reset_control_variate(self) -> None:
        """The next step starts a control variate at new points."""
        if self._run.parts.get("control") is not None:
            self._run = self._run.having(control=None, latent=None)

    def training_state(self) -> dict[str, Tensor]:
        """A dict of tensors for an exact resume."""
        self._run = self._points.followed(self._run)
        return super().training_state()

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        super().load_training_state(state)
        self._run = self._points.resumed(self._run.mapped(lambda tensor: tensor.to(self.model.device)))

    def _description(self) -> StateDescription:
        return StateDescription.of(
            self,
            {
                "likelihood": self.likelihood,
                "basis": self.model.basis,
                "number of features": self.model.basis.num_features,
                "number of head features": self.model.weights.num_head,
                "basis parameters": [f"{name} {[*p.shape]}" for name, p in self.model.basis.named_parameters()],
                "number of dense columns": self.model.weights.num_dense_columns,
                "num_data": self._data.num_data,
                "num_feature_samples": self.num_group_samples * self.model.basis.group_size,
                "num_data_samples": self._data.num_samples,
                "num_steps_per_batch": self.num_steps_per_batch,
                "num_control_points": self._points.num_control_points,
            },
        )

    def _estimate(self, call: Call) -> tuple[Tensor, Run]:
        model, points = self.model, self._points
        run = points.with_kept_rows(call, self._run)
        kept = run.parts.get("kept")
        index = points.draw_rows(call) if kept is None else kept["index"]
        rows = call.rows(model, index, is_gaussian=self.is_unbiased)
        if not model.weights.initialized:
            begin(model, rows, call.num_data, (*model.hyperparameters(), *self.likelihood.parameters()))
        first = self._sample(call)
        # Products of residuals and double sums of a dense prior take two samples.
        takes_two = (self.is_unbiased and kept is None) or not model.basis.has_diagonal_prior
        second = self._sample(call) if takes_two else first
        if kept is None and points.uses_control_points(self._run):
            run = points.with_control_points(call, run)
        known, run = points.evaluate(run, first, second)
        data = self._data_term(rows, first, second, call.kwargs, None if kept is None else known)
        if known is not None and kept is None:
            data = data - call.num_data * points.control_term(call, run, known, first, second) / 2
        return self._value(call, data, first, second), run

    def _data_term(
        self, rows: Rows, first: Sample, second: Sample, kwargs: Mapping[str, Any], known: KnownValues | None
    ) -> Tensor:
        if self.is_unbiased:
            return gaussian_term(self.model, rows, first, second, known) / -2
        return site_bound(self.likelihood, self.model, rows, first, known, **kwargs)

    def _value(self, call: Call, data: Tensor, first: Sample, second: Sample) -> Tensor:
        dtype, num_data = call.x.dtype, call.num_data
        value = (data - twice_divergence(self.model, first, second).double() / 2) / num_data
        for _, module, prior, closure, _ in self.named_priors():
            value = value + prior.log_prob(closure(module)).sum() / num_data
        for term in self.model.added_loss_terms():
            value = value - term.loss()
        if not torch.isfinite(value):
            raise NonFiniteError(
                f"The evidence lower bound is {value.item()}: targets or parameters are too large for {dtype}. Standardise "
                "the targets, or use a smaller learning rate."
            )
        return value.to(dtype)

    def _sample(self, call: Call) -> Sample:
        model = self.model
        ring = model.basis.exchangeable
        groups = draw_set(model.num_tail_groups, self.num_group_samples, call.generator, ring=ring)
        has_all = len(groups) == model.num_tail_groups
        return Sample(model, groups.to(model.device), sparse=self.sparse_gradients and not has_all)

    def _inputs_of(self, function_dist: DeferredPrediction) -> Tensor:
        if not isinstance(function_dist, DeferredPrediction):
            raise RuntimeError(
                "QuadruplyStochasticELBO needs the output of model(x) in train mode, got a "
                f"{type(function_dist).__name__}. Call model.train() and likelihood.train() first."
            )
        if function_dist.model is not self.model:
            raise ValueError("This is the output of another model: call mll(mll.model(x), y).")
        return function_dist.x

    def _checked_call(
        self, x: Tensor, target: Tensor, params: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator
    ) -> Call:
        self._data.check(x, target, partial(check_support, self.likelihood), self._run.parts.get("data"))
        named = (*self.model.named_hyperparameters(), *self.likelihood.named_parameters())
        check_hyperparameters(filter(lambda one: one[1].shape.numel() < FEATURE_SAMPLES, named))
        basis = self.model.basis
        if not basis.has_diagonal_prior and any(parameter.requires_grad for parameter in basis.parameters()):
            raise ValueError(
                f"The hyperparameters of {type(basis).__name__} cannot be learned, because the log-determinant of its "
                "prior precision is not sampled. Fix them with model.basis.requires_grad_(False)."
            )
        return Call(self.likelihood, x, target, params, kwargs, self._data.num_data_of(len(x)), generator)

    def _report_of(self, value: Tensor, run: Run, x: Tensor, seconds: float) -> QuadruplyStochasticReport:
        kept, control = run.parts.get("kept"), run.parts.get("control")
        is_exact = self.num_group_samples == self.model.num_tail_groups
        return QuadruplyStochasticReport(
            value=value.detach().clone(),
            is_unbiased=self.is_unbiased or is_exact or (kept is not None and self.model.weights.shared_diagonal),
            num_rows=self._data.num_samples_of(len(x)) if kept is None else len(kept["index"]),
            num_features=self.model.basis.num_features,
            num_feature_samples=self.num_group_samples * self.model.basis.group_size,
            num_control_points=0 if control is None else len(control["y"]),
            num_steps_per_batch=1 if kept is None else self.num_steps_per_batch,
            seconds=seconds,
        )

"""The evidence lower bound of a Gaussian process in weight space, from a few data and a few features a step.

Evans and Nair 2018, "Quadruply stochastic Gaussian processes", in a form of the same expectation and a lower variance: a
head of features is always evaluated; rows are kept for several steps, in which residuals are known; where they are not,
products of two independently sampled residuals replace the expanded square; what is a single sum over features is sampled
once.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpy_iterative.checks import check_fraction
from gpy_iterative.errors import NonFiniteError, UnsupportedLikelihoodError
from gpy_iterative.quadruply.control_variate.estimate import ControlVariate
from gpy_iterative.quadruply.control_variate.kept_rows import KeptRows
from gpy_iterative.quadruply.control_variate.known_latent import KnownLatent, check_entries
from gpy_iterative.quadruply.control_variate.known_points import KnownPoints
from gpy_iterative.quadruply.counts import FEATURE_SAMPLES, control_points, group_samples, steps_per_batch
from gpy_iterative.quadruply.data_terms import (
    Rows,
    gaussian_term,
    known_gaussian_term,
    known_site_term,
    noise_variances,
    site_bound,
)
from gpy_iterative.quadruply.deferred import DeferredPrediction
from gpy_iterative.quadruply.divergence import twice_divergence
from gpy_iterative.quadruply.feature_samples import Sample
from gpy_iterative.quadruply.index_sets import IndexSets, draw_set
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.quadruply.printed_estimate import printed_estimate
from gpy_iterative.quadruply.report import QuadruplyStochasticReport
from gpy_iterative.quadruply.training_data import TrainingData
from gpy_iterative.quadruply.weight_initialization import initialization_undone, initialize_weights, warn_of_capacity
from gpy_iterative.training.likelihood_forms import check_support, is_log_concave
from gpy_iterative.training.run import make_generator
from gpy_iterative.training.state_description import StateDescription, check_tensors, checked_generator
from gpy_iterative.training.surrogate import with_checked_gradient

logger = logging.getLogger(__name__)

#: Default, where there are so many.
DATA_SAMPLES = 500
#: What is known of the latent function is worked out anew after so many steps, and never for more than a tenth of their
#: cost.
REFRESH_EVERY = 200


class QuadruplyStochasticELBO(MarginalLogLikelihood):
    """An estimate of the evidence lower bound whose cost knows neither the number of data nor that of features.

    In the shape of `gpytorch.mlls.VariationalELBO`: `loss = -mll(model(x), y)` with all training data, of which rows are
    drawn inside, or with the batches of a DataLoader (then with `num_data`).

    Where all data are passed and the kernel's hyperparameters are fixed, rows are kept for several steps, and what all
    features predict for them is known: value and gradient are unbiased for these rows' (for any likelihood, with a shared
    diagonal of C), and far less noisy. After steps that fit these rows the value is optimistic, as any training loss is;
    `exact_value` is not. Else rows are drawn anew by each step, from features that are sampled too: unbiased for Gaussian
    noise; of a lower bound of the ELBO for another log-concave likelihood.

    Args:
        likelihood: Gaussian with one noise or fixed ones; or log-concave: Bernoulli (probit), `LogitBernoulliLikelihood`,
            Laplace, Poisson, `PoissonLogLikelihood`, or registered as such by `register_curvature`.
        model: a QuadruplyStochasticGP.
        num_data: n. None: every call passes all data.
        num_feature_samples: sampled features in an index set, of which rows that are kept take one, and others (and a
            prior that is not diagonal) two; None is 10,000, or all there are.
        num_data_samples: rows of a step; None is 500, or all there are.
        num_steps_per_batch: evaluations for which rows are kept; 1 draws anew for each, as where no features are sampled.
            More than 1 needs fixed hyperparameters of the kernel, inputs without a gradient, and all data in every call.
            None is 1 where one of these is not given, where data come in another order, where control points are asked
            for, and for a basis with a head of its own (whose natural gradients want other rows at every step, and leave
            the sampled features little to say); else every feature is sampled four times, on average.
        num_control_points: support points of a control variate for rows that are drawn anew, themselves drawn from the
            first data that are passed, and never more than these; None is 500 where it serves (Gaussian noise, sampled
            features), 0 is none.
        control_coefficient: what the control variate is multiplied by.
        control_form: "residual", or "printed" for equation 3 of the paper.
        estimator: "stratified", or "printed" for theorems 1 and 2 of the paper, for comparison.
        index_sets: "ring" takes neighbouring features from a uniform start, "uniform" any; None is "ring" where the order
            of features means nothing.
        sparse_gradients: gradients of sampled rows hold these alone, so that a step of Adagrad, SGD or SparseAdam costs
            O(samples); False for optimisers that want dense ones.
        assume_log_concave: take a likelihood that is not known to be log-concave.
        generator: of index sets; a generator or the seed of one.

    Attributes:
        is_unbiased: whether sampled features leave estimates unbiased in every case, as with Gaussian noise; `report` tells
            of the last.
        report: of the last evaluation.

    Raises:
        ValueError: options outside their range.
        TypeError: another model.
        UnsupportedLikelihoodError: a likelihood that is neither.

    Cost of a step: b t for b rows and t sampled features (2 (b + p) t with p control points), times 1 + k for k dense
    columns, and the basis' evaluation of as many features.
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
        control_coefficient: float = 1.0,
        control_form: Literal["residual", "printed"] = "residual",
        estimator: Literal["stratified", "printed"] = "stratified",
        index_sets: IndexSets | None = None,
        sparse_gradients: bool = True,
        assume_log_concave: bool = False,
        generator: torch.Generator | int | None = None,
    ) -> None:
        if not isinstance(model, QuadruplyStochasticGP):
            raise TypeError(f"QuadruplyStochasticELBO needs a QuadruplyStochasticGP, got {type(model).__name__}.")
        self.is_unbiased = isinstance(likelihood, GaussianLikelihood | FixedNoiseGaussianLikelihood)
        if not self.is_unbiased and not is_log_concave(likelihood) and not assume_log_concave:
            raise UnsupportedLikelihoodError(
                f"QuadruplyStochasticELBO needs a GaussianLikelihood, a FixedNoiseGaussianLikelihood, or a likelihood that "
                f"is log-concave in the latent value; {type(likelihood).__name__} is not known to be. If it is, pass "
                "assume_log_concave=True; else use a variational model with gpytorch.mlls.VariationalELBO."
            )
        for name, value, choices in (
            ("control_form", control_form, ("residual", "printed")),
            ("estimator", estimator, ("stratified", "printed")),
            ("index_sets", index_sets, (None, "ring", "uniform")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        check_fraction("control_coefficient", control_coefficient, ends=True)
        if isinstance(likelihood, GaussianLikelihood) and likelihood.noise.numel() != 1:
            raise ValueError(
                f"A batch of models is not supported: the likelihood has noise variances of shape "
                f"{tuple(likelihood.noise.shape)}."
            )
        if estimator == "printed" and (not self.is_unbiased or model.basis.num_head_features):
            raise ValueError("estimator='printed' is for Gaussian noise and a basis without a head of its own.")
        super().__init__(likelihood, model)
        groups = model.num_tail_groups if estimator == "stratified" else model.basis.num_groups
        is_printed = estimator == "printed"
        self.num_group_samples = group_samples(model, num_feature_samples, groups)
        self._data = TrainingData(num_data, num_data_samples, DATA_SAMPLES)
        self.num_control_points = control_points(num_control_points, serves=self.is_unbiased and not is_printed)
        self.num_steps_per_batch = steps_per_batch(
            model,
            num_steps_per_batch,
            self.num_group_samples,
            is_printed=is_printed,
            num_control_points=num_control_points,
        )
        self._asks_for_points, self._asks_to_keep = num_control_points is not None, num_steps_per_batch is not None
        self.control_coefficient, self.control_form, self.estimator = control_coefficient, control_form, estimator
        self.index_sets: IndexSets = index_sets or ("ring" if model.basis.exchangeable else "uniform")
        self.sparse_gradients = sparse_gradients
        self.report: QuadruplyStochasticReport | None = None
        self._generator = make_generator(generator)
        self._looks = torch.Generator(self._generator.device).manual_seed((self._generator.initial_seed() + 1) % 2**63)
        self._known = KnownPoints()
        self._is_shuffled = False

    def forward(self, function_dist: DeferredPrediction, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """An estimate of the evidence lower bound divided by the number of data.

        Args:
            function_dist: `model(x)` in train mode, at all data or a batch of them.
            target: [n] or [b].
            params: as the likelihood takes them.
            kwargs: likewise (`noise=` of a FixedNoiseGaussianLikelihood).

        Returns:
            []. Priors and added loss terms are included as in `gpytorch.mlls.VariationalELBO`. Without gradients
            (`torch.no_grad()`) a call looks, with draws of its own, and changes nothing of the training.

        Raises:
            ValueError: shapes, dtypes, devices or sizes that do not fit, data that are not finite, labels but 0 and 1,
                counts that are none.
            NonFiniteError: a hyperparameter or the estimate is not finite. State and parameters are as they were. From
                `.backward()`, a non-finite gradient: no parameter's `.grad` is changed.
        """
        start = time.perf_counter()
        x = self._inputs_of(function_dist)
        self._data.check(x, target, partial(check_support, self.likelihood))
        self._check_model()
        tracks = torch.is_grad_enabled()
        # What is kept must not be inference tensors: later steps could not use them.
        with torch.inference_mode(False), torch.set_grad_enabled(tracks), self._unchanged(always=not tracks):
            if not self.model.weights.initialized:
                self.model.basis.settle()
            kept = self._keep(x)
            value = self._estimate(x, target, params, kwargs, kept)
            control = self._known.control if kept is None else None
        if tracks:  # a step may follow: one of which this control variate knows, and others of the same weights do not
            self._data.accept(x)
            self.model.weights.announce_step()
            self._known.set_revision(self.model.weights.revision)
        is_exact = self.num_group_samples == self.model.num_tail_groups  # no features are left to chance
        self.report = QuadruplyStochasticReport(
            value=value.detach().clone(),
            is_unbiased=self.is_unbiased or is_exact or (kept is not None and self.model.weights.shared_diagonal),
            num_rows=self._data.num_samples_of(len(x)) if kept is None else len(kept.index),
            num_features=self.model.basis.num_features,
            num_feature_samples=self.num_group_samples * self.model.basis.group_size,
            num_control_points=0 if control is None else len(control.y),
            num_steps_per_batch=1 if kept is None else self.num_steps_per_batch,
            seconds=time.perf_counter() - start,
        )
        logger.info("%s: %s", type(self).__name__, self.report)
        return with_checked_gradient(value, self)

    def exact_value(self, x: Tensor, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """The evidence lower bound that `forward` estimates (or bounds), from all data and features: [], over n.

        Differentiable. Memory and time O(n m): for small problems, and for looking at training from time to time.
        """
        x = self.model.check_inputs(x)
        self._data.check(x, target, partial(check_support, self.likelihood), whole=True)
        self._check_model()
        groups = torch.arange(self.model.num_tail_groups, device=x.device)
        sample = Sample.of(self.model, groups, sparse=False)
        rows = self._rows(x, target, torch.arange(len(x), device=x.device), len(x), params, kwargs)
        return self._value(self._data_term(rows, sample, sample, kwargs), sample, sample, x.dtype, len(x))

    def refresh(self) -> None:
        """Works what is known of the latent function out from all features: m (1 + k) for each point."""
        self._known.follow(self.model)
        self._known.refresh(self.model)

    def reset_control_variate(self) -> None:
        """Forgets the control variate; the next step starts one at the current hyperparameters, with new support points."""
        self._known.control = None

    def training_state(self) -> dict[str, Tensor]:
        """The generator, rows that are kept and the control variate as a plain dict of tensors, for an exact resume."""
        self._known.follow(self.model)
        state = {"generator": self._generator.get_state(), "is_shuffled": torch.tensor(self._is_shuffled)}
        state |= {f"data.{name}": tensor for name, tensor in self._data.to_dict().items()}
        return self._description().added_to(state | self._known.to_dict())

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Takes what `training_state()` gave, after the model's own state has been loaded.

        Raises ValueError, which names what differs, and changes nothing, for anything else: another method or model, other
        options. The data of the next step are compared with those of the run, as in every step.
        """
        entries = self._description().taken_from(state)
        check_tensors(entries)
        check_entries(entries, {"is_shuffled"})
        position = checked_generator(entries, self._generator)
        known = KnownPoints.from_dict(self.model, entries)
        self._data.load_dict({name.removeprefix("data."): t for name, t in entries.items() if name.startswith("data.")})
        self._generator.set_state(position)
        self._known, self._is_shuffled = known, bool(entries["is_shuffled"])

    def _description(self) -> StateDescription:
        weights = self.model.weights
        return StateDescription.of(
            self,
            {
                "likelihood": self.likelihood,
                "basis": self.model.basis,
                "number of features": self.model.basis.num_features,
                "number of dense columns": weights.num_dense_columns,
                "num_data": self._data.num_data,
                "num_feature_samples": self.num_group_samples * self.model.basis.group_size,
                "num_data_samples": self._data.num_samples,
                "num_steps_per_batch": self.num_steps_per_batch,
                "num_control_points": self.num_control_points,
                "control_coefficient": self.control_coefficient,
                "control_form": self.control_form,
                "estimator": self.estimator,
                "index_sets": self.index_sets,
            },
        )

    def _estimate(
        self, x: Tensor, target: Tensor, params: tuple[Any, ...], kwargs: dict[str, Any], kept: KeptRows | None
    ) -> Tensor:
        model, num_data = self.model, self._data.num_data_of(len(x))
        index = self._draw_rows(x) if kept is None else kept.index
        rows = self._rows(x, target, index, num_data, params, kwargs)
        if not model.weights.initialized:
            initialize_weights(model, rows, num_data)
            free = (*model.hyperparameters(), *self.likelihood.parameters())
            warn_of_capacity(model, rows, num_data, free)
        if self.estimator == "printed":
            return self._printed(rows, num_data)
        first = self._sample()
        # Residuals that are sampled take two sets for their product; so does a prior that is not diagonal, for its double
        # sums. What is a bound anyway, or known, takes one.
        takes_two = (self.is_unbiased and kept is None) or not model.basis.has_diagonal_prior
        second = self._sample() if takes_two else first
        data = self._data_term(rows, first, second, kwargs, None if kept is None else kept.latent)
        if kept is None and self._uses_control_points():
            data = data - num_data * self._control_term(x, target, first, second, params, kwargs) / 2
        return self._value(data, first, second, rows.x.dtype, num_data)

    def _data_term(
        self, rows: Rows, first: Sample, second: Sample, kwargs: dict[str, Any], latent: KnownLatent | None = None
    ) -> Tensor:
        """E_q log p(y | f), or an estimate or bound of it, [] float64."""
        model, likelihood = self.model, self.likelihood
        if self.is_unbiased:
            if latent is None:
                return gaussian_term(model, rows, first, second) / -2
            return known_gaussian_term(model, rows, latent, first, second) / -2
        if latent is None:
            return site_bound(likelihood, model, rows, first, **kwargs)
        return known_site_term(likelihood, model, rows, latent, first, second, **kwargs)

    def _value(self, data: Tensor, first: Sample, second: Sample, dtype: torch.dtype, num_data: int) -> Tensor:
        divergence = twice_divergence(self.model, first, second).double()
        return self._with_other_terms((data - divergence / 2) / num_data, dtype, num_data)

    def _printed(self, rows: Rows, num_data: int) -> Tensor:
        groups, features = self.model.basis.num_groups, self.model.basis.num_features
        first, second = (self._draw(groups, self.num_group_samples) for _ in range(2))
        size = min(features, self.num_group_samples * self.model.basis.group_size)
        columns = draw_set("uniform", features, size, self._draws).to(rows.x.device)
        total = printed_estimate(self.model, rows.x, rows.residual, rows.noise, num_data, first, second, columns)
        return self._with_other_terms(-total.double() / (2 * num_data), rows.x.dtype, num_data)

    def _with_other_terms(self, value: Tensor, dtype: torch.dtype, num_data: int) -> Tensor:
        for _, module, prior, closure, _ in self.named_priors():
            value = value + prior.log_prob(closure(module)).sum() / num_data
        for term in self.model.added_loss_terms():
            value = value - term.loss()
        if not torch.isfinite(value):
            raise NonFiniteError(
                f"The evidence lower bound is {value.item()}: parameters have left what {dtype} can bear. A smaller "
                "learning rate keeps them; nothing was changed by this step."
            )
        return value.to(dtype)

    def _control_term(
        self,
        x: Tensor,
        target: Tensor,
        first: Sample,
        second: Sample,
        params: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        model = self.model
        if self._known.control is None:
            size = self._control_size(len(x))
            index = draw_set("uniform", len(x), size, self._draws).to(x.device)
            fixed = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
            noise = noise_variances(self.likelihood, index, len(x), params, kwargs).detach() if fixed else None
            self._known.control = ControlVariate.start(model, x[index].detach(), target[index].detach().to(x), noise)
        else:
            self._known.follow(model, self._refresh_every)
        state = self._known.control
        assert state is not None
        with torch.no_grad():
            residual = state.y - model.prior_mean(state.latent.x)
            noise = self.likelihood.noise.expand(len(residual)) if state.noise is None else state.noise
        return self.control_coefficient * state.term(
            model, first, second, residual, noise.detach(), form=self.control_form
        )

    def _uses_control_points(self) -> bool:
        if not self.num_control_points or self.model.num_tail_groups <= self.num_group_samples:
            return False
        # A look at other data, in the middle of training on rows that are kept, is not worth points of its own.
        return torch.is_grad_enabled() or self._known.kept is None

    def _keep(self, x: Tensor) -> KeptRows | None:
        """Rows whose latent function is known: the last step's, or others after so many steps. None where all are new."""
        known, trains = self._known, torch.is_grad_enabled()
        keeps = self._keeps_rows(x)
        has_moved = keeps and known.kept is not None and not known.kept.are_in(x)
        if has_moved and not self._asks_to_keep:
            # In another order at every call (a loader of whole batches that shuffles), rows would be drawn at every call.
            self._is_shuffled, keeps = True, False
        if trains and keeps:
            known.control = None
        elif trains:
            known.kept = None
        elif known.control is not None:  # a look at all data, in the middle of training on batches
            return None
        if not keeps:
            return None
        kept = known.kept
        is_due = kept is None or has_moved or (trains and kept.are_due(x, self.num_steps_per_batch))
        if kept is not None and not is_due:
            known.follow(self.model, self._refresh_every)
            is_due = not kept.latent.has_features_of(self.model)
        if kept is None or is_due:
            kept = KeptRows.draw(self.model, x, self._draw_rows(x), kept)
        known.kept = replace(kept, steps=kept.steps + 1)
        return known.kept

    def _keeps_rows(self, x: Tensor) -> bool:
        """Raises ValueError where it was asked for, and cannot be."""
        if self.num_steps_per_batch == 1:
            return False
        learned = x.requires_grad or any(p.requires_grad for p in self.model.basis.feature_parameters())
        is_whole = len(x) == self._data.num_data_of(len(x))
        if self._asks_to_keep and (learned or not is_whole):
            reason = (
                "the kernel has hyperparameters to be learned, or the inputs take a gradient: fix them, "
                "model.basis.requires_grad_(False)"
                if learned
                else f"only {len(x)} of {self._data.num_data} data were passed: pass all, rows are drawn inside"
            )
            raise ValueError(
                f"num_steps_per_batch={self.num_steps_per_batch}, but {reason}. num_steps_per_batch=1 takes both."
            )
        return is_whole and not learned and not self._is_shuffled

    @contextmanager
    def _unchanged(self, *, always: bool) -> Iterator[None]:
        """What raises inside leaves generator and weights as they were, and what is known to be worked out anew.

        A look leaves all of it, always, but for steps of the optimiser that were applied to what is known.
        """
        position, known, was_shuffled = self._generator.get_state(), replace(self._known), self._is_shuffled
        undo = True
        try:
            with initialization_undone(self.model.weights, always=always):
                yield
            undo = always
        except BaseException:
            self._generator.set_state(position)
            known.set_revision(-1)  # moves that were no numbers, or a part of them, may have been taken in
            raise
        finally:
            if undo:
                self._known, self._is_shuffled = known, was_shuffled

    def _draw_rows(self, x: Tensor) -> Tensor:
        return draw_set("uniform", len(x), self._data.num_samples_of(len(x)), self._draws).to(x.device)

    def _control_size(self, num_rows: int) -> int:
        """Support points that `num_rows` data give."""
        num_data = self._data.num_data_of(num_rows)
        if self._asks_for_points and self.num_control_points > num_data:
            raise ValueError(f"num_control_points must be at most {num_data}, the data; got {self.num_control_points}.")
        return min(self.num_control_points, num_rows)

    def _rows(
        self,
        x: Tensor,
        target: Tensor,
        index: Tensor,
        num_data: int,
        params: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Rows:
        chosen = x[index]
        noise = noise_variances(self.likelihood, index, len(x), params, kwargs) if self.is_unbiased else None
        return Rows(chosen, target[index].to(chosen), self.model.prior_mean(chosen), noise, num_data / len(index))

    def _inputs_of(self, function_dist: DeferredPrediction) -> Tensor:
        if not isinstance(function_dist, DeferredPrediction):
            raise RuntimeError(
                "QuadruplyStochasticELBO samples from the inputs of model(x) in train mode; got a "
                f"{type(function_dist).__name__}. Call model.train() and likelihood.train() before training goes on."
            )
        if function_dist.model is not self.model:
            raise ValueError("This is the output of another model than the marginal log likelihood was made with.")
        return function_dist.x

    def _check_model(self) -> None:
        for name, parameter in (*self.model.named_hyperparameters(), *self.likelihood.named_parameters()):
            if parameter.shape.numel() < FEATURE_SAMPLES and not torch.isfinite(parameter).all():
                raise NonFiniteError(f"The parameter {name} is not finite. A smaller learning rate keeps it so.")
        basis = self.model.basis
        if not basis.has_diagonal_prior and any(parameter.requires_grad for parameter in basis.parameters()):
            raise ValueError(
                f"The hyperparameters of a {type(basis).__name__} cannot be learned: its prior precision is not diagonal, "
                "and the gradient of its log-determinant is not sampled. Fix them: model.basis.requires_grad_(False)."
            )

    def _sample(self) -> Sample:
        groups = self._draw(self.model.num_tail_groups, self.num_group_samples)
        return Sample.of(self.model, groups, sparse=self.sparse_gradients)

    def _draw(self, total: int, size: int) -> Tensor:
        return draw_set(self.index_sets, total, size, self._draws).to(self.model.device)

    @property
    def _draws(self) -> torch.Generator:
        """Of the training, or of looks at it."""
        return self._generator if torch.is_grad_enabled() else self._looks

    @property
    def _refresh_every(self) -> int | None:
        """Steps; looks count for none."""
        if not torch.is_grad_enabled():
            return None
        return max(REFRESH_EVERY, 10 * self.model.num_tail_groups // max(1, self.num_group_samples))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuadruplyStochasticELBO":
        super()._apply(fn, recurse)
        self._known.apply(fn)
        return self

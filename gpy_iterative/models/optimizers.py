"""Optimisers for weights in weight space, and the schedule that goes with them."""

from collections.abc import Iterator
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpy_iterative.checks import check_count, check_fraction
from gpy_iterative.models.feature_weights import FeatureWeights
from gpy_iterative.models.quadruply_stochastic_gp import QuadruplyStochasticGP

#: The longest step of a log deviation.
MAX_LOG_STEP = 0.3


class HeadNaturalGradient(torch.optim.Optimizer):
    """Natural gradient steps of q's mean and diagonal at the features of a basis' own head (`NystromBasis`).

    mu moves by lr n c^2 (gradient), c the diagonal of C, and log deviations by lr n / 2 (gradient): whatever scales
    features have, directions that the data determine converge in about 1 / lr steps, those of the prior in no more. For
    features that are nearly orthogonal on the data; with correlated ones (random features, kernel functions) it diverges.

    Args:
        weights: of a model.
        num_data: n, which the loss was divided by.
        num_data_samples: b, rows of a step.
        lr: of at most 1. The step is lr / (1 + sqrt(d / b))^2 for d directions that data determine, d = sum(1 - c^2):
            the largest eigenvalue that a batch's own curvature has in units of all data's. A feature that a few rows
            alone determine moves by less in the steps that meet them.

    Raises:
        ValueError: options outside their range.
    """

    def __init__(self, weights: FeatureWeights, *, num_data: int, num_data_samples: int, lr: float = 0.5) -> None:
        check_count("num_data", num_data)
        check_count("num_data_samples", num_data_samples)
        _check_rate("lr", lr)
        super().__init__([weights.head_mean, weights.head_log_diagonal], {"lr": lr})
        self.weights, self.num_data, self.num_data_samples = weights, num_data, num_data_samples

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step; cost O(h)."""
        weights = self.weights
        if weights.head_mean.grad is None:
            return
        # Not those of dense columns, which come from Adagrad's scale and not from the posterior's.
        variances = (2 * weights.head_log_diagonal).exp()
        determined = (1 - variances).clamp_min(0).sum()
        rate = self.param_groups[0]["lr"] / (1 + (determined / self.num_data_samples).sqrt()) ** 2
        direction = variances * (self.num_data * weights.head_mean.grad)
        if weights.head_log_diagonal.grad is None:
            weights.head_mean -= rate * direction
            return
        excess = self.num_data * weights.head_log_diagonal.grad
        # A deviation's gradient is the batch's curvature along its feature, times c^2, less 1: beyond 2 / rate (an outlying
        # row, or a c that no batch has told yet) the step would overshoot.
        weights.head_mean -= rate * direction / (rate * (1 + excess)).clamp_min(1)
        weights.head_log_diagonal -= (rate / 2 * excess).clamp(-MAX_LOG_STEP, MAX_LOG_STEP)


class QuadruplyStochasticOptimizer:
    """All optimisers of one training, with their schedule: what the authors of the method do, and natural gradients.

    `HeadNaturalGradient` for the head of a `NystromBasis`, Adagrad (whose sparse steps move sampled rows alone) for all
    other variational parameters and precisions of relevance vectors, Adam at a small rate for hyperparameters.
    These stay as they are for the first steps, while q has yet to become what they can be judged by. All rates fall
    exponentially.

    Args:
        model: whose parameters are trained.
        likelihood: with its own, or None.
        num_data: n.
        num_data_samples: rows of a step.
        num_steps: of the whole training.
        head_learning_rate: of `HeadNaturalGradient`.
        learning_rate: of Adagrad.
        hyper_learning_rate: of Adam; 0 leaves hyperparameters out.
        final_fraction: of all rates, at the end.
        num_frozen_steps: before hyperparameters move; None is a tenth of all.

    Raises:
        ValueError: options outside their range.
    """

    def __init__(
        self,
        model: QuadruplyStochasticGP,
        likelihood: Likelihood | None = None,
        *,
        num_data: int,
        num_steps: int,
        num_data_samples: int = 500,
        head_learning_rate: float = 0.5,
        learning_rate: float = 0.1,
        hyper_learning_rate: float = 1e-5,
        final_fraction: float = 1e-2,
        num_frozen_steps: int | None = None,
    ) -> None:
        check_count("num_steps", num_steps)
        _check_rate("learning_rate", learning_rate)
        _check_rate("final_fraction", final_fraction)
        check_fraction("hyper_learning_rate", hyper_learning_rate, ends=True)
        frozen = num_steps // 10 if num_frozen_steps is None else num_frozen_steps
        if not 0 <= frozen <= num_steps:
            raise ValueError(f"num_frozen_steps must lie between 0 and num_steps = {num_steps}, got {frozen}.")
        decay = lambda step: final_fraction ** min(1.0, step / num_steps)
        thaw = lambda step: decay(step) if step >= frozen else 0.0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[torch.optim.lr_scheduler.LambdaLR] = []
        check_count("num_data", num_data)
        check_count("num_data_samples", num_data_samples)
        has_own_head = model.basis.num_head_features > 0
        if has_own_head:
            sizes = {"num_data": num_data, "num_data_samples": num_data_samples}
            self._add(HeadNaturalGradient(model.weights, lr=head_learning_rate, **sizes), decay)
        sampled = [*_other_weights(model.weights, has_own_head), *model.basis.sampled_parameters()]
        if sampled:
            self._add(torch.optim.Adagrad(sampled, lr=learning_rate), decay)
        taken = {id(parameter) for parameter in sampled}
        own = [] if likelihood is None else list(likelihood.parameters())
        hyper = [p for p in (*model.hyperparameters(), *own) if p.requires_grad and id(p) not in taken]
        if hyper and hyper_learning_rate:
            self._add(torch.optim.Adam(hyper, lr=hyper_learning_rate), thaw)
        self._all = [*model.parameters(), *own]

    def zero_grad(self) -> None:
        """Forgets the gradients of all parameters, those that are not trained included."""
        for parameter in self._all:
            parameter.grad = None

    def step(self) -> None:
        """One step of every optimiser, and of its schedule."""
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """For `torch.save`."""
        return {
            "kinds": self._kinds(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises ValueError, and changes nothing, where it is that of other optimisers."""
        if state.get("kinds") != self._kinds():
            raise ValueError(
                f"This is the state of {state.get('kinds')}; here there are {self._kinds()} (each with the sizes of its "
                "parameters). Make the optimisers with the model and options of the run that is to go on."
            )
        for own, saved in zip(self.optimizers, state["optimizers"], strict=True):
            own.load_state_dict(saved)
        for own, saved in zip(self.schedulers, state["schedulers"], strict=True):
            own.load_state_dict(saved)

    def _kinds(self) -> list[tuple[str, list[int]]]:
        """Name and sizes of the parameters of each optimiser."""
        return [
            (type(optimizer).__name__, [p.numel() for group in optimizer.param_groups for p in group["params"]])
            for optimizer in self.optimizers
        ]

    def _add(self, optimizer: torch.optim.Optimizer, factor: Any) -> None:
        self.optimizers.append(optimizer)
        self.schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def _other_weights(weights: FeatureWeights, has_own_head: bool) -> Iterator[Tensor]:
    """What Adagrad moves. Features of dense columns are no head of their own: they are correlated as all others are."""
    own = () if has_own_head else (weights.head_mean, weights.head_log_diagonal)
    tail = (weights.tail_mean, weights.tail_columns, weights.tail_log_diagonal)
    for parameter in (*own, weights.head_columns, *tail):
        if parameter.numel():
            yield parameter


def _check_rate(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be positive and at most 1, got {value}.")

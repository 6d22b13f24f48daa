"""Optimisers of quadruply stochastic models."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from gpy_iterative.checks import check_count, check_fraction, check_instance, check_rate
from gpy_iterative.quadruply.feature_weights import FeatureWeights, SeenRows
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Least ratio of precisions after and before a step.
LEAST_PRECISION_RATIO = 0.5
#: Halvings of a step before it is skipped.
MAX_HALVINGS = 50
#: Rate of the noise, and largest change of its logarithm.
NOISE_RATE, MOST_LOG_CHANGE = 0.1, 1.0
#: Relative distance of the noise from its bounds, where raw values are infinite.
MARGIN = 1e-3
#: Last rate over first rate. Noise and hyperparameters move after one of so many parts of the steps.
FINAL_FRACTION, FROZEN_PARTS = 0.01, 10
#: Default rate of hyperparameters: with a head alone, and with random features, whose bound biases them.
HYPER_RATE, BIASED_HYPER_RATE = 0.05, 1e-5


class _Optimizer(torch.optim.Optimizer):
    """Pickled without hooks and the `step` that schedulers wrap."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "step"}


class HeadNaturalGradient(_Optimizer):
    """Natural gradient steps of mean and diagonal of q at the head of a `NystromBasis`.

    mu moves by -lr C (I + G^T G)^-1 C (gradient), G = sqrt(lr curvature) phi C, halved until the rows' bound does not fall
    (without Gaussian noise). Precisions c^-2 move towards the rows' at rate lr.

    Args:
        weights: of a model; records rows of backward passes from now on.
        num_data: n.
        lr: at most 1.
    """

    def __init__(self, weights: FeatureWeights, *, num_data: int, lr: float = 0.5) -> None:
        check_count("num_data", num_data)
        check_rate("lr", lr)
        super().__init__([weights.head_mean, weights.head_log_diagonal], {"lr": lr})
        self.weights, self.num_data = weights, num_data
        weights.seen = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.weights.seen = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """A step for all backward passes since the last; cost O(b h min(b, h)) in float64.

        Raises RuntimeError if the gradient is not from a `QuadruplyStochasticELBO`, ValueError for more rows than n.
        """
        weights = self.weights
        if weights.head_mean.grad is None:
            return
        if not weights.seen:
            raise RuntimeError(
                "HeadNaturalGradient needs the rows of the gradient, which no QuadruplyStochasticELBO of this model has "
                "noted. Make the optimiser before loss.backward(), and call backward() before every step."
            )
        seen, weights.seen = weights.seen, []
        if (most := max(len(rows.features) for rows in seen)) > self.num_data:
            raise ValueError(
                f"num_data of the optimiser is {self.num_data}, but a step has {most} rows: it must be the number of all "
                "training data, as len(train_x)."
            )
        rate, log_diagonal = self.param_groups[0]["lr"], weights.head_log_diagonal
        features = torch.cat([rows.features for rows in seen]).double()
        curvature = self.num_data * torch.cat([rows.curvature for rows in seen]).double().clamp_min(0)
        deviations = log_diagonal.double().exp()
        root = (rate * curvature).sqrt().unsqueeze(-1) * features * deviations
        gradient = self.num_data * weights.head_mean.grad.double()
        change = -rate * deviations * _solved(root, deviations * gradient)
        weights.head_mean += (_length(weights.head_mean, change, seen) * change).to(weights.head_mean.dtype)
        if log_diagonal.grad is not None:
            # c^-2 += lr (1 + curvature - c^-2), by the gradient of log c.
            ratio = 1 + rate * self.num_data * log_diagonal.grad
            log_diagonal -= ratio.clamp_min(LEAST_PRECISION_RATIO).log() / 2


def _solved(root: Tensor, rhs: Tensor) -> Tensor:
    """(I + G^T G)^-1 v [h] by the smaller Gram matrix of G [b, h]."""
    small = root if len(root) <= root.shape[1] else root.mT
    gram = small @ small.mT
    gram.diagonal().add_(1)
    factor = torch.linalg.cholesky(gram)
    if small is root:
        return rhs - root.mT @ torch.cholesky_solve((root @ rhs).unsqueeze(-1), factor).squeeze(-1)
    return torch.cholesky_solve(rhs.unsqueeze(-1), factor).squeeze(-1)


def _length(mean: Tensor, change: Tensor, seen: list[SeenRows]) -> float:
    """Step length: 1, halved until the seen rows' bound does not fall, or 0."""
    others = [(rows.fit, rows.features @ change.to(rows.features.dtype)) for rows in seen if rows.fit is not None]
    if not others:
        return 1.0
    bound = lambda length: float(
        sum(fit(length * shift) for fit, shift in others) / len(others) - (mean + length * change).square().sum() / 2
    )
    before = bound(0.0)
    rounding = torch.finfo(others[0][1].dtype).eps * abs(before)
    return next((length for k in range(MAX_HALVINGS) if bound(length := 0.5**k) >= before - rounding), 0.0)


class NoiseNaturalGradient(_Optimizer):
    """Log noise moves by -2 lr times its gradient."""

    def __init__(self, likelihood: GaussianLikelihood) -> None:
        super().__init__([likelihood.noise_covar.raw_noise], {"lr": NOISE_RATE})
        self.likelihood = likelihood

    def step(self, closure: None = None) -> None:
        raw, constraint = self.likelihood.noise_covar.raw_noise, self.likelihood.noise_covar.raw_noise_constraint
        if raw.grad is None or not self.param_groups[0]["lr"]:  # frozen: not even by rounding
            return
        with torch.enable_grad():
            inner = raw.detach().requires_grad_()
            noise = constraint.transform(inner)
            (slope,) = torch.autograd.grad(noise.log().sum(), inner)
        with torch.no_grad():
            change = -2 * self.param_groups[0]["lr"] * raw.grad / slope
            moved = noise * change.clamp(-MOST_LOG_CHANGE, MOST_LOG_CHANGE).exp()
            least, most = constraint.lower_bound + torch.finfo(raw.dtype).eps, constraint.upper_bound
            raw.copy_(constraint.inverse_transform(moved.clamp(least * (1 + MARGIN), most * (1 - MARGIN))))


class QuadruplyStochasticOptimizer(_Optimizer):
    """All optimisers of a quadruply stochastic model, with rates that fall exponentially to a hundredth.

    `HeadNaturalGradient` moves the head of a `NystromBasis`, `NoiseNaturalGradient` the noise of a `GaussianLikelihood`,
    Adagrad other variational parameters and relevance vectors' precisions, Adam other hyperparameters. Noise and
    hyperparameters move after a tenth of the steps.

    Args:
        model: to train.
        likelihood: to train, or None.
        num_data: n.
        num_steps: of the training.
        learning_rate: of Adagrad.
        hyper_learning_rate: of Adam; 0 fixes hyperparameters. None is .05 with a head alone, else 1e-5, as random features
            bias them.

    Attributes:
        optimizers: its optimisers.
        num_done: steps made.
    """

    def __init__(
        self,
        model: QuadruplyStochasticGP,
        likelihood: Likelihood | None = None,
        *,
        num_data: int,
        num_steps: int,
        learning_rate: float = 0.1,
        hyper_learning_rate: float | None = None,
    ) -> None:
        if not isinstance(model, QuadruplyStochasticGP):
            raise TypeError(f"QuadruplyStochasticOptimizer needs a QuadruplyStochasticGP, got {type(model).__name__}.")
        check_instance("likelihood", likelihood, Likelihood, "GaussianLikelihood()")
        check_count("num_steps", num_steps)
        check_rate("learning_rate", learning_rate)
        has_own_head = model.basis.num_head_features > 0
        if hyper_learning_rate is None:
            is_head_alone = has_own_head and not model.num_tail_groups
            hyper_learning_rate = HYPER_RATE if is_head_alone else BIASED_HYPER_RATE
        check_fraction("hyper_learning_rate", hyper_learning_rate, ends=True)
        check_count("num_data", num_data)
        optimizers: list[torch.optim.Optimizer] = []
        if has_own_head:
            optimizers.append(HeadNaturalGradient(model.weights, num_data=num_data))
        if sampled := _without((*model.weights.parameters(), *model.basis.sampled_parameters()), optimizers):
            optimizers.append(torch.optim.Adagrad(sampled, lr=learning_rate))
        if type(likelihood) is GaussianLikelihood and likelihood.noise_covar.raw_noise.requires_grad:
            optimizers.append(NoiseNaturalGradient(likelihood))
        own = () if likelihood is None else likelihood.parameters()
        hyper = [p for p in _without((*model.hyperparameters(), *own), optimizers) if p.requires_grad]
        if hyper and hyper_learning_rate:
            optimizers.append(torch.optim.Adam(hyper, lr=hyper_learning_rate))
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers, self.num_done = optimizers, 0
        self.num_data, self.num_steps = num_data, num_steps
        self.modules: list[torch.nn.Module] = [model] if likelihood is None else [model, likelihood]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients of untrained parameters too."""
        for part in (*self.optimizers, *self.modules):
            part.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Returns the closure's value."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        decay = FINAL_FRACTION ** min(1.0, self.num_done / self.num_steps)
        for optimizer in self.optimizers:
            waits = isinstance(optimizer, torch.optim.Adam | NoiseNaturalGradient)
            is_frozen = waits and self.num_done < self.num_steps // FROZEN_PARTS
            rates = [group["lr"] for group in optimizer.param_groups]
            try:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = 0.0 if is_frozen else rate * decay
                # Else PyTorch warns of Adagrad's sparse tensors.
                with torch.sparse.check_sparse_tensor_invariants(False):
                    optimizer.step()
            finally:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
        self.num_done += 1
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: parameters are fixed."""
        if hasattr(self, "optimizers"):
            raise ValueError(
                "QuadruplyStochasticOptimizer takes no further parameters: use another optimiser for them."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"run": self._description(), "optimizers": states, "num_done": self.num_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError for the state of another run. The number of steps may differ."""
        if not isinstance(state_dict, Mapping) or state_dict.keys() != self.state_dict().keys():
            raise ValueError(
                "This is no state of a QuadruplyStochasticOptimizer of this version: take it from state_dict()."
            )
        found = state_dict["run"]
        differences = [
            f"{name} is {found.get(name)} in it and {value} here"
            for name, value in self._description().items()
            if found.get(name) != value
        ]
        if differences:
            raise ValueError(
                f"This is the state of another run: {'; '.join(differences)}. Make the optimiser with the model and "
                "options of that run."
            )
        for own, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            own.load_state_dict(saved)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.num_done = state_dict["num_done"]

    def _description(self) -> dict[str, Any]:
        shapes = [
            [type(optimizer).__name__, [list(p.shape) for group in optimizer.param_groups for p in group["params"]]]
            for optimizer in self.optimizers
        ]
        return {"optimisers and shapes": shapes, "num_data": self.num_data}


def _without(parameters: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Parameters that have entries and no optimiser."""
    taken = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [p for p in parameters if p.numel() and id(p) not in taken]

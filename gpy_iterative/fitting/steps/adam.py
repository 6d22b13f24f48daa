import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpy_iterative.fitting.coordinates import Coordinate, Coordinates, copied, network_parameters, restore
from gpy_iterative.fitting.prior_support import is_in_supports
from gpy_iterative.training.likelihood_params import likelihood_arguments
from gpy_iterative.training.training_system import check_hyperparameters, to_training_mode

#: First rates; the last rate relative to the first.
RATE, NETWORK_RATE, LAST = 0.1, 0.01, 0.05
#: Before the step is undone.
MAX_HALVINGS = 20

Batches = Iterable[Any]


@runtime_checkable
class HasOptimizer(Protocol):
    def make_optimizer(self, num_steps: int, num_data: int) -> torch.optim.Optimizer: ...


class AdamSteps:
    """Steps of Adam with a decaying rate, or of the method's own optimiser (`QuadruplyStochasticOptimizer`).

    Args:
        num_steps: over which the rate decays.
        batches, params: as in `gpy_iterative.fit`.
    """

    def __init__(
        self,
        mll: MarginalLogLikelihood,
        *,
        num_steps: int,
        batches: Batches | None = None,
        params: Sequence[Any] = (),
    ) -> None:
        self.mll, self._batches, self._num_steps, self._done = mll, batches, num_steps, 0
        has_data = getattr(mll.model, "train_inputs", None) and getattr(mll.model, "train_targets", None) is not None
        if batches is None and not has_data:
            raise ValueError("The model has no training data: pass batches=[(train_x, train_y)], or a DataLoader.")
        if not isinstance(batches, Iterable | None):
            raise TypeError(f"batches must be a list or a DataLoader, got {batches!r}.")
        if batches is not None and iter(batches) is batches:
            raise ValueError("batches= is an iterator, which can be read only once: pass a list or a DataLoader.")
        bounded = [part for part in Coordinates(mll).parts if part.kind != "identity"]
        self._values = [part for part in bounded if not part.has_transform]  # as in BoTorch's models
        self._positive = [part for part in bounded if part.has_transform and part.kind == "log"]
        to_training_mode(mll, mll.model, mll.likelihood)
        self._params = tuple(params)
        self._taken = 0  # of this pass
        self._source: Iterator[Any] = iter(())
        self._optimizer = self._own_optimizer()
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def step(self) -> tuple[float, float, float]:
        """The value before the step, its standard error (NaN if unknown, 0 if the report has none), and the largest move.

        The first step moves parameters inside their bounds. Parameters outside a prior's support are moved back; a step
        that leaves the support of a joint prior is halved. Errors restore parameters and optimiser.
        """
        parameters = self._parameters()
        before = copied(parameters)
        state = copy.deepcopy(self._optimizer.state_dict())  # changed in place
        if not isinstance(self.mll, HasOptimizer):
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * LAST ** (self._done / self._num_steps)
        try:
            if not self._done:
                Coordinates(self.mll).enter_bounds()
            begun = copied(parameters)
            self._optimizer.zero_grad()
            value = self._value().mean()
            if not self._done:
                Coordinates(self.mll).check_value(value)
            (-value).backward()
            self._move()
            check_hyperparameters(self.mll.named_parameters())
            self._keep_in_supports(parameters, begun)
        except BaseException:  # also Ctrl-C
            restore(parameters, before)
            self._optimizer.load_state_dict(state)
            raise
        self._done += 1
        moves = [float((p.detach() - known).abs().max()) for p, known in zip(parameters, before, strict=True)]
        return float(value.detach()), self._error(), max(moves)

    @torch.no_grad()
    def value(self) -> tuple[float, float]:
        """The value now, and its standard error."""
        return float(self._value().mean()), self._error()

    def _error(self) -> float:
        sem = getattr(self.mll.report, "value_sem", None)
        return 0.0 if sem is None else float(sem.mean())

    @property
    def is_sampled(self) -> bool:
        return self._batches is not None or not hasattr(self.mll.report, "value_sem")

    def state(self) -> dict[str, Any]:
        optimizer, run = self._optimizer.state_dict(), self.mll.training_state()
        return {"done": self._done, "taken": self._taken, "optimizer": optimizer, "run": run}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Skips used batches; a shuffling DataLoader redraws the others. Raises ValueError for another mll."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.mll.load_training_state(state["run"])
        self._done, self._taken = state["done"], state["taken"]
        if self._batches is not None:
            self._source = islice(iter(self._batches), self._taken, None)

    def _own_optimizer(self) -> torch.optim.Optimizer:
        if isinstance(self.mll, HasOptimizer):
            return self.mll.make_optimizer(self._num_steps, self._num_data())
        network = set(network_parameters(self.mll).values())
        parts = [[p for p in self._parameters() if (p in network) is of_network] for of_network in (False, True)]
        groups = [{"params": part, "lr": rate} for part, rate in zip(parts, (RATE, NETWORK_RATE), strict=True) if part]
        return torch.optim.Adam(groups)

    def _move(self) -> None:
        """Adam moves positive parameters above 1 relative to their values, and coordinates of those without a transform."""
        if isinstance(self.mll, HasOptimizer):
            self._optimizer.step()
            return
        begun = [(part.parameter, part.parameter.detach().clone(), _stretch(part)) for part in self._positive]
        values = [(part, part.coordinates(part.parameter.detach().double()), part.slopes()) for part in self._values]
        with torch.no_grad():
            for part, _, slopes in values:
                if part.parameter.grad is not None:
                    part.parameter.grad /= slopes
            for parameter in [*(parameter for parameter, *_ in begun), *(part.parameter for part in self._values)]:
                parameter.zero_()  # beside a large value float32 would round the move away
            self._optimizer.step()
            for parameter, raw, stretch in begun:
                parameter.copy_(raw + stretch * parameter)
            for part, coordinates, _ in values:
                moved = (coordinates + part.parameter).reshape(-1).clamp(*part.bounds())
                part.parameter.copy_(part.user_values(moved.reshape(coordinates.shape)))

    def _num_data(self) -> int:
        if self._batches is None:
            return len(self.mll.model.train_targets)
        _, y = _pair(self._next_batch())  # an mll with partial data knows the total
        self._source, self._taken = iter(()), 0
        return len(y)

    def _parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.mll.parameters() if parameter.requires_grad and parameter.numel()]

    def _value(self) -> Tensor:
        mll: Any = self.mll
        model: Any = mll.model
        batch = None if self._batches is None else self._next_batch()
        if batch is None or (isinstance(batch, Tensor) and not batch.is_floating_point()):
            rows = {} if batch is None else {"indices": batch}
            if rows and "indices" not in inspect.signature(type(mll).forward).parameters:
                raise ValueError(
                    f"batches= has row numbers, and {type(mll).__name__} takes all {len(model.train_targets)} rows in "
                    "every step: pass batches=None, or take a mini-batch method (VariationalFeatureMarginalLogLikelihood)."
                )
            return mll(
                model(*model.train_inputs), model.train_targets, *likelihood_arguments(mll, self._params), **rows
            )
        x, y = _pair(batch)
        own = getattr(model, "train_inputs", None)
        if own and not torch.equal(x if x.dim() > 1 else x.unsqueeze(-1), own[0]):
            others = " others" if len(x) == len(own[0]) else ""
            raise ValueError(
                f"{type(mll).__name__} trains on the model's own {len(own[0])} rows, and batches= has a pair (x, y) of "
                f"{len(x)}{others}: pass batches=None, or row numbers for a mini-batch method."
            )
        return mll(model(x), y)

    def _next_batch(self) -> Any:
        batch = next(self._source, None)
        if batch is None:
            self._source, self._taken = iter(self._batches or ()), 0
            batch = next(self._source, None)
        if batch is None:
            raise ValueError("batches= is empty, or can be read only once: pass a list or a DataLoader.")
        self._taken += 1
        return batch

    @torch.no_grad()
    def _keep_in_supports(self, parameters: list[Tensor], before: list[Tensor]) -> None:
        if not is_in_supports(self.mll.model):
            Coordinates(self.mll).enter_bounds()
        for _ in range(MAX_HALVINGS):
            if is_in_supports(self.mll.model):
                return
            for parameter, known in zip(parameters, before, strict=True):
                parameter.lerp_(known, 0.5)
        restore(parameters, before)


def _stretch(part: Coordinate) -> Tensor:
    """Factors for moves of a raw parameter: relative to values above 1, but short of the constraint's bounds.

    Adam's rate is nothing beside a lengthscale of 300. A move as long as the distance from a bound would cross it,
    since the transform is not straight there.
    """
    raw = part.parameter.detach().double()
    values, (low, high) = part.values(raw), part.limits(raw)
    rates = 1 / part.slopes()
    distances = (values - low).minimum(high - values) / values
    return rates.minimum(values).minimum(rates * distances).clamp_min(1.0).to(part.parameter)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    if isinstance(batch, Tensor) and not batch.is_floating_point():
        raise ValueError("batches= has row numbers, and the model has no training data of its own: pass pairs (x, y).")
    shown = f"a tensor of {batch.dtype}" if isinstance(batch, Tensor) else type(batch).__name__
    raise ValueError(f"Each of batches= must be a pair (x, y) or a tensor of row numbers, got {shown}.")

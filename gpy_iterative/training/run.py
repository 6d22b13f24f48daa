"""State of a method between training steps.

A step returns the next run, which is kept only if `forward` succeeds. A non-finite gradient appears later, when the run has
advanced.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import generator_or_seed
from gpy_iterative.random_numbers import permutation
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.state_description import TAKE_IT, StateDescription
from gpy_iterative.worker_threads import CPU

Part = Mapping[str, Tensor]


def make_generator(generator: torch.Generator | int | None) -> torch.Generator:
    """None: one with the seed of `torch.manual_seed`."""
    generator = generator_or_seed(generator)
    if isinstance(generator, torch.Generator):
        return generator
    return torch.Generator().manual_seed(torch.initial_seed() if generator is None else generator)


def stream_generator(seed: int, *stream: int) -> torch.Generator:
    """A generator for one of the streams of a seed."""
    # With sums, neighbouring seeds would share streams.
    mixed = np.random.SeedSequence((seed % 2**64, *stream)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


@dataclass(frozen=True)
class Run:
    """Position of the random numbers, and tensors by part and name.

    The part `system` has the shape, dtype and device of H. Exact methods add `probes`, `logdet`, `quadrature` and
    `warm_start`, mini-batch methods `rows`, `counts`, `weights` and `parameters`.
    """

    position: Tensor  # of the generator
    device: torch.device = CPU
    parts: Mapping[str, Part] = field(default_factory=dict)

    @classmethod
    def begin(cls, generator: torch.Generator | int | None) -> "Run":
        made = make_generator(generator)
        return cls(made.get_state(), made.device)

    def generator(self) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.set_state(self.position)
        return generator

    def having(self, drawn: torch.Generator | None = None, /, **parts: Part | None) -> "Run":
        """Replaces parts, None removes one, and the position by that of a generator that has drawn."""
        position = self.position if drawn is None else drawn.get_state()
        merged = {**self.parts, **parts}
        return replace(self, position=position, parts={name: part for name, part in merged.items() if part is not None})

    def for_system(self, operator: LinearOperator) -> "Run":
        """Without parts of another shape, device or dtype; but float32 parts become float64."""
        like = torch.empty(0, *operator.shape, dtype=operator.dtype, device=operator.device)
        known = self.parts.get("system", {}).get("like")
        if known is not None and (known.shape, known.device) == (like.shape, like.device):
            if known.dtype == like.dtype:
                return self
            if like.dtype == torch.float64:
                return self.mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        return replace(self, parts={"system": {"like": like}})

    def is_in_float64(self, operator: LinearOperator) -> bool:
        known = self.parts.get("system", {}).get("like")
        return known is not None and known.shape[1:] == operator.shape and known.dtype == torch.float64

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Run":
        parts = {name: {key: function(t) for key, t in part.items()} for name, part in self.parts.items()}
        return replace(self, parts=parts)

    def to_dict(self) -> dict[str, Tensor]:
        """For `torch.save` and `torch.load(weights_only=True)`."""
        state = {"generator": self.position.clone()}
        for name, part in self.parts.items():
            state |= {f"{name}.{key}": tensor.clone() for key, tensor in part.items()}
        return state

    def loaded(self, state: Mapping[str, Any]) -> "Run":
        """Inverts `to_dict`. Raises ValueError for a generator of another device."""
        position = state["generator"]
        if position.shape != self.position.shape:
            raise ValueError(f"This is the training state of another kind of generator. {TAKE_IT}")
        parts: dict[str, dict[str, Tensor]] = {}
        for entry, tensor in state.items():
            if entry != "generator":
                name, _, key = entry.partition(".")
                parts.setdefault(name, {})[key] = tensor.clone()
        return Run(position.cpu().clone(), self.device, parts)


#: Initial part for `next_rows`.
NO_ROWS = {"order": torch.empty(0, dtype=torch.int64, device=CPU), "position": torch.tensor(0, device=CPU)}


def next_rows(run: Run, name: str, num_data: int, batch_size: int) -> tuple[Tensor, Run]:
    """The next batch of shuffled rows, on the generator's device, and the next run. A shorter remainder is skipped."""
    order, position = run.parts[name]["order"], int(run.parts[name]["position"])
    if len(order) != num_data or position + batch_size > num_data:
        generator = run.generator()
        order, position = permutation(num_data, generator), 0
        run = run.having(generator)
    end = position + batch_size
    return order[position:end], run.having(**{name: {"order": order, "position": torch.tensor(end, device=CPU)}})


class Resumable(torch.nn.Module):
    """A marginal log likelihood whose training state is `_run`, and `_params` of the last step.

    A loaded state must match the options named in `_described`.
    """

    _described: ClassVar[tuple[str, ...]] = ()
    model: Any
    _run: Run
    _params: LikelihoodParams | None = None

    def _description(self) -> StateDescription:
        """What a state must match."""
        return StateDescription.of(self, {name: getattr(self, name) for name in self._described})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._move_run(fn)
        return self

    def _move_run(self, function: Callable[[Tensor], Tensor]) -> None:
        self._run = self._run.mapped(function)
        if self._params is not None:
            self._params.apply(function)

    def training_state(self) -> dict[str, Tensor]:
        """A dict of tensors that, with the `state_dict()`s of model and optimiser, resumes a run exactly.

        Raises ValueError for an argument of the likelihood that is no tensor, number or string.
        """
        params = None if self._params is None else {"bytes": self._params.to_bytes()}
        return self._description().added_to(self._run.having(params=params).to_dict())

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Restores `training_state()`, also from another device.

        Raises ValueError, before any change, for another method, other options, data or sizes.
        """
        run = self._run.loaded(self._description().taken_from(state))
        part = run.parts.get("params")
        params = None if part is None else LikelihoodParams.from_bytes(part["bytes"])
        self._run, self._params = run.having(params=None), params
        inputs = getattr(self.model, "train_inputs", None)
        if inputs:
            self._move_run(lambda tensor: tensor.to(inputs[0].device))

"""Everything that makes a run with frozen randomness resume exactly: a plain dict of tensors, in and out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gpy_iterative.checks import generator_or_seed
from gpy_iterative.linear_solvers.warm_start import WarmStart
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.state_description import check_tensors, checked_generator


def make_generator(generator: torch.Generator | int | None) -> torch.Generator:
    """A private generator: the one given, or one with the given seed.

    None takes the seed that `torch.manual_seed` last set, without drawing from the global generator. Raises as
    `gpy_iterative.checks.generator_or_seed`.
    """
    generator = generator_or_seed(generator)
    if isinstance(generator, torch.Generator):
        return generator
    return torch.Generator().manual_seed(torch.initial_seed() if generator is None else generator)


@dataclass
class TrainingState:
    """Generator, frozen draws and warm start of one marginal log likelihood.

    Frozen draws belong to a problem of one shape, dtype and device; for another they are drawn anew. `options` are those
    of the marginal log likelihood that shape the state: a state that is loaded has to have been saved with the same.
    """

    generator: torch.Generator
    warm_start: WarmStart
    options: Mapping[str, Any]
    frozen: dict[str, Draws] = field(default_factory=dict)
    shape: torch.Size | None = None
    like: Tensor | None = None  # empty, of the problem's dtype and device; draws may have another dtype

    @classmethod
    def begin(
        cls,
        generator: torch.Generator | int | None,
        options: Mapping[str, Any],
        warm_start: Literal["extrapolated", "previous", False] = False,
    ) -> "TrainingState":
        """Of a run that has made no step yet; `generator` as in `make_generator`, `warm_start` as in `WarmStart`."""
        return cls(make_generator(generator), WarmStart(warm_start), dict(options, warm_start=warm_start))

    def draws_for(
        self, name: str, like: Tensor, shape: torch.Size, draw: Callable[[], Draws], *, keep: bool = True
    ) -> Draws:
        """The frozen draws called `name`, or new ones where there are none for this problem (or `keep` is off)."""
        if shape != self.shape or self.like is None or (self.like.dtype, self.like.device) != (like.dtype, like.device):
            self.frozen.clear()
            self.shape, self.like = shape, like.new_empty(0)
        kept = self.frozen.get(name) if keep else None
        if kept is None:
            kept = self.frozen[name] = draw()
        return kept

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        """What else the next step of the same problem goes on from."""
        self.frozen[name] = tensors

    def kept_draws(self, name: str) -> Draws | None:
        """The draws of the last step."""
        return self.frozen.get(name)

    @contextmanager
    def unchanged_by_failure(self) -> Iterator[None]:
        """What raises inside leaves no trace: the next step draws what the failed one did."""
        before, position = dict(vars(self), frozen=dict(self.frozen)), self.generator.get_state()
        try:
            yield
        except BaseException:
            vars(self).update(before)
            self.generator.set_state(position)
            raise

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors, as `nn.Module._apply` does with parameters."""
        self.frozen = {name: {k: function(t) for k, t in draws.items()} for name, draws in self.frozen.items()}
        self.like = None if self.like is None else function(self.like)
        self.warm_start.apply(function)

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors only, so that `torch.save` and `torch.load(weights_only=True)` take it."""
        state = {"generator": self.generator.get_state()}
        if self.shape is not None and self.like is not None:
            state |= {"shape": torch.tensor(self.shape), "like": self.like.clone()}
        for name, draws in self.frozen.items():
            state |= {f"{name}.{key}": tensor.clone() for key, tensor in draws.items()}
        return state | {f"warm_start.{key}": tensor.clone() for key, tensor in self.warm_start.tensors().items()}

    def load_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `to_dict`. Raises ValueError, and changes nothing, when the dict is not one of its own."""
        check_tensors(state)
        position = checked_generator(state, self.generator)
        frozen: dict[str, Draws] = {}
        solutions: dict[str, Tensor] = {}
        for key, tensor in state.items():
            if key in ("generator", "shape", "like"):
                continue
            name, _, part = key.partition(".")
            if not part:
                raise ValueError(f"This is no training state: it has an unknown entry {key!r}.")
            (solutions if name == "warm_start" else frozen.setdefault(name, {}))[part] = tensor.clone()
        self.generator.set_state(position)
        self.shape = torch.Size(state["shape"].tolist()) if "shape" in state else None
        self.like = state["like"].clone() if "like" in state else None
        self.frozen = frozen
        self.warm_start.load_tensors(solutions)

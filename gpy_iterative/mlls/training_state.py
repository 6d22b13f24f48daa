"""Everything that makes a run with frozen randomness resume exactly: a plain dict of tensors, in and out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpy_iterative.solvers import WarmStart

Randomness = dict[str, Tensor]


def make_generator(generator: torch.Generator | int | None) -> torch.Generator:
    """A private generator: the one given, or one with the given seed.

    None takes the seed that `torch.manual_seed` last set, without drawing from the global generator.
    """
    if isinstance(generator, torch.Generator):
        return generator
    return torch.Generator().manual_seed(torch.initial_seed() if generator is None else generator)


@dataclass
class TrainingState:
    """Generator, frozen draws and warm start of one marginal log likelihood.

    Frozen draws belong to a problem of one shape, dtype and device; for another they are drawn anew.
    """

    generator: torch.Generator
    warm_start: WarmStart
    frozen: dict[str, Randomness] = field(default_factory=dict)
    shape: torch.Size | None = None

    def draws_for(
        self, name: str, like: Tensor, shape: torch.Size, draw: Callable[[], Randomness], *, keep: bool = True
    ) -> Randomness:
        """The frozen draws called `name`, or new ones where there are none for this problem (or `keep` is off)."""
        if shape != self.shape:
            self.frozen.clear()
            self.shape = shape
        kept = self.frozen.get(name) if keep else None
        floats = [tensor for tensor in (kept or {}).values() if tensor.is_floating_point()]
        if kept is None or any(t.dtype != like.dtype or t.device != like.device for t in floats):
            kept = self.frozen[name] = draw()
        return kept

    def kept_draws(self, name: str) -> Randomness | None:
        """The draws of the last step."""
        return self.frozen.get(name)

    @contextmanager
    def unchanged_by_failure(self) -> Iterator[None]:
        """What raises inside leaves no trace: the next step draws what the failed one did."""
        before, position = dict(vars(self), frozen=dict(self.frozen)), self.generator.get_state()
        try:
            yield
        except Exception:
            vars(self).update(before)
            self.generator.set_state(position)
            raise

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors, as `nn.Module._apply` does with parameters."""
        self.frozen = {name: {k: function(t) for k, t in draws.items()} for name, draws in self.frozen.items()}
        self.warm_start.apply(function)

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors only, so that `torch.save` and `torch.load(weights_only=True)` take it."""
        state = {"generator": self.generator.get_state()}
        if self.shape is not None:
            state["shape"] = torch.tensor(self.shape)
        for name, draws in self.frozen.items():
            state |= {f"{name}.{key}": tensor.clone() for key, tensor in draws.items()}
        return state | {f"warm_start.{key}": tensor.clone() for key, tensor in self.warm_start.tensors().items()}

    def load_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `to_dict`. Raises ValueError, and changes nothing, when the dict is not one of its own."""
        if "generator" not in state:
            raise ValueError("This is no training state: it has no entry 'generator'. Take it from training_state().")
        frozen: dict[str, Randomness] = {}
        solutions: dict[str, Tensor] = {}
        for key, tensor in state.items():
            if key in ("generator", "shape"):
                continue
            name, _, part = key.partition(".")
            if not part:
                raise ValueError(f"This is no training state: it has an unknown entry {key!r}.")
            (solutions if name == "warm_start" else frozen.setdefault(name, {}))[part] = tensor.clone()
        self.generator.set_state(state["generator"].cpu())
        self.shape = torch.Size(state["shape"].tolist()) if "shape" in state else None
        self.frozen = frozen
        self.warm_start.load_tensors(solutions)

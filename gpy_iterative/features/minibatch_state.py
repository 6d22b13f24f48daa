"""Where a mini-batch run is: generator, order of rows, number of steps, with which it resumes bit for bit."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.features.seen_data import SeenData
from gpy_iterative.training.row_sampler import RowSampler
from gpy_iterative.training.state_description import check_tensors, checked_generator

_PREFIX = "state."


@dataclass
class MinibatchState:
    """Everything about a run but the tensors of its method.

    Attributes:
        generator: of all draws.
        steps: training steps so far.
        started_for: number of data that the state was started with; 0 is not at all.
        data: the data of that start; no part of what is saved, so that a loaded state takes those of its next call.
        rows: of the steps' batches.
        other_rows: of the independent batches that minimax's ascent needs.
    """

    generator: torch.Generator
    steps: int = 0
    started_for: int = 0
    data: SeenData = field(default_factory=SeenData)
    rows: RowSampler = field(init=False)
    other_rows: RowSampler = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.other_rows = RowSampler(self.generator), RowSampler(self.generator)

    def memento(self) -> tuple[Any, ...]:
        """What `restore` takes."""
        rows = self.rows.memento(), self.other_rows.memento()
        return self.steps, self.started_for, self.data, self.generator.get_state(), *rows

    def restore(self, memento: tuple[Any, ...]) -> None:
        """Goes back to where `memento` was called."""
        self.steps, self.started_for, self.data, position, rows, other_rows = memento
        self.generator.set_state(position)
        self.rows.restore(rows)
        self.other_rows.restore(other_rows)

    def to_dict(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors only, so that `torch.save` and `torch.load(weights_only=True)` take it."""
        state = {
            "generator": self.generator.get_state(),
            "steps": torch.tensor(self.steps),
            "started_for": torch.tensor(self.started_for),
        }
        state |= {f"rows.{key}": tensor for key, tensor in self.rows.to_dict().items()}
        state |= {f"other_rows.{key}": tensor for key, tensor in self.other_rows.to_dict().items()}
        return state | {_PREFIX + name: tensor.detach().clone() for name, tensor in tensors.items()}

    def load_dict(self, state: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_dict`: takes the run over, and returns the method's tensors on the devices of now.

        Raises ValueError, and changes nothing, where entries are missing, unknown or of another shape.
        """
        check_tensors(state)
        position = checked_generator(state, self.generator)
        odd = state.keys() ^ self.to_dict(tensors).keys()
        if odd:
            raise ValueError(f"This is no whole training state: {', '.join(sorted(odd))} is missing or unknown.")
        for name, tensor in tensors.items():
            found = state[_PREFIX + name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise ValueError(
                    f"The training state's {name} is {tuple(found.shape)}, {found.dtype}; here it is "
                    f"{tuple(tensor.shape)}, {tensor.dtype}: it belongs to a kernel with other features."
                )
        self.generator.set_state(position)
        self.steps, self.started_for = int(state["steps"]), int(state["started_for"])
        self.data = SeenData()
        for prefix, sampler in (("rows.", self.rows), ("other_rows.", self.other_rows)):
            sampler.load_dict({key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)})
        return {name: state[_PREFIX + name].to(tensor.device, copy=True) for name, tensor in tensors.items()}

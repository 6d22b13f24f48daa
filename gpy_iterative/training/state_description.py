"""Description of a run, compared before its state is loaded."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpy_iterative.worker_threads import CPU

#: Raise it when older states become unreadable.
FORMAT = 7
_NAME = "description"
TAKE_IT = "Pass what training_state() returned."
_WITHOUT = "Training can go on without it: model and optimiser have their own state."
_DATA = "fingerprint of the training data"
_LAYOUT = "dtypes and shapes"
#: Tolerance of fingerprints, as standardising elsewhere changes last digits. One entry of n may move by about this times
#: sqrt(n) standard deviations.
_SAME_DATA = 1e-5


@dataclass(frozen=True)
class StateDescription:
    entries: dict[str, Any]

    @classmethod
    def of(cls, mll: torch.nn.Module, options: Mapping[str, Any]) -> "StateDescription":
        """`options`: those that shape the state."""
        model: Any = mll.model
        inputs = tuple(getattr(model, "train_inputs", None) or ())
        targets = getattr(model, "train_targets", None)
        floating = [t.dtype for t in (*inputs, *model.parameters()) if t.is_floating_point()]
        return cls(
            {
                "format": FORMAT,
                "method": type(mll).__name__,
                **{name: _plain(value) for name, value in options.items()},
                # No widths: BoTorch's transforms may change them.
                "number of training inputs": [x.shape[-2] for x in inputs],
                "shape of the targets": None if targets is None else list(targets.shape),
                "dtype": str(floating[0]) if floating else None,
                _DATA: _fingerprints(model, inputs, targets),
            }
        )

    def added_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """Adds the description as bytes, for `weights_only=True`."""
        text = json.dumps(self.entries | {_LAYOUT: _layout(state)})
        return {_NAME: torch.tensor(list(text.encode()), dtype=torch.uint8, device=CPU)} | state

    def taken_from(self, state: Any) -> dict[str, Any]:
        """Removes the description. Raises ValueError for another run's state, or one that was changed."""
        if not isinstance(state, Mapping):
            raise ValueError(f"A training state is a dict, got {type(state).__name__}. {TAKE_IT}")
        found = _read(state)
        if found.get("format") != FORMAT:
            raise ValueError(
                f"The training state has format {found.get('format')!r}, and this version of gpy_iterative reads "
                f"{FORMAT}. {_WITHOUT}"
            )
        layout, state = found.pop(_LAYOUT, None), {name: value for name, value in state.items() if name != _NAME}
        names = [name for name in self.entries | found if found.get(name) != self.entries.get(name)]
        if "method" in names:  # options differ anyway
            names = ["method"]
        elif _DATA in names and (len(names) > 1 or _are_close(found.get(_DATA), self.entries.get(_DATA))):
            names.remove(_DATA)
        if names:
            differences = (
                "the training data are others"
                if name == _DATA
                else f"{name} is {found.get(name)!r} in it and {self.entries.get(name)!r} here"
                for name in names
            )
            raise ValueError(
                f"This is the training state of another run: {'; '.join(differences)}. Use the data and options of that "
                "run, or train on without the state: model and optimiser have their own."
            )
        if layout != _layout(state):
            raise ValueError(f"This is no training state: entries were added, removed or changed. {TAKE_IT}")
        return state


def _layout(state: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each entry, or its type if it is no tensor."""
    return {
        name: f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in state.items()
    }


def _read(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(bytes(state[_NAME].tolist())))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # no tensor, bytes or JSON
        raise ValueError(
            f"This is no training state: its description is missing or cannot be read. {TAKE_IT} {_WITHOUT}"
        ) from error


def _fingerprints(model: Any, inputs: tuple[Tensor, ...], targets: Tensor | None) -> list[list[float] | None]:
    """Of inputs before BoTorch's transforms, and targets."""
    original = None if model.training else getattr(model, "_original_train_inputs", None)
    if original is not None:
        inputs = (original,) if isinstance(original, Tensor) else tuple(original)
    columns = [x.flatten(0, -2) for x in inputs]
    return [_fingerprint(data) for data in (columns if targets is None else [*columns, targets.reshape(-1, 1)])]


@torch.no_grad()
def _fingerprint(columns: Tensor) -> list[float] | None:
    """Numbers that change with the data [n, d], but little with rounding; None if learned."""
    if columns.requires_grad or not columns.numel():
        return None
    values = columns.double().nan_to_num(0.0, 0.0, 0.0)
    mean, deviation = values.mean(0), values.std(0, correction=0)
    scale = torch.where(deviation > 1e-6 * mean.abs(), deviation, 1.0)
    weights, numbers = (
        torch.arange(1, size + 1, dtype=values.dtype, device=values.device) for size in (len(mean), len(values))
    )
    weights = 1.5 + weights.cos()  # every column counts
    # A missing value is no zero.
    rows = torch.where(columns.isfinite(), (values - mean) / scale, 1.0) @ weights
    # Squares, as cosines of the numbers would nearly repeat after 710 rows.
    projections = [rows @ (frequency * numbers.square()).cos() / math.sqrt(len(rows)) for frequency in (1, 2, 3)]
    moments = [(mean / scale * weights).mean(), (scale.log() * weights).mean()]
    return [round(float(number), 6) for number in (*moments, *projections)]


def _are_close(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return all(map(_are_close, left, right))
    is_number = isinstance(left, float) and isinstance(right, float)
    return abs(left - right) <= _SAME_DATA if is_number else left == right


def _plain(value: Any) -> Any:
    """For JSON, equal in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{field.name}={_plain(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    return getattr(value, "__qualname__", type(value).__qualname__)

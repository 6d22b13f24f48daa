"""Checkpoint files of a fit."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from gpy_iterative.fitting.result import HistoryRow

#: Raise it when older files become unreadable.
FORMAT = 2
#: Buffers that training does not change.
_FIXED = ("active_dims", "lower_bound", "upper_bound")


@dataclass(frozen=True)
class Checkpoint:
    """State from which a fit resumes.

    Attributes:
        parameters: the mll's `state_dict()`.
        state: of the steps.
        history: rows so far.
    """

    parameters: dict[str, Tensor]
    state: dict[str, Any]
    history: list[HistoryRow]


def write_checkpoint(
    path: Path,
    mll: gpytorch.mlls.MarginalLogLikelihood,
    method: str,
    state: Mapping[str, Any],
    history: list[HistoryRow],
) -> None:
    """Writes the checkpoint atomically: a temporary file in the same folder, then a rename."""
    content = {
        "format": FORMAT,
        "method": method,
        "parts": described_parts(mll),
        "parameters": {name: tensor.detach().clone() for name, tensor in mll.state_dict().items()},
        "state": dict(state),
        "history": [astuple(row) for row in history],
    }
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path, mll: gpytorch.mlls.MarginalLogLikelihood, method: str) -> Checkpoint:
    """Reads and checks a checkpoint, without loading it into the mll.

    Raises ValueError for a file that is no checkpoint, or for another method or model.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError
        found = Checkpoint(content["parameters"], content["state"], [HistoryRow(*row) for row in content["history"]])
    except Exception as error:  # whatever torch.load raises on a foreign file
        raise ValueError(
            f"{path} is no checkpoint of gpi.fit in this version: remove it, or give another checkpoint=."
        ) from error
    if content["method"] != method:
        raise ValueError(
            f"{path} is the checkpoint of a fit by method={content['method']!r}, and this fit is by {method!r}: give "
            "another checkpoint=, or the same method=."
        )
    shapes = lambda tensors: {name: str(tuple(tensor.shape)) for name, tensor in tensors.items()}
    _check_same(path, content["parts"], described_parts(mll))
    _check_same(path, shapes(found.parameters), shapes(mll.state_dict()))
    return found


def described_parts(mll: gpytorch.mlls.MarginalLogLikelihood) -> dict[str, str]:
    """Class and options of each module by name, without trained values.

    Options are numbers and strings among the attributes of GPyTorch's own classes, and active dims and constraint bounds of
    any module. Attributes of user modules may change, such as call counters.
    """
    return {name: _described(module) for name, module in mll.named_modules()}


def _described(module: torch.nn.Module) -> str:
    kind, own = type(module), {}
    if kind.__module__.startswith("gpytorch."):
        own = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    fixed = {name: buffer.tolist() for name, buffer in module.named_buffers(recurse=False) if name in _FIXED}
    options = sorted((own | fixed).items())
    shown = (f"{name}={value}" for name, value in options if name != "training" and not name.startswith("_"))
    return f"{kind.__name__}({', '.join(shown)})"


def _check_same(path: Path, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises ValueError with the first difference."""
    for name in {**own, **saved}:
        if saved.get(name) != own.get(name):
            raise ValueError(
                f"{path} is the checkpoint of another model: {name or 'the marginal log likelihood'} is "
                f"{saved.get(name, 'missing')} in it and {own.get(name, 'missing')} here. Give another checkpoint=, or "
                "fit that model."
            )

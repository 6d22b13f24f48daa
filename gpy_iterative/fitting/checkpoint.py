"""The file that a fit goes on from: written in one piece, so that it is whole whenever the process ends."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import gpytorch
import torch

from gpy_iterative.fitting.result import HistoryRow

#: Raised whenever older files cannot be read any more.
FORMAT = 1


def write_checkpoint(
    path: Path,
    mll: gpytorch.mlls.MarginalLogLikelihood,
    method: str,
    state: Mapping[str, Any],
    history: list[HistoryRow],
) -> None:
    """Writes parameters, the state of the steps and the history, to a file beside and then by renaming it."""
    content = {
        "format": FORMAT,
        "method": method,
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


def read_checkpoint(
    path: Path, mll: gpytorch.mlls.MarginalLogLikelihood, method: str
) -> tuple[dict[str, Any], list[HistoryRow]]:
    """Loads the parameters into the mll; returns the state of the steps and the history.

    Raises ValueError, and changes nothing, for a file that is no checkpoint, or one of another method or model.
    """
    try:
        content = torch.load(path, weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError
        parameters, history = content["parameters"], [HistoryRow(*row) for row in content["history"]]
    except Exception as error:  # whatever torch.load makes of a foreign file
        raise ValueError(
            f"{path} is no checkpoint of gpi.fit in this version: remove the file, or give another checkpoint=."
        ) from error
    if content["method"] != method:
        raise ValueError(
            f"{path} is the checkpoint of a fit by method={content['method']!r}, and this one is by {method!r}: give "
            "another checkpoint=, or the same method=."
        )
    own = mll.state_dict()
    differing = [
        name
        for name in own | parameters
        if name not in own or name not in parameters or own[name].shape != parameters[name].shape
    ]
    if differing:
        raise ValueError(
            f"{path} is the checkpoint of another model: {differing[0]} differs. Give another checkpoint=, or that model."
        )
    mll.load_state_dict(parameters)
    return content["state"], history

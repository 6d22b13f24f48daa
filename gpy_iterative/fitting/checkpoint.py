import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gpytorch
import torch
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from torch import Tensor

from gpy_iterative.errors import CheckpointError
from gpy_iterative.fitting.coordinates import free_parameters
from gpy_iterative.fitting.result import HistoryRow
from gpy_iterative.training.likelihood_params import LikelihoodParams

#: Raise it when older files become unreadable.
FORMAT = 12
#: Buffers that training does not change.
_FIXED = ("active_dims", "lower_bound", "upper_bound")


@dataclass(frozen=True)
class Checkpoint:
    parameters: dict[str, Tensor]  # the mll's `state_dict()`
    state: dict[str, Any]  # of the steps
    history: list[HistoryRow]


def write_checkpoint(
    path: Path,
    mll: gpytorch.mlls.MarginalLogLikelihood,
    method: str,
    state: Mapping[str, Any],
    history: list[HistoryRow],
    params: Sequence[Any] = (),
) -> None:
    content = {
        "format": FORMAT,
        "method": method,
        "parts": described_parts(mll),
        "params": None if (given := LikelihoodParams.given(params, mll.model)) is None else given.to_bytes(),
        "fixed_noise": fixed_noise(mll),
        "parameters": {name: tensor.detach().clone() for name, tensor in mll.state_dict().items()},
        "state": dict(state),
        "history": [astuple(row) for row in history],
    }
    save_whole(content, path)


def save_whole(content: object, path: Path) -> None:
    """`torch.save` by way of a temporary file: `path` is always complete."""
    name, file = _temporary_file(path)
    try:
        with file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        name.replace(path)
    except BaseException as error:
        name.unlink(missing_ok=True)
        # After a failed write PyTorch's RuntimeError hides Ctrl-C or a full disk.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, KeyboardInterrupt | OSError):
            raise error.__context__ from None
        raise


def check_can_save(path: Path) -> None:
    """Raises OSError where `save_whole` would."""
    name, file = _temporary_file(path)
    file.close()
    name.unlink()


def _temporary_file(path: Path) -> tuple[Path, BinaryIO]:
    """An open file beside `path`, with a new file's permissions. Errors name `path`."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        return name, name.open("xb")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_checkpoint(
    path: Path, mll: gpytorch.mlls.MarginalLogLikelihood, method: str, params: Sequence[Any] = ()
) -> Checkpoint:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError
        found = Checkpoint(content["parameters"], content["state"], [HistoryRow(*row) for row in content["history"]])
        saved = None if content["params"] is None else LikelihoodParams.from_bytes(content["params"])
    except Exception as error:  # whatever torch.load raises
        raise CheckpointError(
            f"{path} is no checkpoint of gpi.fit in this version: remove it, or give another checkpoint=."
        ) from error
    if content["method"] != method:
        raise CheckpointError(
            f"{path} is the checkpoint of a fit by method={content['method']!r}, and this fit is by {method!r}: give "
            "another checkpoint=, or the same method=."
        )
    shapes = lambda tensors: {name: str(tuple(tensor.shape)) for name, tensor in tensors.items()}
    _check_same(path, content["parts"], described_parts(mll))
    _check_same(path, shapes(found.parameters), shapes(mll.state_dict()))
    _check_arguments(path, mll, saved, LikelihoodParams.given(params, mll.model))
    _check_untrained(path, content["fixed_noise"], fixed_noise(mll))
    frozen = {name: part.detach() for name, part in mll.named_parameters() if not part.requires_grad}
    _check_untrained(path, found.parameters, frozen)
    return found


def described_parts(mll: gpytorch.mlls.MarginalLogLikelihood) -> dict[str, str]:
    """Class and options of each module, and the names of trained parameters.

    Numbers and strings are options only in GPyTorch's own classes: attributes of user modules may change.
    """
    trained = ", ".join(name for name, *_ in free_parameters(mll))
    return {name: _described(module) for name, module in mll.named_modules()} | {"trained parameters": trained}


def fixed_noise(mll: gpytorch.mlls.MarginalLogLikelihood) -> dict[str, Tensor]:
    return {name: part.noise for name, part in mll.named_modules() if isinstance(part, FixedGaussianNoise)}


def _described(module: torch.nn.Module) -> str:
    kind, own = type(module), {}
    if kind.__module__.startswith("gpytorch."):
        own = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str)}
    fixed = {name: buffer.tolist() for name, buffer in module.named_buffers(recurse=False) if name in _FIXED}
    if isinstance(module, gpytorch.priors.Prior):
        values = {name: getattr(module, name, None) for name in module.arg_constraints}
        fixed |= {name: value.tolist() for name, value in values.items() if isinstance(value, Tensor)}
    options = sorted((own | fixed).items())
    shown = (f"{name}={value}" for name, value in options if name != "training" and not name.startswith("_"))
    return f"{kind.__name__}({', '.join(shown)})"


def _check_same(path: Path, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    for name in {**own, **saved}:
        if saved.get(name) != own.get(name):
            raise CheckpointError(
                f"{path} is the checkpoint of another model: {name or 'the marginal log likelihood'} is "
                f"{saved.get(name, 'missing')} in it and {own.get(name, 'missing')} here. Give another checkpoint=, or "
                "fit that model."
            )


def _check_arguments(path: Path, mll: Any, saved: LikelihoodParams | None, given: LikelihoodParams | None) -> None:
    inputs = getattr(mll.model, "train_inputs", None)
    if saved is not None and inputs:
        saved.apply(lambda tensor: tensor.to(inputs[0].device))
    if not (saved is given if saved is None else saved.equals(given)):
        raise CheckpointError(
            f"{path} is the checkpoint of a fit with other params=, the likelihood's own arguments: pass those, or give "
            "another checkpoint=."
        )


def _check_untrained(path: Path, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name, value in own.items():
        known = saved[name].to(value)
        if known.shape != value.shape or not torch.allclose(known, value, equal_nan=True):
            raise CheckpointError(
                f"{path} is the checkpoint of a fit with other values of {name}, which is not trained: give another "
                "checkpoint=, or those values."
            )

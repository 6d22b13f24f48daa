"""Checks of options and data."""

import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_count(name: str, value: Any, *, least: int = 1, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def check_instance(name: str, value: Any, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be None or a {kind.__name__} such as {example}, got {value!r}.")


def check_params(params: Any) -> None:
    """A tensor would be taken apart into its rows."""
    if not isinstance(params, tuple | list):
        raise TypeError(
            f"params must be a tuple of the likelihood's arguments, got {type(params).__name__}: add a comma."
        )


def checked_seed(value: Any, rule: str = "seed must be a whole number") -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{rule}, got {value!r}.")
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"A seed must fit in 64 bits, got {value}.")
    return int(value)


def generator_or_seed(value: Any) -> torch.Generator | int | None:
    if value is None or isinstance(value, torch.Generator):
        return value
    return checked_seed(value, "generator must be None, a torch.Generator or a seed (a whole number)")


def check_finite(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}: use {name}.to_dense().")
    finite = torch.isfinite(tensor)
    if not finite.all():
        index = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(
            f"{name} must be finite, but {name}{list(index)} is {tensor[index].item()}. Remove or replace such values."
        )


def has_finite_sum(matrix: Tensor) -> bool:
    """Whether a large float64 matrix is finite. A look at each entry takes up to a third of the time of its factor."""
    return bool(torch.isfinite(matrix.sum()))


def check_same_kind(
    name: str, tensor: Tensor, other_name: str, other: Tensor, advice: str = "Convert one of them with .to(...)."
) -> None:
    if (tensor.dtype, tensor.device) != (other.dtype, other.device):
        raise ValueError(
            f"{name} has dtype {tensor.dtype} on {tensor.device}, {other_name} dtype {other.dtype} on {other.device}. "
            + advice
        )


def check_autocast() -> None:
    """Raises RuntimeError under `torch.autocast`."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RuntimeError(
            "Gaussian processes need the products of their own dtype, and torch.autocast is on: keep only your network "
            "under it, in the model's forward, and give the kernel the network's output with .float()."
        )


def check_number(name: str, value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    if not holds(value):
        raise ValueError(f"{name} must {rule}, got {value}.")


def check_positive(name: str, value: float) -> None:
    check_number(name, value, "be positive and finite", lambda number: 0 < number < math.inf)


def check_fraction(name: str, value: float, *, ends: bool = False) -> None:
    check_number(name, value, "lie between 0 and 1", lambda number: 0 <= number <= 1 if ends else 0 < number < 1)


def check_rate(name: str, value: float) -> None:
    check_number(name, value, "be positive and at most 1", lambda number: 0 < number <= 1)

"""The likelihood's extra arguments."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.changes import same_tensor, same_value
from gpy_iterative.checks import check_params
from gpy_iterative.linear_operators.from_gpytorch import NOISE_OF_INPUTS
from gpy_iterative.training.snapshot import evaluation_copies
from gpy_iterative.training.training_system import unexpanded


def likelihood_arguments(mll: Any, params: Sequence[Any] = ()) -> tuple[Any, ...]:
    """`params`; without them the training inputs, if the noise depends on them."""
    is_needed = isinstance(getattr(mll.likelihood, "noise_covar", None), NOISE_OF_INPUTS)
    if is_needed and not params and getattr(mll.model, "train_inputs", None):
        return tuple(mll.model.train_inputs)
    return tuple(params)


class LikelihoodParams:
    """The likelihood's extra arguments, copied without graph.

    Training inputs among them follow `set_train_data`. Empty `params` mean all training inputs, as in GPyTorch.
    """

    @torch.inference_mode(False)
    def __init__(self, params: Sequence[Any], model: ExactGP, kwargs: Mapping[str, Any] | None = None) -> None:
        check_params(params)
        known = unexpanded(model.train_inputs or ())
        self._forms = [[tensor.detach().clone() for tensor in form] for form in _forms(model, known)]
        self._params = _map_leaves(self._placed, tuple(params) or (list(known),))
        self._kwargs = _map_leaves(self._placed, dict(kwargs or {}))

    @classmethod
    def given(
        cls, params: Sequence[Any], model: ExactGP, kwargs: Mapping[str, Any] | None = None
    ) -> "LikelihoodParams | None":
        """A copy; None without arguments."""
        check_params(params)
        return cls(params, model, kwargs) if params or kwargs else None

    def current(self, model: ExactGP) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`params` and `kwargs` for the current training inputs.

        Raises ValueError if these changed and another tensor is an argument.
        """
        now = unexpanded(model.train_inputs or ())
        is_known = any(len(now) == len(form) and all(map(_same_inputs, now, form)) for form in self._forms)
        return _map_leaves(partial(_current_leaf, now, is_known), (self._params, self._kwargs))

    def moved_to(self, model: ExactGP) -> "LikelihoodParams":
        """For another model; see `current`."""
        params, kwargs = self.current(model)
        return LikelihoodParams(params, model, kwargs)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        move = lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf
        self._forms, self._params, self._kwargs = _map_leaves(move, [self._forms, self._params, self._kwargs])

    def equals(self, other: "LikelihoodParams | None") -> bool:
        """Compares by value."""
        return other is not None and same_value(vars(self), vars(other))

    def to_bytes(self) -> Tensor:
        """Raises ValueError for unsupported arguments."""

        def check(leaf: Any) -> None:
            if not isinstance(leaf, Tensor | _TrainingInput | bool | int | float | str | None):
                raise ValueError(
                    f"A training state holds arguments of the likelihood that are tensors, numbers or strings, no "
                    f"{type(leaf).__name__}: pass a tensor, or make it an attribute of the likelihood."
                )

        _map_leaves(check, [self._params, self._kwargs])
        file = io.BytesIO()
        torch.save(vars(self), file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, data: Tensor) -> "LikelihoodParams":
        """Inverts `to_bytes`."""
        params = cls.__new__(cls)
        with torch.serialization.safe_globals([_TrainingInput]):
            file = io.BytesIO(data.cpu().numpy().tobytes())
            vars(params).update(torch.load(file, map_location="cpu", weights_only=True))
        return params

    def _placed(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for form in self._forms:
            for index, known in enumerate(form):
                if _same_inputs(leaf, known):
                    return _TrainingInput(index)
        return leaf.detach().clone()


def _current_leaf(now: list[Tensor], is_known: bool, leaf: Any) -> Any:
    if isinstance(leaf, _TrainingInput):
        return now[leaf.index]
    if isinstance(leaf, Tensor) and not is_known:
        raise ValueError(
            "The training inputs have changed, and the likelihood has an argument that is none of them: its new value "
            "is unknown. Call the marginal log likelihood with it, or make a new posterior, with params=... for the new "
            "data."
        )
    return leaf


@dataclass(frozen=True)
class _TrainingInput:
    index: int


def _same_inputs(left: Tensor, right: Tensor) -> bool:
    """Equality; after BoTorch's transforms one may hold a copy per output."""
    wide, narrow = (left, right) if left.dim() > right.dim() else (right, left)
    if narrow.dim() < 2 or wide.shape[-narrow.dim() :] != narrow.shape:
        return False
    return same_tensor(wide, narrow.expand_as(wide))


@torch.no_grad()
def _forms(model: ExactGP, inputs: list[Tensor]) -> list[list[Tensor]]:
    """The training inputs in both of a BoTorch model's modes."""
    transform = getattr(model, "transform_inputs", None)
    if transform is None or getattr(model, "input_transform", None) is None:
        return [inputs]
    if model.training:
        model, _ = evaluation_copies(model, model.likelihood)
        return [inputs, [model.transform_inputs(tensor) for tensor in inputs]]
    original = getattr(model, "_original_train_inputs", None)
    if original is None:
        return [inputs]
    return [inputs, unexpanded([original] if isinstance(original, Tensor) else original)]


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map_leaves(function, item) for item in value)
    if isinstance(value, dict):
        return {name: _map_leaves(function, item) for name, item in value.items()}
    return function(value)

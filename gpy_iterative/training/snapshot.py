"""Copies of a model for a posterior, compared by value because GPyTorch writes parameters through `.data`."""

import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import gpytorch
import torch
from gpytorch.kernels import GridInterpolationKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from torch import Tensor
from torch.nn import Parameter

from gpy_iterative.changes import same_tensor, same_value
from gpy_iterative.linear_operators.kernel_functions import clear_caches
from gpy_iterative.linear_operators.module_copies import ModuleCopies
from gpy_iterative.training.training_system import unexpanded


class OwnLock:
    """A re-entrant lock; copies and pickles are new locks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnLock, ()


Model = TypeVar("Model", bound=GP)

_RESULTS = ("prediction_strategy", "_posterior")
#: Attributes that are not compared here.
_NO_NUMBERS = {"training", "train_inputs", "train_targets", "grid_bounds", "num_refinements", "solver", "products"}
_NO_NUMBERS |= {"seed", "likelihood_params", *_RESULTS}
#: Not shared by copies.
_OWN = ("_parameters", "_buffers")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Tensor)
#: Part of a spacing by which rounding may move a grid.
SAME_GRID = 1e-3
#: A value that is not compared.
_UNKNOWN = object()


@dataclass(frozen=True)
class ModelSnapshot:
    """Copies of model and likelihood in evaluation mode, with their own numbers, evaluated once."""

    model: Any
    likelihood: Any
    tensors: dict[str, Tensor]  # parameters, buffers, training data
    attributes: dict[str, Any]  # public ones of modules with plain values
    nan_policy: str  # GPyTorch's

    @classmethod
    def of(cls, model: GP, likelihood: Likelihood) -> "ModelSnapshot":
        model, likelihood = evaluation_copies(model, likelihood, ModuleCopies(own=_OWN, apart=True, tensor=_copied))
        policy = gpytorch.settings.observation_nan_policy.value()
        return cls(model, likelihood, dict(_tensors(model, likelihood)), dict(_attributes(model, likelihood)), policy)

    def model_copy(self) -> Any:
        """A copy of the model for one evaluation, thread-safe."""
        model = ModuleCopies(own=_OWN, apart=True).of(self.model)
        for kernel in _moving_grids(model).values():
            kernel.grid_is_dynamic = False  # keeps the training inputs' grid, as the solves did
        return model

    def check_grids(self, model: GP) -> None:
        """Raises ValueError for a moved grid."""
        known = _moving_grids(self.model)
        for name, kernel in _moving_grids(model).items():
            if any(
                (now - then).abs().max() > SAME_GRID * (then[1] - then[0])
                for now, then in zip(kernel.grid, known[name].grid, strict=True)
            ):
                raise ValueError(
                    f"{name} has no grid_bounds, and model(x) moves its grid to inputs outside of the training inputs' "
                    "range: what was solved for belongs to another grid. Give it grid_bounds= that hold all inputs, or "
                    "predict by posterior(x), which keeps the grid."
                )

    def describes(self, model: GP, likelihood: Likelihood) -> bool:
        """Whether all numbers, dtypes and devices are unchanged."""
        if self.nan_policy != gpytorch.settings.observation_nan_policy.value():
            return False
        is_training = model.training or likelihood.training
        current = evaluation_copies(model, likelihood) if is_training else (model, likelihood)
        tensors, attributes = dict(_tensors(*current)), dict(_attributes(*current))
        # Attributes that the copy's evaluation changed are results.
        after = dict(_attributes(self.model, self.likelihood))
        return (
            tensors.keys() == self.tensors.keys()
            and all(same_tensor(tensor, self.tensors[name]) for name, tensor in tensors.items())
            and all(
                same_value(attributes.get(name, _UNKNOWN), value)
                for name, value in self.attributes.items()
                if same_value(after.get(name, _UNKNOWN), value, operator.is_)
            )
        )

    def hand_back(self, model: GP, likelihood: Likelihood) -> None:
        """Gives the originals what a kernel drew on its first call (RFFKernel)."""
        drawn = {name: tensor for name, tensor in _tensors(self.model, self.likelihood) if name not in self.tensors}
        for owner, original in (("model", model), ("likelihood", likelihood)):
            for path, module in original.named_modules(prefix=owner):
                for name, tensor in drawn.items():
                    if name.rpartition(".")[0] == path:
                        module.register_buffer(name.rpartition(".")[2], _copied(tensor))
        self.tensors.update(drawn)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelSnapshot":
        return self  # immutable


def evaluation_copies(
    model: Model, likelihood: Likelihood, copies: ModuleCopies | None = None
) -> tuple[Model, Likelihood]:
    """Copies in evaluation mode, without GPyTorch's caches; without `copies` they share tensors.

    In a model in evaluation mode, layers in training mode stay so. Kernels do not: GPyTorch's copies of an
    InducingPointKernel are in training mode.
    """
    copies = ModuleCopies(own=_OWN, apart=True) if copies is None else copies
    model, likelihood = copies.of(model), copies.of(likelihood)
    for root in (model, likelihood):
        clear_caches(root)
        vars(root).update({name: None for name in _RESULTS if name in vars(root)})
        if root.training:
            root.eval()
        for kernel in filter(lambda module: isinstance(module, Kernel), root.modules()):
            kernel.training = False
    return model, likelihood


def _copied(tensor: Tensor) -> Tensor:
    """A copy without graph; expanded views stay views."""
    held = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    held = held.clone().expand(tensor.shape)
    return Parameter(held, requires_grad=False) if isinstance(tensor, Parameter) else held


def _moving_grids(model: GP) -> dict[str, GridInterpolationKernel]:
    """Kernels without `grid_bounds`, whose grids follow each call's inputs."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GridInterpolationKernel) and module.grid_is_dynamic
    }


def _tensors(model: Any, likelihood: Any) -> Iterator[tuple[str, Tensor]]:
    grids = {id(grid) for kernel in _moving_grids(model).values() for grid in kernel.grid}  # a result
    for owner_name, owner in (("model", model), ("likelihood", likelihood)):
        # ScaleKernel shares `active_dims` with its base kernel, the copies do not.
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers(remove_duplicate=False)):
            if id(tensor) not in grids:
                yield f"{owner_name}.{name}", tensor
    for index, inputs in enumerate(unexpanded(model.train_inputs or ())):
        yield f"train_inputs.{index}", inputs
    if model.train_targets is not None:
        yield "train_targets", model.train_targets


def _attributes(model: Any, likelihood: Any) -> Iterator[tuple[str, Any]]:
    for owner_name, owner in (("model", model), ("likelihood", likelihood)):
        for module_name, module in owner.named_modules():
            for name, value in vars(module).items():
                if name[0] != "_" and name not in _NO_NUMBERS:
                    plain = _plain(value)
                    if plain is not _UNKNOWN:
                        yield f"{owner_name}.{module_name}.{name}", plain


def _plain(value: Any) -> Any:
    """Copies lists and dicts; `_UNKNOWN` if a part is not compared."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        parts = _plain(list(value.values()))
        return _UNKNOWN if parts is _UNKNOWN else dict(zip(value, parts, strict=True))
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else parts
    return _UNKNOWN

"""A device that is not there: tensors on it are computed on the CPU, under the rules of an accelerator.

Inside of `SimulatedDevice` tensors may be made on, or moved to, `DEVICE`. As on CUDA, an operation that mixes them with
tensors of the CPU raises (scalars excepted), and everything that makes the host wait for the device is counted. So one can
test without an accelerator that code would run on one, with the same results, and how often it would stand still.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

#: Autograd runs nodes of this type on the calling thread, without a driver.
DEVICE = torch.device("lazy", 0)

aten = torch.ops.aten
#: What reads from the device to tell the host a number, a decision or a shape.
_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
_COPIES = {aten._to_copy.default, aten.copy_.default}


class _OnDevice(Tensor):
    """A CPU tensor that says it lies on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "_OnDevice":
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        self.held = held
        return self

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)


class _Constructors(TorchFunctionMode):
    """What makes tensors of numbers does so behind the dispatcher's back, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or wanted is None or torch.device(wanted).type != DEVICE.type:
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)


class SimulatedDevice(TorchDispatchMode):
    """The context in which the device is there.

    Attributes:
        reads: how often the host waited, by the operation that it waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self._constructors = _Constructors()

    def __enter__(self) -> "SimulatedDevice":
        self._constructors.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._constructors.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.reads)

    @property
    def count(self) -> int:
        """How often the host waited."""
        return sum(self.reads.values())


def _without_lists(index: Any) -> Any:
    """Torch would make tensors of them behind the dispatcher's back."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index, dtype=torch.long) if isinstance(index, list) else index


def _run(func: Any, args: Any, kwargs: dict[str, Any], reads: Counter[str] | None) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = any(isinstance(tensor, _OnDevice) for tensor in tensors)
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted)
    to_host = func in _COPIES and (
        wanted is not None and wanted.type == "cpu"
        if func is aten._to_copy.default
        else not isinstance(args[0], _OnDevice)
    )
    if ours and func not in _COPIES:
        _check_same_device(func, args, tensors)
    if ours and reads is not None and (func in _READS or to_host or _picks_by_mask(func, args)):
        reads[str(func)] += 1
    if wanted is not None and wanted.type == DEVICE.type:
        kwargs = kwargs | {"device": torch.device("cpu")}
        ours = True
    elif to_host or (wanted is not None and wanted.type == "cpu"):
        ours = False
    inner = lambda leaf: leaf.held if isinstance(leaf, _OnDevice) else leaf
    found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
    if func is aten.copy_.default:
        return args[0]
    if not ours:
        return found
    if wanted is not None and func is aten._to_copy.default and found is args[0]:
        found = found.clone()
    wrapped = tree_map(lambda leaf: _OnDevice(leaf) if isinstance(leaf, Tensor) else leaf, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _check_same_device(func: Any, args: Any, tensors: list[Tensor]) -> None:
    # Numbers may come from the host, and so may the indices of an indexing operation: both are copied over.
    indices = set(map(id, tree_leaves(args[1]))) if func in _INDEXING else set()
    for tensor in tensors:
        if id(tensor) in indices:
            continue
        if not isinstance(tensor, _OnDevice) and tensor.dim() > 0:
            raise RuntimeError(
                f"{func}: expected all tensors on {DEVICE}, found one of {tuple(tensor.shape)} on the CPU."
            )


def _picks_by_mask(func: Any, args: Any) -> bool:
    if func not in _INDEXING:
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])

"""Detection of changed tensors.

Versions do not count writes through `.data`, such as GPyTorch's `initialize`: compare hyperparameters by value.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def identities(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Versions and addresses, for a state that holds only numbers; writes to inference tensors are not detected."""
    return [(0 if tensor.is_inference() else tensor._version, tensor.data_ptr()) for tensor in tensors]


@dataclass(frozen=True)
class SeenVersions:
    """Tensors recognised by identity and version; inference tensors, which have no version, by identity and value."""

    references: tuple[weakref.ref[Tensor], ...] = ()
    seen: tuple[int | Tensor, ...] = ()  # version, or copy

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "SeenVersions":
        seen = tuple(tensor.clone() if tensor.is_inference() else tensor._version for tensor in tensors)
        return cls(tuple(map(weakref.ref, tensors)), seen)

    def are(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self.seen) and all(
            reference() is tensor
            and (same_tensor(seen, tensor) if isinstance(seen, Tensor) else seen == tensor._version)
            for reference, seen, tensor in zip(self.references, self.seen, tensors, strict=True)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SeenVersions, ()  # versions do not follow copies and pickles


@dataclass(frozen=True)
class SeenData:
    """Data recognised by version for the same tensors, by value for others.

    Dtype and device may change; only the shape is compared if a tensor requires gradients. Writes to inference tensors are
    not detected.
    """

    tensors: tuple[Tensor, ...] = ()
    versions: SeenVersions = SeenVersions()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "SeenData":
        kept = tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)
        return cls(kept, SeenVersions.of(_counting_writes(kept, tensors)))

    def are(self, tensors: Sequence[Tensor]) -> bool:
        return (
            len(tensors) == len(self.tensors)
            and self.versions.are(_counting_writes(self.tensors, tensors))
            and all(map(_same_data, self.tensors, tensors))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SeenData.of, (self.tensors,)


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype, device and values; NaN, a missing target, equals NaN."""
    if left is right:
        return True
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    if torch.equal(left, right):
        return True
    return left.is_floating_point() and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def same_value(left: Any, right: Any, tensors: Callable[[Tensor, Tensor], bool] = same_tensor) -> bool:
    """Equal types and contents of lists, tuples and dicts; NaN equals NaN. What has no hash is compared by identity."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return tensors(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same_value(a, b, tensors) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_value(part, right[key], tensors) for key, part in left.items())
    return left is right or (isinstance(left, Hashable) and bool(left == right or (left != left and right != right)))


def _counting_writes(tensors: Sequence[Tensor], originals: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(tensors, originals, strict=True)
    return [tensor for tensor, original in pairs if not original.requires_grad and not tensor.is_inference()]


def _same_data(known: Tensor, now: Tensor) -> bool:
    return known is now or (known.shape == now.shape and (now.requires_grad or torch.equal(known.to(now), now)))

"""Whether tensors are still what they were: by version, at no cost, or by value.

A version counts what is written to a tensor by torch's in-place operations. It does not count what goes through `.data`, as
GPyTorch's `initialize` does: hyperparameters are compared by value. Inference tensors have no version, and are compared by
value too.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SeenValues:
    """Tensors recognised by shape, dtype, device and values, of which it keeps copies."""

    values: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "SeenValues":
        """The values that these tensors have now."""
        return cls(tuple(tensor.detach().clone() for tensor in tensors))

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the same values. Cost: one pass over them."""
        return len(tensors) == len(self.values) and all(map(same_tensor, self.values, tensors))


@dataclass(frozen=True)
class SeenVersions:
    """Tensors recognised by identity and version; inference tensors by identity and value. Keeps none of them alive.

    Attributes:
        references: to the tensors.
        states: their versions, and their layouts in the base where views are compared.
        views: whether another view of the same entries of the same tensor counts as the tensor.
        values: copies of those that are inference tensors.
    """

    references: tuple[weakref.ref[Tensor], ...] = ()
    states: tuple[object, ...] = ()
    views: bool = False
    values: SeenValues = SeenValues()

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, views: bool = False) -> "SeenVersions":
        """These tensors, as they are now."""
        seen = [_as_seen(tensor, views) for tensor in tensors]
        references, states = tuple(weakref.ref(tensor) for tensor, _ in seen), tuple(state for _, state in seen)
        return cls(references, states, views, SeenValues.of(filter(Tensor.is_inference, tensors)))

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and nothing has been written to them since.

        Cost: one pass over those that are inference tensors.
        """
        seen = [_as_seen(tensor, self.views) for tensor in tensors]
        return (
            self.states == tuple(state for _, state in seen)
            and all(reference() is tensor for reference, (tensor, _) in zip(self.references, seen, strict=True))
            and self.values.are([tensor for tensor in tensors if tensor.is_inference()])
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SeenVersions, ()  # copies and pickles know nothing: versions are not copied with tensors


@dataclass(frozen=True)
class SeenData:
    """Data recognised by version where the tensors are the same, and by value where others have replaced them.

    Keeps the tensors and copies nothing. Another dtype or device is no other data. A tensor that requires gradients is
    learned: it may move, and only its shape is compared. Writes to inference tensors are not seen.
    """

    tensors: tuple[Tensor, ...] = ()
    versions: SeenVersions = SeenVersions()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "SeenData":
        """These tensors, as they are now."""
        kept = tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)
        return cls(kept, SeenVersions.of(_counting_writes(kept, tensors)))

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same data. Cost: one pass over those that are other tensors."""
        return (
            len(tensors) == len(self.tensors)
            and self.versions.are(_counting_writes(self.tensors, tensors))
            and all(map(_same_data, self.tensors, tensors))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SeenData.of, (self.tensors,)  # versions are not copied with tensors


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype, device and values; NaN equals NaN, since missing targets are NaN."""
    if left is right:
        return True
    if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
        return False
    if torch.equal(left, right):
        return True
    return left.is_floating_point() and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _as_seen(tensor: Tensor, views: bool) -> tuple[Tensor, object]:
    """The tensor that is recognised (the one behind a view where views are compared), and its state."""
    version = None if tensor.is_inference() else tensor._version
    if not views:
        return tensor, version
    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
    return tensor if tensor._base is None else tensor._base, (version, layout)


def _counting_writes(tensors: Sequence[Tensor], originals: Sequence[Tensor]) -> list[Tensor]:
    """Those that are not learned, and have a version."""
    pairs = zip(tensors, originals, strict=True)
    return [tensor for tensor, original in pairs if not original.requires_grad and not tensor.is_inference()]


def _same_data(known: Tensor, now: Tensor) -> bool:
    return known is now or (known.shape == now.shape and (now.requires_grad or torch.equal(known.to(now), now)))

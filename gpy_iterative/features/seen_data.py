"""Whether the data of a step are those of the step before, at no cost while they are the same tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SeenData:
    """Inputs and targets that a state belongs to.

    A tensor that takes the place of another (a view made anew at every step, a copy, the same numbers in another dtype or
    on another device) is compared by value; one that was written to counts as another. Inference tensors do not count
    writes: what is written to them goes unnoticed. Tensors that require gradients are learned with the hyperparameters, and
    may move as these do.

    Attributes:
        tensors: inputs and targets, not copied; empty where nothing is known yet.
        versions: how often each had been written to.
    """

    tensors: tuple[Tensor, ...] = ()
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "SeenData":
        """These, as they are now."""
        kept = tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)
        return cls(kept, tuple(map(_version, kept)))

    def may_be(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same data; true where nothing is known."""
        if not self.tensors:
            return True
        return len(tensors) == len(self.tensors) and all(map(_same, self.tensors, self.versions, tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start with nothing known: versions are not copied with the tensors."""
        return SeenData, ()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(known: Tensor, version: int, now: Tensor) -> bool:
    if now.requires_grad:
        return known.shape == now.shape
    if _version(known) != version:
        return False
    return known is now or (known.shape == now.shape and torch.equal(known.to(now), now))

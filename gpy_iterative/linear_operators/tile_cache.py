"""Evaluated tiles, kept as long as the tensors they were computed from live on unchanged.

A linear operator is rebuilt from its tensors at every turn, so the cache is an object of its own that all
rebuilds share. It serves only the very tensors it was filled from: the same objects at the same versions.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, int]


def version(tensor: Tensor) -> object:
    """What changes whenever the tensor is written to. Inference tensors do not keep count: they differ every time."""
    return object() if tensor.is_inference() else tensor._version


class TileCache:
    """Strips of tiles by (row, first column), up to a number of bytes.

    When its owner's tensors change, the tiles are forgotten but their memory is kept for the next ones: a training
    run fills the same buffers at every step.
    """

    def __init__(self, siblings: "TileCache | TileCaches | None" = None) -> None:
        self._siblings = siblings
        self._lowered: TileCache | None = None
        self._owner: tuple[tuple[weakref.ref[Tensor], object], ...] = ()
        self._tiles: dict[Key, Tensor] = {}
        self._spare: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
        self._bytes = 0

    def claim(self, *tensors: Tensor) -> None:
        """Makes the cache serve these tensors; tiles of any others are dropped."""
        same = len(self._owner) == len(tensors) and all(
            reference() is tensor and known == version(tensor)
            for (reference, known), tensor in zip(self._owner, tensors, strict=True)
        )
        if not same:
            for tile in self._tiles.values():
                self._spare.setdefault((tile.shape, tile.dtype, tile.device), []).append(tile)
            self._tiles.clear()
            self._owner = tuple((weakref.ref(tensor), version(tensor)) for tensor in tensors)

    def get(self, key: Key) -> Tensor | None:
        """The strip of this key, or None where it is not kept."""
        return self._tiles.get(key)

    def evaluate(
        self, key: Key, shape: torch.Size, like: Tensor, budget: int, evaluate: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """A new strip, evaluated in memory of the cache's own; None where the budget has no room for it."""
        spare = self._spare.get((shape, like.dtype, like.device))
        if spare:
            tile = spare.pop()
        else:
            size = shape.numel() * like.element_size()
            if self._total_bytes() + size > budget:
                self._drop_spares()
            if self._total_bytes() + size > budget:
                return None
            tile = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._bytes += size
        self._tiles[key] = evaluate(tile)
        return self._tiles[key]

    def lowered(self) -> "TileCache":
        """A cache under the same budget for the same kernel's tiles in lower precision."""
        if self._lowered is None:
            self._lowered = TileCache(self if self._siblings is None else self._siblings)
        return self._lowered

    def clear(self) -> None:
        """Forgets everything and gives the memory back."""
        lowered = self._lowered
        self.__init__(self._siblings)
        if lowered is not None:
            lowered.clear()
            self._lowered = lowered  # operators that hold it go on to share the budget

    @property
    def num_bytes(self) -> int:
        """Memory held, tiles in use and spare ones, in lower precision too."""
        return self._bytes if self._lowered is None else self._bytes + self._lowered.num_bytes

    def _total_bytes(self) -> int:
        return (self if self._siblings is None else self._siblings).num_bytes

    def _drop_spares(self) -> None:
        for tiles in self._spare.values():
            self._bytes -= sum(tile.numel() * tile.element_size() for tile in tiles)
        self._spare.clear()

    # Copies and pickles start empty: tiles belong to tensors of this process.
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TileCache":
        return TileCache()


class TileCaches:
    """One cache for every kernel of a prior, which share a budget and outlive the operators of a training step.

    Operators ask for theirs in the order in which the prior is read, which is the same at every step.
    """

    def __init__(self) -> None:
        self._caches: list[TileCache] = []
        self._taken = 0

    def restart(self) -> None:
        """The next operator is the first of a prior."""
        self._taken = 0

    def take(self) -> TileCache:
        """The cache of the next operator."""
        if self._taken == len(self._caches):
            self._caches.append(TileCache(self))
        self._taken += 1
        return self._caches[self._taken - 1]

    def clear(self) -> None:
        """Gives the memory of all of them back."""
        for cache in self._caches:
            cache.clear()

    @property
    def num_bytes(self) -> int:
        """Memory held by all of them."""
        return sum(cache.num_bytes for cache in self._caches)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TileCaches":
        return TileCaches()

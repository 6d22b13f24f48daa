"""Evaluated tiles, kept as long as the tensors that they were computed from are unchanged.

A linear operator is often rebuilt from its tensors, so the cache is an object of its own that all rebuilds share.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpy_iterative.changes import SeenVersions

Key = tuple[int, int]


class Precedence(IntEnum):
    """Where memory is short, a tile takes that of kept tiles of a later kind, the last kind first."""

    LOW_PRECISION = 0
    NATIVE = 1
    DERIVATIVE = 2


class _Pool:
    """Caches under one budget, none of which it keeps alive.

    Attributes:
        members: the caches.
        changed: held while the caches change; notified when a product, or the evaluation of a tile, has finished.
    """

    def __init__(self) -> None:
        self.members: list[weakref.ref[TileCache]] = []
        self.changed = threading.Condition()

    def caches(self) -> "list[TileCache]":
        return [cache for reference in self.members if (cache := reference()) is not None]

    def num_bytes(self) -> int:
        return sum(cache.own_bytes for cache in self.caches())


class TileCache:
    """Tiles by row and column, up to a number of bytes.

    When its owner's tensors change, the tiles are forgotten but their memory is kept for the next ones: a training run
    fills the same buffers at every step.

    Attributes:
        tiles: those that are kept.
        own_bytes: memory held, tiles in use and spare ones.
        derivatives: cache of the derivatives of native tiles, which are forgotten with them; None of other kinds.
        low_precision: cache of the same kernel's tiles in float32, with an owner of its own; None of other kinds.
    """

    def __init__(self, pool: _Pool | None = None, *, precedence: Precedence = Precedence.NATIVE) -> None:
        self._pool, self.precedence = _Pool() if pool is None else pool, precedence
        self._users = 0  # products that are being made
        self._structure: list[object] = []
        self._making = threading.RLock()
        self.derivatives = self.low_precision = None
        if precedence is Precedence.NATIVE:
            self.derivatives = TileCache(self._pool, precedence=Precedence.DERIVATIVE)
            self.low_precision = TileCache(self._pool, precedence=Precedence.LOW_PRECISION)
        self.clear()
        self._pool.members.append(weakref.ref(self))

    def clear(self) -> None:
        """Forgets everything and gives the memory back."""
        self._owner = SeenVersions()
        self._structure = []
        self.tiles: dict[Key, Tensor] = {}
        self._spare: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
        self._in_float32 = WeakTensorKeyDictionary()
        self.own_bytes = 0
        for cache in self._others():
            cache.clear()

    def _others(self) -> "list[TileCache]":
        return [cache for cache in (self.derivatives, self.low_precision) if cache is not None]

    @contextmanager
    def serving(self, *tensors: Tensor) -> Iterator[None]:
        """Inside, the cache serves these tensors; tiles of any others, and their derivatives, are dropped.

        Several threads may be served at a time where the tensors are the same; others wait until they have finished.
        """
        with self._pool.changed:
            while self._users and not self._owner.are(tensors):
                self._pool.changed.wait()
            if not self._users and not self._owner.are(tensors):
                self._spare_all()
                if self.derivatives is not None:
                    self.derivatives._spare_all()
                self._structure = []
                self._owner = SeenVersions.of(tensors)
            self._users += 1
        try:
            yield
        finally:
            with self._pool.changed:
                self._users -= 1
                self._pool.changed.notify_all()

    def structure(self, make: Callable[[], object]) -> object:
        """What `make` returned for the tensors that are served now; it is called where there is nothing of them yet."""
        with self._making:
            if not self._structure:
                self._structure = [make()]
            return self._structure[0]

    def evaluate(
        self, key: Key, shape: torch.Size, like: Tensor, budget: int, evaluate: Callable[[Tensor], object]
    ) -> Tensor | None:
        """A new tile, which `evaluate` writes into memory of the cache; None where the budget has no room for it."""
        with self._pool.changed:
            tile = self._memory(shape, like, budget)
        if tile is None:
            return None
        is_done = False
        try:
            evaluate(tile)
            is_done = True
        finally:
            with self._pool.changed:
                kept = self.tiles.setdefault(key, tile) if is_done else None
                if kept is not tile:  # it failed, or another thread evaluated the same tile
                    self._keep_spare(tile)
                self._pool.changed.notify_all()
        return kept

    def _memory(self, shape: torch.Size, like: Tensor, budget: int) -> Tensor | None:
        """A spare tile, or a new one where the budget has room."""
        spare = self._spare.get((shape, like.dtype, like.device))
        if spare:
            return spare.pop()
        size = shape.numel() * like.element_size()
        if not self._makes_room(size, budget):
            return None
        self.own_bytes += size
        return new_memory(shape, like)

    def _makes_room(self, size: int, budget: int) -> bool:
        """Whether so many bytes fit into the budget, after tiles of later kinds have left.

        A tile that another thread is evaluating cannot leave before it is finished, and is waited for. No two threads wait
        for each other: a thread that evaluates a tile asks only for memory of a later kind.
        """
        if self._pool.num_bytes() + size > budget:
            for key in list(self._spare):
                self.own_bytes -= sum(map(_num_bytes, self._spare.pop(key)))
        later = [cache for cache in self._pool.caches() if cache.precedence > self.precedence]
        if self._pool.num_bytes() + size - sum(cache.own_bytes for cache in later) > budget:
            return False
        for cache in sorted(later, key=lambda cache: -cache.precedence):
            while cache.own_bytes and self._pool.num_bytes() + size > budget:
                if not cache._drop_one():
                    self._pool.changed.wait()
        return self._pool.num_bytes() + size <= budget

    def _drop_one(self) -> bool:
        """Drops a spare tile, or else the last one; False where all others are being evaluated."""
        spare = next((tiles for tiles in self._spare.values() if tiles), None)
        if spare is None and not self.tiles:
            return False
        self.own_bytes -= _num_bytes(self.tiles.popitem()[1] if spare is None else spare.pop())
        return True

    def _spare_all(self) -> None:
        for tile in self.tiles.values():
            self._keep_spare(tile)
        self.tiles.clear()

    def _keep_spare(self, tile: Tensor) -> None:
        self._spare.setdefault((tile.shape, tile.dtype, tile.device), []).append(tile)

    def in_float32(self, tensor: Tensor) -> Tensor:
        """The tensor in float32 (an integer one as it is), without gradient: one object as long as it is unchanged.

        So all low-precision copies that share the cache are recognised as owners of the same tiles.
        """
        known = self._in_float32.get(tensor)
        if known is None or not known[0].are([tensor]):
            single = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
            known = self._in_float32[tensor] = SeenVersions.of([tensor]), single
        return known[1]

    @property
    def num_bytes(self) -> int:
        """Memory held, tiles in use and spare ones, of all kinds."""
        return self.own_bytes + sum(cache.own_bytes for cache in self._others())

    def __reduce__(self) -> tuple[Any, ...]:
        return TileCache, ()  # copies and pickles start empty: tiles belong to tensors of this process


@torch.inference_mode(False)  # outside of it, nothing could be written to inference tensors
def new_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory for entries of the dtype and device of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _num_bytes(tile: Tensor) -> int:
    return tile.numel() * tile.element_size()


class TileCaches:
    """One cache for every kernel of a prior, under one budget. They outlive the operators of a training step."""

    def __init__(self) -> None:
        self._pool = _Pool()
        self._caches: dict[str, TileCache] = {}

    def take(self, path: str) -> TileCache:
        """The cache of the kernel at this path in the prior, "base_kernel.kernels.0" for example."""
        if path not in self._caches:
            self._caches[path] = TileCache(self._pool)
        return self._caches[path]

    def clear(self) -> None:
        """Gives the memory of all of them back."""
        for cache in self._caches.values():
            cache.clear()

    @property
    def num_bytes(self) -> int:
        """Memory held by all of them."""
        return sum(cache.num_bytes for cache in self._caches.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return TileCaches, ()

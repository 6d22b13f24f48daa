"""Cache of evaluated tiles, shared by linear operators that are rebuilt from the same tensors."""

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
    """A tile may take the memory of tiles of a later kind, the last kind first."""

    LOW_PRECISION = 0
    NATIVE = 1
    DERIVATIVE = 2


class _Pool:
    """Caches under one budget.

    `changed` is held while caches change, and notified when a product or an evaluation has finished.
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

    When its owner's tensors change, the tiles are dropped and their memory is reused.

    Attributes:
        tiles: the kept tiles.
        own_bytes: memory of kept and spare tiles.
        derivatives: cache of the native tiles' derivatives, dropped with them; None for other kinds.
        low_precision: cache of float32 tiles, with its own owner; None for other kinds.
    """

    def __init__(self, pool: _Pool | None = None, *, precedence: Precedence = Precedence.NATIVE) -> None:
        self._pool, self.precedence = _Pool() if pool is None else pool, precedence
        self._users = 0  # products in progress
        self._making = threading.RLock()
        self.derivatives = self.low_precision = None
        if precedence is Precedence.NATIVE:
            self.derivatives = TileCache(self._pool, precedence=Precedence.DERIVATIVE)
            self.low_precision = TileCache(self._pool, precedence=Precedence.LOW_PRECISION)
        self.clear()
        self._pool.members.append(weakref.ref(self))

    def clear(self) -> None:
        self._owner = SeenVersions()
        self._structure: list[object] = []
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
        """Context for these tensors; tiles of others, and their derivatives, are dropped.

        Threads with the same tensors may enter together; others wait.
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
        """The result of one call of `make` for the tensors that are served now."""
        with self._making:
            if not self._structure:
                self._structure = [make()]
            return self._structure[0]

    def evaluate(
        self, key: Key, shape: torch.Size, like: Tensor, budget: int, evaluate: Callable[[Tensor], object]
    ) -> Tensor | None:
        """A new tile, which `evaluate` writes; None where the budget has no room."""
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
                if kept is not tile:  # failed, or another thread was faster
                    self._keep_spare(tile)
                self._pool.changed.notify_all()
        return kept

    def _memory(self, shape: torch.Size, like: Tensor, budget: int) -> Tensor | None:
        spare = self._spare.get((shape, like.dtype, like.device))
        if spare:
            return spare.pop()
        size = shape.numel() * like.element_size()
        if not self._makes_room(size, budget):
            return None
        self.own_bytes += size
        return new_memory(shape, like)

    def _makes_room(self, size: int, budget: int) -> bool:
        """Drops tiles of later kinds to fit so many bytes into the budget; False where they do not fit.

        It waits for tiles that other threads evaluate, without deadlock: these ask only for memory of a later kind.
        """
        if self._pool.num_bytes() + size > budget:
            for key in list(self._spare):
                self.own_bytes -= sum(tile.nbytes for tile in self._spare.pop(key))
        later = [cache for cache in self._pool.caches() if cache.precedence > self.precedence]
        if self._pool.num_bytes() + size - sum(cache.own_bytes for cache in later) > budget:
            return False
        for cache in sorted(later, key=lambda cache: -cache.precedence):
            while cache.own_bytes and self._pool.num_bytes() + size > budget:
                if not cache._drop_one():
                    self._pool.changed.wait()
        return self._pool.num_bytes() + size <= budget

    def _drop_one(self) -> bool:
        """Drops a spare tile, or else the last one; False where all are being evaluated."""
        spare = next((tiles for tiles in self._spare.values() if tiles), None)
        if spare is None and not self.tiles:
            return False
        tile = self.tiles.popitem()[1] if spare is None else spare.pop()
        self.own_bytes -= tile.nbytes
        return True

    def _spare_all(self) -> None:
        for tile in self.tiles.values():
            self._keep_spare(tile)
        self.tiles.clear()

    def _keep_spare(self, tile: Tensor) -> None:
        self._spare.setdefault((tile.shape, tile.dtype, tile.device), []).append(tile)

    def in_float32(self, tensor: Tensor) -> Tensor:
        """The tensor in float32 (integers unchanged), without gradient.

        It is one object while the tensor is unchanged, so that low-precision copies share tiles.
        """
        known = self._in_float32.get(tensor)
        if known is None or not known[0].are([tensor]):
            single = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
            known = self._in_float32[tensor] = SeenVersions.of([tensor]), single
        return known[1]

    @property
    def num_bytes(self) -> int:
        return self.own_bytes + sum(cache.own_bytes for cache in self._others())

    def __reduce__(self) -> tuple[Any, ...]:
        return TileCache, ()  # copies and pickles start empty


@torch.inference_mode(False)  # inference tensors are read-only outside inference mode
def new_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


class TileCaches:
    """One cache for every kernel of a prior, under one budget."""

    def __init__(self) -> None:
        self._pool = _Pool()
        self._caches: dict[str, TileCache] = {}

    def take(self, path: str) -> TileCache:
        """The cache of the kernel at a path in the prior, for example "base_kernel.kernels.0"."""
        if path not in self._caches:
            self._caches[path] = TileCache(self._pool)
        return self._caches[path]

    def clear(self) -> None:
        for cache in self._caches.values():
            cache.clear()

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self._caches.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return TileCaches, ()

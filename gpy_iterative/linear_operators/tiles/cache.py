"""Cache of evaluated tiles, shared by linear operators of the same tensors."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpy_iterative.changes import SeenVersions

Key = tuple[int, int]
SpareKey = tuple[torch.Size, torch.dtype, torch.device]


class Tile(NamedTuple):
    """A block of a matrix whose entries are kept together."""

    key: Key  # its row and column of tiles
    rows: slice
    columns: slice
    shape: torch.Size  # [*b, rows, columns]


class Precedence(IntEnum):
    """Tiles may take the memory of later kinds, the last kind first."""

    LOW_PRECISION = 0
    NATIVE = 1
    DERIVATIVE = 2


class _Pool:
    """Caches under one budget; `changed` is notified after products and evaluations."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[TileCache]] = []
        self.changed = threading.Condition()

    def caches(self) -> "list[TileCache]":
        return [cache for reference in self.members if (cache := reference()) is not None]

    def num_bytes(self) -> int:
        return sum(cache.own_bytes for cache in self.caches())


class TileCache:
    """Tiles by row and column. When their tensors change, they are dropped and their memory is reused.

    A sum's terms have caches of their own (`part`), under one budget.
    """

    def __init__(self, pool: _Pool | None = None, *, precedence: Precedence = Precedence.NATIVE) -> None:
        self.pool, self.precedence = _Pool() if pool is None else pool, precedence
        self._users = 0  # products in progress
        self._making = threading.RLock()
        self.derivatives = self.low_precision = None
        self._parts: dict[str, TileCache] = {}
        if precedence is Precedence.NATIVE:
            self.derivatives = TileCache(self.pool, precedence=Precedence.DERIVATIVE)
            self.low_precision = TileCache(self.pool, precedence=Precedence.LOW_PRECISION)
        self.clear()
        self.pool.members.append(weakref.ref(self))

    def clear(self) -> None:
        self._owner = SeenVersions()
        self._structure: list[object] = []
        self.tiles: dict[Key, Tensor] = {}
        self._spare: dict[SpareKey, list[Tensor]] = {}
        self._in_float32 = WeakTensorKeyDictionary()
        self.own_bytes = 0
        for cache in (self.derivatives, self.low_precision, *self._parts.values()):
            if cache is not None:
                cache.clear()

    def part(self, name: str) -> "TileCache":
        """The cache of a part with this name, such as "0" for the first term."""
        if name not in self._parts:
            self._parts[name] = TileCache(self.pool)
        return self._parts[name]

    @contextmanager
    def serving(self, *tensors: Tensor) -> Iterator[None]:
        """Waits while threads use tiles of other tensors, then drops these."""
        with self.pool.changed:
            while self._users and not self._owner.are(tensors):
                self.pool.changed.wait()
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
            with self.pool.changed:
                self._users -= 1
                self.pool.changed.notify_all()

    def structure(self, make: Callable[[], object]) -> object:
        """The result of one call of `make` for the tensors that are served."""
        with self._making:
            if not self._structure:
                self._structure = [make()]
            return self._structure[0]

    def evaluate(
        self,
        tile: Any,
        like: Tensor,
        budget: int,
        evaluate: Callable[[Any, Tensor], object],
        evaluate_both: Callable[[Any, Tensor, Tensor], object] | None = None,
    ) -> Tensor | None:
        """New entries, which `evaluate` writes, or `evaluate_both` if derivatives are kept, too; None without room."""
        with self.pool.changed:
            entries = self._memory(tile.shape, like, budget)
        if entries is None:
            return None
        is_done = False
        try:
            both = evaluate_both and (lambda tile, derivative: evaluate_both(tile, entries, derivative))
            if both is None or self.derivatives.evaluate(tile, like, budget, both) is None:
                evaluate(tile, entries)
            is_done = True
        finally:
            with self.pool.changed:
                kept = self.tiles.setdefault(tile.key, entries) if is_done else None
                if kept is not entries:  # failed, or another thread was faster
                    self.own_bytes -= entries.nbytes
                self.pool.changed.notify_all()
        return kept

    def _memory(self, shape: torch.Size, like: Tensor, budget: int) -> Tensor | None:
        spare = self._spare.get((shape, like.dtype, like.device))
        if spare:
            return spare.pop()
        self._drop_spares(lambda key: key[1:] != (like.dtype, like.device))  # a fit that becomes float64 stays there
        size = shape.numel() * like.element_size()
        if not self._makes_room(size, budget):
            return None
        self.own_bytes += size
        return new_memory(shape, like)

    def _makes_room(self, size: int, budget: int) -> bool:
        """Drops tiles of later kinds until so many bytes fit; False if they cannot.

        It waits for tiles that other threads evaluate. These ask only for memory of later kinds, so there is no deadlock.
        """
        if self.pool.num_bytes() + size > budget:
            self._drop_spares(lambda key: True)
        later = [cache for cache in self.pool.caches() if cache.precedence > self.precedence]
        if self.pool.num_bytes() + size - sum(cache.own_bytes for cache in later) > budget:
            return False
        for cache in sorted(later, key=lambda cache: -cache.precedence):
            while cache.own_bytes and self.pool.num_bytes() + size > budget:
                if not cache._drop_one():
                    self.pool.changed.wait()
        return self.pool.num_bytes() + size <= budget

    def _drop_spares(self, is_dropped: Callable[[SpareKey], bool]) -> None:
        for key in [key for key in self._spare if is_dropped(key)]:
            self.own_bytes -= sum(tile.nbytes for tile in self._spare.pop(key))

    def _drop_one(self) -> bool:
        """Drops a spare tile or the last one; False if all are being evaluated."""
        spare = next((tiles for tiles in self._spare.values() if tiles), None)
        if spare is None and not self.tiles:
            return False
        tile = self.tiles.popitem()[1] if spare is None else spare.pop()
        self.own_bytes -= tile.nbytes
        return True

    def _spare_all(self) -> None:
        for tile in self.tiles.values():
            self._spare.setdefault((tile.shape, tile.dtype, tile.device), []).append(tile)
        self.tiles.clear()

    def in_float32(self, tensor: Tensor) -> Tensor:
        """The tensor in float32 (integers unchanged): one object, so that low-precision copies share tiles."""
        known = self._in_float32.get(tensor)
        if known is None or not known[0].are([tensor]):
            single = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
            known = self._in_float32[tensor] = SeenVersions.of([tensor]), single
        return known[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return TileCache, ()  # copies and pickles start empty


@torch.inference_mode(False)  # inference tensors are read-only outside inference mode
def new_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)

"""Evaluated tiles, kept as long as the tensors they were computed from live on unchanged.

A linear operator is rebuilt from its tensors at every turn, so the cache is an object of its own that all
rebuilds share. It serves only the very tensors it was filled from: the same objects at the same versions.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, int]


def version(tensor: Tensor) -> object:
    """What changes whenever the tensor is written to. Inference tensors do not keep count: they differ every time."""
    return object() if tensor.is_inference() else tensor._version


class Precedence(IntEnum):
    """What goes before what where memory is short.

    Tiles in lower precision, which a solve iterates on; native ones; their derivatives, which a training step asks for
    once.
    """

    LOWERED = 0
    NATIVE = 1
    DERIVATIVE = 2


class _Pool:
    """Caches under one budget. It keeps none of them alive: their memory is free as soon as nobody else holds them."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[TileCache]] = []
        #: Held by whoever changes what the caches keep; told when a product, or the evaluation of a tile, has finished.
        self.changed = threading.Condition()

    def add(self, cache: "TileCache") -> None:
        self._members = [*(reference for reference in self._members if reference() is not None), weakref.ref(cache)]

    def members(self) -> list["TileCache"]:
        """In the order in which they were made."""
        return [cache for reference in self._members if (cache := reference()) is not None]

    def num_bytes(self) -> int:
        return sum(cache.own_bytes for cache in self.members())


class TileCache:
    """Strips of tiles by (row, first column), up to a number of bytes.

    When its owner's tensors change, the tiles are forgotten but their memory is kept for the next ones: a training
    run fills the same buffers at every step.

    Twins keep what else there is of the same kernel, under the same budget. Where that has no room for a tile, it displaces
    tiles of a later precedence, the last first.
    """

    def __init__(self, pool: _Pool | None = None, *, precedence: Precedence = Precedence.NATIVE) -> None:
        self._pool, self._precedence = _Pool() if pool is None else pool, precedence
        self._pool.add(self)
        self._twins: dict[Precedence, TileCache] = {}
        self._users = 0  # products that are being made
        self._forget()

    def _forget(self) -> None:
        self._owner: tuple[tuple[weakref.ref[Tensor], object], ...] = ()
        self._tiles: dict[Key, Tensor] = {}
        self._spare: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
        self._singles: list[tuple[weakref.ref[Tensor], object, Tensor]] = []
        self.own_bytes = 0

    @contextmanager
    def serving(self, *tensors: Tensor) -> Iterator[None]:
        """Inside, the cache serves these tensors; tiles of any others, and the derivatives of those, are dropped.

        Several threads may be served at a time where the tensors are the same; others wait until they have finished.
        """
        with self._pool.changed:
            while self._users and not self._serves(tensors):
                self._pool.changed.wait()
            if not self._serves(tensors):
                for cache in (self, self.derivatives()):
                    cache._spare_all()
                self._owner = tuple((weakref.ref(tensor), version(tensor)) for tensor in tensors)
            self._users += 1
        try:
            yield
        finally:
            with self._pool.changed:
                self._users -= 1
                self._pool.changed.notify_all()

    def _serves(self, tensors: tuple[Tensor, ...]) -> bool:
        return len(self._owner) == len(tensors) and all(
            reference() is tensor and known == version(tensor)
            for (reference, known), tensor in zip(self._owner, tensors, strict=True)
        )

    def _spare_all(self) -> None:
        for tile in self._tiles.values():
            self._keep_spare(tile)
        self._tiles.clear()

    def get(self, key: Key) -> Tensor | None:
        """The strip of this key, or None where it is not kept."""
        return self._tiles.get(key)

    def evaluate(
        self, key: Key, shape: torch.Size, like: Tensor, budget: int, evaluate: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """A new strip, evaluated in memory of the cache's own; None where the budget has no room for it."""
        with self._pool.changed:
            tile = self._memory(shape, like, budget)
        if tile is None:
            return None
        try:
            evaluated = evaluate(tile)
        except BaseException:
            with self._pool.changed:
                self._keep_spare(tile)  # counted already, and no less useful than before
                self._pool.changed.notify_all()
            raise
        with self._pool.changed:
            kept = self._tiles.setdefault(key, evaluated)
            if kept is not evaluated:  # another thread evaluated the same one
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
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def _keep_spare(self, tile: Tensor) -> None:
        self._spare.setdefault((tile.shape, tile.dtype, tile.device), []).append(tile)

    def _makes_room(self, size: int, budget: int) -> bool:
        """Whether so many bytes fit into the budget, after what comes behind them has left.

        A tile that another thread is evaluating cannot leave before it is finished, and is waited for. Nobody waits for
        each other: who evaluates a tile asks only for memory of a later precedence.
        """
        if self._pool.num_bytes() + size > budget:
            self._drop_spares()
        members = self._pool.members()
        behind = sorted(
            (cache for cache in members if cache._precedence > self._precedence), key=lambda cache: -cache._precedence
        )
        staying = sum(cache.own_bytes for cache in members if cache._precedence <= self._precedence)
        for cache in behind if staying + size <= budget else []:
            while cache.own_bytes and self._pool.num_bytes() + size > budget:
                if not cache._drop_one():
                    self._pool.changed.wait()
        return self._pool.num_bytes() + size <= budget

    def lowered(self) -> "TileCache":
        """A cache under the same budget for the same kernel's tiles in lower precision."""
        return self._twin(Precedence.LOWERED)

    def derivatives(self) -> "TileCache":
        """A cache under the same budget for the derivatives of these tiles, which is claimed with them."""
        return self._twin(Precedence.DERIVATIVE)

    def _twin(self, precedence: Precedence) -> "TileCache":
        if precedence not in self._twins:
            self._twins[precedence] = TileCache(self._pool, precedence=precedence)
        return self._twins[precedence]

    def single(self, tensor: Tensor) -> Tensor:
        """The tensor in float32 (an integer one as it is), without gradient: the same one for all who share the cache.

        So their twins are recognised as owners of the same lowered tiles.
        """
        self._singles = [
            entry for entry in self._singles if (known := entry[0]()) is not None and version(known) == entry[1]
        ]
        for reference, _, single in self._singles:
            if reference() is tensor:
                return single
        single = tensor.detach()
        single = single.float() if single.is_floating_point() else single
        self._singles.append((weakref.ref(tensor), version(tensor), single))
        return single

    def clear(self) -> None:
        """Forgets everything and gives the memory back; operators that hold the cache go on to share the budget."""
        self._forget()
        for twin in self._twins.values():
            twin.clear()

    @property
    def num_bytes(self) -> int:
        """Memory held, tiles in use and spare ones, those of twins too."""
        return self.own_bytes + sum(twin.own_bytes for twin in self._twins.values())

    def _drop_spares(self) -> None:
        for tiles in self._spare.values():
            self.own_bytes -= sum(map(_num_bytes, tiles))
        self._spare.clear()

    def _drop_one(self) -> bool:
        """A spare tile, or else the last one; False where there is none but those that are being evaluated."""
        if self._spare:
            key, tiles = next(iter(self._spare.items()))
            self.own_bytes -= _num_bytes(tiles.pop())
            if not tiles:
                del self._spare[key]
        elif self._tiles:
            self.own_bytes -= _num_bytes(self._tiles.popitem()[1])
        else:
            return False
        return True

    # Copies and pickles start empty: tiles belong to tensors of this process.
    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TileCache":
        return TileCache()


def _num_bytes(tile: Tensor) -> int:
    return tile.numel() * tile.element_size()


class TileCaches:
    """One cache for every kernel of a prior, which share a budget and outlive the operators of a training step.

    Operators ask for theirs in the order in which the prior is read, which is the same at every step.
    """

    def __init__(self) -> None:
        self._pool = _Pool()
        self._caches: list[TileCache] = []
        self._taken = 0

    def restart(self) -> None:
        """The next operator is the first of a prior."""
        self._taken = 0

    def take(self) -> TileCache:
        """The cache of the next operator."""
        if self._taken == len(self._caches):
            self._caches.append(TileCache(self._pool))
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

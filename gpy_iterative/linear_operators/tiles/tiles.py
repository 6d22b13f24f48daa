"""Kernel matrices in square tiles, and their products."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import Tile, TileCache, new_memory
from gpy_iterative.linear_operators.tiles.ranks import Ranks
from gpy_iterative.worker_threads import ByDevice, summed

#: Picked entries evaluated at a time.
PICKED_ENTRIES = ByDevice(cpu=2**20, accelerator=2**24)


def blocks(stop: int, length: int, start: int = 0) -> list[slice]:
    return [slice(first, min(first + length, stop)) for first in range(start, stop, length)]


class RowBlocks:
    """Vectors [*b, n, s] by rows of tiles: a contiguous block [*b, s, rows] each.

    Args:
        data: [*b, blocks, s, length]; rows beyond the matrix are zero.
        size: rows of the matrix.
        first: number of the first tile.
    """

    def __init__(self, data: Tensor, size: int, first: int = 0) -> None:
        self.data, self.numbers = data, range(first, first + data.shape[-3])
        self.blocks = dict(zip(self.numbers, data.unbind(-3), strict=True))
        if self.blocks:
            last = self.numbers[-1]
            self.blocks[last] = self.blocks[last][..., : size - last * data.shape[-1]]

    @classmethod
    def of(cls, vectors: Tensor, size: int, length: int, start: int = 0) -> "RowBlocks":
        """Blocks of vectors [*b, n, s] at rows from `start` on, padded to whole tiles by zeros."""
        first, before = divmod(start, length)
        count = -(-(before + vectors.shape[-2]) // length)
        after = count * length - before - vectors.shape[-2]
        padded = torch.nn.functional.pad(vectors, (0, 0, before, after)).unflatten(-2, (count, length))
        return cls(padded.mT.clone(memory_format=torch.contiguous_format), size, first)


class Tiles(ABC):
    """A matrix [*b, n, m] that is evaluated tile by tile, without autograd.

    Attributes:
        centre: a number that tiles, but not other blocks, leave out of their entries: float32 sums over nearly equal ones
            lose digits.
        rounding: rounding errors of products over those of numbers near one as entries.

    Args:
        symmetric: whether tile (j, i) is the transpose of (i, j); then only i <= j is evaluated.
        length: most rows and columns of a tile.
        owner: the tensors that the tiles depend on.
        like: a tensor of the tiles' dtype and device.
    """

    centre, rounding = 0.0, 1.0

    def __init__(
        self,
        shape: torch.Size,
        *,
        symmetric: bool,
        length: int,
        owner: tuple[Tensor, ...],
        like: Tensor,
        products: KernelProducts,
        cache: TileCache,
    ) -> None:
        self.shape, self.symmetric, self.cache = shape, symmetric, cache
        self.length = length = min(length, max(*shape[-2:], 1))  # vectors are padded to whole tiles
        self.rows, self.columns = blocks(shape[-2], length), blocks(shape[-1], length)
        self.owner, self.seen = owner, SeenVersions.of(owner)
        self.ranks = None if products.process_group is None else Ranks(products.process_group)
        self._like, self._memory, self._agreed = like, threading.local(), False
        self._budget = products.cache_budget(like.device)
        self._keeps_derivatives = False

    @abstractmethod
    def evaluate(self, tile: Any, out: Tensor) -> Tensor:
        """Writes entries of a `Tile`, minus `centre`, or of a subclass's own block with key and shape, into `out`."""

    def evaluate_both(self, tile: Any, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        """`evaluate`, and derivatives to keep beside the entries."""
        raise NotImplementedError

    @abstractmethod
    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """Any block, which the caller may overwrite."""

    def values(self, tile: Any) -> Tensor:
        """Entries, read-only, valid until the thread's next call. Call it only inside `cache.serving(*owner)`.

        They are kept if there is room, with derivatives if these are wanted.
        """
        kept = self.cache.tiles.get(tile.key)
        if kept is None and self._budget > 0:
            both = self.evaluate_both if self._keeps_derivatives else None
            kept = self.cache.evaluate(tile, self._like, self._budget, self.evaluate, both)
        return self.evaluate(tile, self.scratch(tile.shape, 0)) if kept is None else kept

    def scratch(self, shape: tuple[int, ...], which: int) -> Tensor:
        known, key = self._memory.__dict__, (shape, which)
        if key not in known:
            known[key] = new_memory(shape, self._like)
        return known[key]

    def visits(self, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> list[Tile]:
        """Tiles of this process in some rows and columns of tiles."""
        rows = range(len(self.rows)) if rows is None else rows
        columns = range(len(self.columns)) if columns is None else columns
        keys = [(i, j) for i in rows for j in columns]
        if self.symmetric:
            keys = sorted({(i, j) if i <= j else (j, i) for i, j in keys})
        tiles = []
        for i, j in keys:
            if self.ranks is None or self.ranks.owns(i, j):
                own, other = self.rows[i], self.columns[j]
                shape = torch.Size((*self.shape[:-2], own.stop - own.start, other.stop - other.start))
                tiles.append(Tile((i, j), own, other, shape))
        return tiles

    def product(
        self, rows: slice, columns: slice, rhs: Tensor, values: Callable[[Tile], Tensor] | None = None
    ) -> Tensor:
        """Some rows and columns of the matrix, or of another one with these values, times rhs [*b, len(columns), s]."""
        start, stop, _ = rows.indices(self.shape[-2])
        wanted = range(start // self.length, -(-stop // self.length))
        given = RowBlocks.of(rhs, self.shape[-1], self.length, columns.indices(self.shape[-1])[0])
        share = partial(self._share_of_product, wanted, given, values or self.values)
        (data,) = self.sums(share, self.visits(wanted, given.numbers))
        first = wanted.start * self.length
        product = data.mT.flatten(-3, -2)[..., start - first : stop - first, :]
        self.complete([product], [rhs])
        if values is None and self.centre:
            product += (self.centre * rhs.sum(-2, keepdim=True, dtype=torch.float64)).to(product.dtype)
        return product

    def _share_of_product(
        self, rows: range, given: RowBlocks, values: Callable[[Tile], Tensor], visits: Sequence[Tile]
    ) -> list[Tensor]:
        *batch, _, columns, length = given.data.shape
        result = RowBlocks(given.data.new_zeros(*batch, len(rows), columns, length), self.shape[-2], rows.start)
        add = torch.Tensor.addmm_ if not batch else lambda out, left, right: out.add_(left @ right)
        for tile in visits:
            (i, j), entries = tile.key, values(tile)
            if i in result.blocks and j in given.blocks:
                add(result.blocks[i], given.blocks[j], entries.mT)
            if self.symmetric and i != j and j in result.blocks and i in given.blocks:
                add(result.blocks[j], given.blocks[i], entries)
        return [result.data]

    def sums(self, share: Callable[[Sequence[Any]], list[Tensor]], visits: Sequence[Any]) -> list[Tensor]:
        with self.cache.serving(*self.owner):
            return summed(share, visits, self._like.device)

    def complete(self, partial: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Adds the other processes' sums; see `Ranks.sum_`."""
        if self.ranks is None:
            return
        if not self._agreed:
            self.ranks.agree(*self.layout())
            self._agreed = True
        self.ranks.sum_(partial, given)

    def layout(self) -> tuple[str, list[Tensor]]:
        """The arguments of `Ranks.agree`."""
        return f"shape {tuple(self.shape)}, rows in tiles of {self.length}", list(self.owner)

    def picked_product(self, rows: Tensor, rhs: Tensor) -> Tensor:
        """Arbitrary rows of an unbatched matrix times rhs [m, s]."""
        part = slice(0, self.shape[-1]) if self.ranks is None else self.ranks.part(self.shape[-1])

        def multiply(share: Sequence[slice]) -> list[Tensor]:
            result = rhs.new_zeros(len(rows), rhs.shape[-1])
            for columns in share:
                result.addmm_(self.block(rows, columns), rhs[columns])
            return [result]

        (result,) = summed(multiply, self.parts_of(part, len(rows)), self._like.device)
        self.complete([result], [rows, rhs])
        return result

    def parts_of(self, columns: slice, rows: int) -> list[slice]:
        """Columns to evaluate at a time in so many picked rows."""
        entries = PICKED_ENTRIES.on(self._like.device)
        return blocks(columns.stop, max(entries // max(rows, 1), 1), columns.start)

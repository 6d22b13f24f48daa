"""Kernel matrices in square tiles, and the products that are made of them.

A symmetric matrix is evaluated in its upper triangle of tiles only, each of which serves twice. Evaluated tiles
are kept in a `TileCache` as far as its budget goes; the rest is evaluated again for every product.

Tiles are multiplied in strips of neighbours by one batched product each: BLAS spreads the members of a batch over its
threads far better than it does a single tile times a few columns (two cores, four columns: .069 s in place of .078 s).

Where several processes share the matrix, each visits its own strips only, and sums over strips are completed by the
others' (`complete`).
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import combinations_with_replacement
from typing import TypeVar

import torch
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache, version
from gpy_iterative.linear_operators.tiles.row_blocks import (
    RowBlocks,
    RowSums,
    TileRun,
    add_product_,
    overlaps,
    tile_runs,
    whole_run,
)
from gpy_iterative.linear_operators.tiles.schedule import TileVisits, Visit, strips_with
from gpy_iterative.worker_threads import run, shares

Rows = slice | Tensor
Item = TypeVar("Item")

#: Tiles of one strip at the most. On two cores, strips of 2 are the fastest at every number of columns: both a batched
#: product and an element-wise pass give each thread one tile, which stays in its cache.
STRIP = 2
#: Entries of picked rows that are evaluated at a time. On a CPU they stay in its cache through the element-wise passes
#: (512 rows of 14,940 times 17 columns: 17 ms in place of 48 at once); on an accelerator it is a matter of memory: 256 rows
#: of a matrix with a third of a million columns would take more than all else that a solver holds.
PICKED_ENTRIES = {"cpu": 2**20, "cuda": 2**24}


def blocks(size: int, length: int) -> list[slice]:
    """Contiguous slices of the given length that cover range(size); the last may be shorter."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


class _WorkingMemory(threading.local):
    """Tensors that one thread alone overwrites."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[tuple[int, ...], int], Tensor] = {}


class Tiles(ABC):
    """A matrix [*b, n, m] that is evaluated tile by tile, without autograd.

    Args:
        shape: of the matrix.
        symmetric: whether the tile (j, i) is the transpose of (i, j); only i <= j are asked for then.
        rows, columns: the slices of the tiles.
        owner: the tensors that the tiles depend on.
        like: a tensor of the tiles' dtype and device.
        products: memory for kept tiles, and the processes that share them.
        cache: where evaluated tiles are kept.
    """

    def __init__(
        self,
        shape: torch.Size,
        *,
        symmetric: bool,
        rows: list[slice],
        columns: list[slice],
        owner: tuple[Tensor, ...],
        like: Tensor,
        products: KernelProducts,
        cache: TileCache,
    ) -> None:
        self.shape, self.symmetric, self.rows, self.columns = shape, symmetric, rows, columns
        self.products, self.cache = products, cache
        self._owner, self._versions = owner, [version(tensor) for tensor in owner]
        self._like = like
        self._memory = _WorkingMemory()
        self.ranks = products.ranks()
        self._agreed = False
        #: The columns of tiles that this process visits in every row of them, in strips of equal tiles.
        self.strips = [
            [columns for number, columns in enumerate(self._make_strips(i)) if self.ranks.owns(i, number)]
            for i in range(len(rows))
        ]
        self._visits = TileVisits(self.strips, symmetric=symmetric)
        self._budget = products.cache_budget(self._like.device)

    @abstractmethod
    def evaluate(self, i: int, columns: range, out: Tensor) -> Tensor:
        """Writes the tiles of row block i and some column blocks into `out` [*b, g, rows, columns], and returns it."""

    @abstractmethod
    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """Any block, evaluated anew: the caller's to overwrite."""

    def is_current(self) -> bool:
        """Whether the tensors are still as they were; in-place changes make the tiles stale."""
        return self._versions == [version(tensor) for tensor in self._owner]

    def strip_part(self, i: int, strip: range, columns: range) -> Tensor:
        """The tiles of row block i and some neighbouring columns out of one of `strips[i]`: [*b, g, rows, columns].

        Valid until the next call, and not to be overwritten. The cache has been claimed.
        """
        kept = self._kept(i, strip)
        if kept is None:
            return self._evaluated(i, columns)
        return _picked(kept, strip, columns)

    def tile(self, i: int, j: int) -> Tensor:
        """The tile (i, j), i <= j when symmetric, of this process or of another; likewise."""
        alone = range(j, j + 1)
        own = strips_with(alone, self.strips[i])  # none where it is another process's
        with self.claimed():
            return (self.strip_part(i, own[0], alone) if own else self._evaluated(i, alone)).squeeze(-3)

    def _evaluated(self, i: int, columns: range) -> Tensor:
        return self.evaluate(i, columns, self.scratch(self.strip_shape(i, columns), 0))

    def claimed(self) -> AbstractContextManager[None]:
        """Inside, the cache serves these tiles; nothing may be asked of them outside."""
        return self.cache.serving(*self._owner)

    def _kept(self, i: int, columns: range) -> Tensor | None:
        """The strip from the cache, evaluated if it was not yet; None where there is no room for it."""
        if self._budget <= 0:
            return None
        key = (i, columns[0])
        kept = self.cache.get(key)
        if kept is None:
            shape = self.strip_shape(i, columns)
            kept = self.cache.evaluate(
                key, shape, self._like, self._budget, lambda out: self._evaluated_to_keep(i, columns, out)
            )
        return kept

    def _evaluated_to_keep(self, i: int, columns: range, out: Tensor) -> Tensor:
        return self.evaluate(i, columns, out)

    def strip_shape(self, i: int, columns: range) -> torch.Size:
        """[*b, g, rows, columns] of neighbouring tiles of equal shape."""
        rows, first = self.rows[i], self.columns[columns[0]]
        return torch.Size((*self.shape[:-2], len(columns), rows.stop - rows.start, first.stop - first.start))

    def _make_strips(self, i: int) -> list[range]:
        """A tile on the diagonal, which serves once, is alone; so is a last one that is narrower than the others."""
        run = whole_run(self.columns)
        is_narrower = bool(self.columns) and self.columns[-1].stop - self.columns[-1].start < run.length
        numbers = range(i if self.symmetric else 0, len(self.columns))
        alone = {i} if self.symmetric else set()
        return _neighbours(numbers, alone | ({numbers.stop - 1} if is_narrower else set()))

    def scratch(self, shape: tuple[int, ...], which: int) -> Tensor:
        """Working memory that lives as long as this object: for every thread, one tensor for every shape and number."""
        key, known = (shape, which), self._memory.tensors
        if key not in known:
            known[key] = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
        return known[key]

    def span(self, columns: range) -> slice:
        """The columns of the matrix that a strip covers."""
        return slice(self.columns[columns[0]].start, self.columns[columns[-1]].stop)

    def complete(self, partial: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Adds to sums over this process's strips those of the others, in place.

        `given` is what they were made from beside the tiles; see `Ranks.sum_` for what is checked and raised.
        """
        if not self._agreed:
            length = whole_run(self.rows).length
            self.ranks.agree(f"shape {tuple(self.shape)}, rows in tiles of {length}", self._owner)
            self._agreed = True
        self.ranks.sum_(partial, given)

    def matmul(self, rhs: Tensor) -> Tensor:
        """The matrix times rhs [*b, m, s]."""
        batch = torch.broadcast_shapes(self.shape[:-2], rhs.shape[:-2])
        result = self._product([whole_run(self.rows)], [whole_run(self.columns)], rhs.expand(*batch, *rhs.shape[-2:]))
        self.complete([result], [rhs])
        return result

    # Parts of the matrix, without batch dimensions

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        """Those rows of the matrix times rhs [m, s]."""
        if not isinstance(rows, slice):
            return self._picked_rows_matmul(rows, rhs)
        result = self._product(tile_runs(self.rows, rows), [whole_run(self.columns)], rhs)
        self.complete([result], [rhs])
        return result

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        """Those columns of the matrix times rhs [len(columns), s]."""
        result = self._product([whole_run(self.rows)], tile_runs(self.columns, columns), rhs)
        self.complete([result], [rhs])
        return result

    def _product(self, rows: Sequence[TileRun], columns: Sequence[TileRun], rhs: Tensor) -> Tensor:
        """What this process's strips contribute to some rows and columns of the matrix times rhs [*b, len(columns), s]."""
        given = [RowBlocks.of(rhs[..., part.outer, :], part) for part in columns]
        results = [rhs[..., :0, :]]
        for part in rows:
            tasks = []
            for vectors in given:
                visits = self._visits.of(part.numbers, vectors.run.numbers)
                shares = self.shares(visits, [len(visit.needed) for visit in visits])
                tasks += [partial(self._share_of_product, part, vectors, share) for share in shares]
            with self.claimed():
                first, *others = run(tasks)
            for other in others:
                first.data += other.data
            results.append(first.vectors())
        return results[1] if len(results) == 2 else torch.cat(results, dim=-2)

    def _share_of_product(self, rows: TileRun, given: RowBlocks, visits: Sequence[Visit]) -> RowBlocks:
        """Every tile is visited once, and may serve twice: for itself, and for its transpose."""
        vectors, columns = given.data, given.run
        result = RowBlocks.zeros(vectors, (*vectors.shape[:-3], vectors.shape[-2]), rows)
        sums = RowSums(result, STRIP)
        for i, strip, needed, direct, mirrored in visits:
            tiles = self.strip_part(i, strip, needed)
            if direct:
                sums.add(i, given.part(direct), _inner(_picked(tiles, needed, direct), rows, columns))
            if mirrored:
                picked = _inner(_picked(tiles, needed, mirrored), columns, rows)
                add_product_(result.part(mirrored), given.repeated(i, len(mirrored)), picked)
        sums.finish()
        return result

    def _picked_rows_matmul(self, rows: Tensor, rhs: Tensor) -> Tensor:
        """Rows from everywhere, which no tiles are kept for: every process takes a share of the columns."""

        def product(share: Sequence[slice]) -> Tensor:
            result = rhs.new_zeros(len(rows), rhs.shape[-1])
            for columns in share:
                result.addmm_(self.block(rows, columns), rhs[columns])
            return result

        result = rhs.new_zeros(len(rows), rhs.shape[-1])
        for part in run(
            [partial(product, share) for share in self._pieces(len(rows), self.ranks.part(self.shape[-1]))]
        ):
            result += part
        self.complete([result], [rows, rhs])
        return result

    def dense_rows(self, rows: Tensor) -> Tensor:
        """Those rows, evaluated anew, [*b, len(rows), m]; every process evaluates them whole."""
        result = self._like.new_empty(*self.shape[:-2], len(rows), self.shape[-1])

        def fill(share: Sequence[slice]) -> None:
            for columns in share:
                result[..., columns] = self.block(rows, columns)

        run([partial(fill, share) for share in self._pieces(len(rows), slice(0, self.shape[-1]))])
        return result

    def _pieces(self, rows: int, columns: slice) -> list[Sequence[slice]]:
        """The columns of so many rows, some at a time, in shares."""
        entries = PICKED_ENTRIES.get(self._like.device.type, PICKED_ENTRIES["cuda"])
        length = max(entries // max(rows, 1), 1)
        pieces = [
            slice(columns.start + piece.start, columns.start + piece.stop)
            for piece in blocks(columns.stop - columns.start, length)
        ]
        return self.shares(pieces, [piece.stop - piece.start for piece in pieces])

    def shares(self, items: Sequence[Item], sizes: Sequence[float]) -> list[Sequence[Item]]:
        """What of the work each task takes; on a device other than a CPU there is one."""
        if self._like.device.type != "cpu":
            return [items]
        return shares(items, sizes)

    def principal_block(self, block: slice) -> Tensor:
        """The block on the diagonal, as a dense tensor: the caller's to overwrite.

        Every process evaluates it whole, and the same way: a kept strip may differ in the last bit from a single tile.
        """
        if not self.symmetric:
            raise ValueError("A rectangular kernel matrix has no principal blocks.")
        size = len(range(*block.indices(self.shape[-1])))
        result = self._like.new_empty(size, size)
        is_alone = self.ranks.size == 1

        def fill(rows: TileRun, columns: TileRun) -> None:
            i, j = rows.numbers.start, columns.numbers.start
            tile = self.tile(i, j) if is_alone else self._evaluated(i, columns.numbers).squeeze(-3)
            result[rows.outer, columns.outer] = tile = tile[rows.inner, columns.inner]
            if i != j:
                result[columns.outer, rows.outer] = tile.mT

        for pair in combinations_with_replacement(overlaps(self.rows, block), 2):
            fill(*pair)
        return result


def _neighbours(numbers: range, alone: Collection[int]) -> list[range]:
    """Numbers of tiles in strips of neighbours, which end at multiples of their length: the same ones in every row."""
    strips: list[range] = []
    for number in numbers:
        if strips and number % STRIP and number not in alone and strips[-1].start not in alone:
            strips[-1] = range(strips[-1].start, number + 1)
        else:
            strips.append(range(number, number + 1))
    return strips


def _picked(tiles: Tensor, numbers: range, wanted: range) -> Tensor:
    """Some of the tiles [*b, g, rows, columns] that have these numbers."""
    return tiles if wanted == numbers else tiles.narrow(-3, wanted.start - numbers.start, len(wanted))


def _inner(tiles: Tensor, rows: TileRun, columns: TileRun) -> Tensor:
    """The part of the tiles that both runs have."""
    return tiles if rows.is_whole and columns.is_whole else tiles[..., rows.inner, columns.inner]

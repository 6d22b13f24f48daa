"""Kernel matrices in square tiles, and the products that are made of them.

A symmetric matrix is evaluated in its upper triangle of tiles only, each of which serves twice. Evaluated tiles are kept
in a `TileCache` as far as its budget goes; all others are evaluated again for every product.

Where several processes share the matrix, each of them evaluates and multiplies its own tiles, and `complete` adds up
what they have found.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import combinations_with_replacement
from typing import TypeVar

import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.linear_operators.extensions import Rows
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.worker_threads import run, shares

Item = TypeVar("Item")

#: Numbers of columns for which a CPU multiplies tiles by them from the right, and not their transposes from the left.
FEW_COLUMNS = range(2, 9)
#: Entries of picked rows that are evaluated at a time: on a CPU they stay in its cache, on an accelerator they are bounded
#: by its memory.
PICKED_ENTRIES = {"cpu": 2**20, "cuda": 2**24}


def blocks(size: int, length: int) -> list[slice]:
    """Contiguous slices of the given length that cover range(size); the last may be shorter."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


class RowBlocks:
    """Vectors [*b, n, s] at the rows of neighbouring tiles: one contiguous, transposed block [*b, s, rows] for each tile.

    So every product of a tile reads contiguous memory and adds to it.

    Args:
        data: [*b, blocks, s, length]; rows beyond the matrix are zero.
        size: rows of the whole matrix.
        first: the first tile's number.
    """

    def __init__(self, data: Tensor, size: int, first: int = 0) -> None:
        self.data, self.numbers = data, range(first, first + data.shape[-3])
        self.num_rows = min(size - first * data.shape[-1], data.shape[-3] * data.shape[-1])
        self._blocks = list(data.unbind(-3))
        if self._blocks:
            self._blocks[-1] = self._blocks[-1][..., : self.num_rows - (len(self._blocks) - 1) * data.shape[-1]]

    @classmethod
    def of(cls, vectors: Tensor, size: int, length: int, start: int = 0) -> "RowBlocks":
        """Vectors [*b, n, s], whose first row is the row `start` of the matrix; other rows of their tiles are zero."""
        first, before = divmod(start, length)
        count = -(-(before + vectors.shape[-2]) // length)
        after = count * length - before - vectors.shape[-2]
        padded = torch.nn.functional.pad(vectors, (0, 0, before, after)).unflatten(-2, (count, length))
        return cls(padded.mT.clone(memory_format=torch.contiguous_format), size, first)

    def block(self, number: int) -> Tensor:
        """The block at the rows of a tile, [*b, s, rows]: a view."""
        return self._blocks[number - self.numbers.start]

    def vectors(self) -> Tensor:
        """[*b, rows of the tiles, s]."""
        return self.data.mT.flatten(-3, -2)[..., : self.num_rows, :]

    def rows(self, index: Tensor) -> Tensor:
        """Some rows, [*b, len(index), s], of blocks that begin with the first tile."""
        length = self.data.shape[-1]
        return self.data.mT[..., index // length, index % length, :]


def _add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left [*b, s, m] @ right [*b, m, k] to out [*b, s, k]."""
    if out.dim() == 2:
        out.addmm_(left, right)
    else:
        out += left @ right


class Tiles(ABC):
    """A matrix [*b, n, m] that is evaluated tile by tile, without autograd.

    Args:
        shape: of the matrix.
        symmetric: whether the tile (j, i) is the transpose of (i, j); only i <= j are asked for then.
        length: rows and columns of a tile; the last one may have fewer.
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
        length: int,
        owner: tuple[Tensor, ...],
        like: Tensor,
        products: KernelProducts,
        cache: TileCache,
    ) -> None:
        self.shape, self.symmetric, self.length, self.cache = shape, symmetric, length, cache
        self.rows, self.columns = blocks(shape[-2], length), blocks(shape[-1], length)
        self._owner, self._seen, self._like = owner, SeenVersions.of(owner), like
        self._memory = threading.local()
        self.ranks, self._agreed = products.ranks(), False
        self._budget = products.cache_budget(like.device)

    @abstractmethod
    def evaluate(self, i: int, j: int, out: Tensor) -> Tensor:
        """Writes the tile (i, j) into `out` [*b, rows, columns], and returns it."""

    @abstractmethod
    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """Any block, newly evaluated: the caller may overwrite it."""

    def is_current(self) -> bool:
        """Whether the tensors are unchanged since these tiles were made."""
        return self._seen.are(self._owner)

    def claimed(self) -> AbstractContextManager[None]:
        """Inside, the cache serves these tiles; `tile` may be called only there."""
        return self.cache.serving(*self._owner)

    def tile(self, i: int, j: int) -> Tensor:
        """The tile (i, j), [*b, rows, columns]. It must not be overwritten, and is valid until the thread's next call."""
        kept = self.cache.get((i, j))
        if kept is None and self._budget > 0:
            evaluate = partial(self._evaluate_to_keep, i, j)
            kept = self.cache.evaluate((i, j), self.tile_shape(i, j), self._like, self._budget, evaluate)
        return self.evaluate(i, j, self.scratch(self.tile_shape(i, j), 0)) if kept is None else kept

    def _evaluate_to_keep(self, i: int, j: int, out: Tensor) -> Tensor:
        return self.evaluate(i, j, out)

    def tile_shape(self, i: int, j: int) -> torch.Size:
        """[*b, rows, columns]."""
        rows, columns = self.rows[i], self.columns[j]
        return torch.Size((*self.shape[:-2], rows.stop - rows.start, columns.stop - columns.start))

    def scratch(self, shape: tuple[int, ...], which: int) -> Tensor:
        """Working memory that lives as long as this object: for every thread, one tensor for every shape and number."""
        known, key = self._memory.__dict__, (shape, which)
        if key not in known:
            known[key] = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
        return known[key]

    def complete(self, partial: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Adds to sums over this process's tiles those of the other processes, in place.

        `given` is what they were made from beside the tiles; see `Ranks.sum_` for what is checked and raised.
        """
        if self.ranks is None:
            return
        if not self._agreed:
            self.ranks.agree(f"shape {tuple(self.shape)}, rows in tiles of {self.length}", self._owner)
            self._agreed = True
        self.ranks.sum_(partial, given)

    def visits(self, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """The tiles (i, j) of this process in a product of some rows and columns of tiles; None is all of them."""
        rows = range(len(self.rows)) if rows is None else rows
        columns = range(len(self.columns)) if columns is None else columns
        tiles = [(i, j) for i in rows for j in columns]
        if self.symmetric:
            tiles = sorted({(i, j) if i <= j else (j, i) for i, j in tiles})
        return tiles if self.ranks is None else [tile for tile in tiles if self.ranks.owns(*tile)]

    def matmul(self, rhs: Tensor) -> Tensor:
        """The matrix times rhs [*b, m, s]."""
        batch = torch.broadcast_shapes(self.shape[:-2], rhs.shape[:-2])
        return self._product(slice(None), slice(None), rhs.expand(*batch, *rhs.shape[-2:]))

    # Parts of the matrix, without batch dimensions

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        """Those rows of the matrix times rhs [m, s].

        Rows from everywhere, given by an index, take no tiles: every process evaluates them for a share of the columns.
        """
        if isinstance(rows, slice):
            return self._product(rows, slice(None), rhs)

        def product(share: Sequence[slice]) -> Tensor:
            result = rhs.new_zeros(len(rows), rhs.shape[-1])
            for columns in share:
                result.addmm_(self.block(rows, columns), rhs[columns])
            return result

        columns = slice(0, self.shape[-1]) if self.ranks is None else self.ranks.part(self.shape[-1])
        result = sum(run([partial(product, share) for share in self._pieces(len(rows), columns)]))
        self.complete([result], [rows, rhs])
        return result

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        """Those columns of the matrix times rhs [len(columns), s]."""
        return self._product(slice(None), columns, rhs)

    def _product(
        self, rows: slice, columns: slice, rhs: Tensor, tile: Callable[[int, int], Tensor] | None = None
    ) -> Tensor:
        """Some rows and columns of the matrix times rhs [*b, len(columns), s], made of whole tiles.

        `tile` evaluates those of another matrix of the same shape and symmetry; None is `self.tile`.
        """
        tile = self.tile if tile is None else tile
        start, stop, _ = rows.indices(self.shape[-2])
        wanted = self._numbers(start, stop)
        given = RowBlocks.of(rhs, self.shape[-1], self.length, columns.indices(self.shape[-1])[0])
        tasks = [
            partial(self._share_of_product, wanted, given, tile, s)
            for s in self.shares(self.visits(wanted, given.numbers))
        ]
        with self.claimed():
            result, *others = run(tasks)
        for other in others:
            result.data += other.data
        first = wanted.start * self.length
        product = result.vectors()[..., start - first : stop - first, :]
        self.complete([product], [rhs])
        return product

    def _numbers(self, start: int, stop: int) -> range:
        """The tiles that some rows lie in."""
        return range(start // self.length, -(-stop // self.length) if start < stop else start // self.length)

    def _share_of_product(
        self,
        rows: range,
        given: RowBlocks,
        tile_at: Callable[[int, int], Tensor],
        visits: Sequence[tuple[int, int]],
    ) -> RowBlocks:
        """Every tile is visited once, and may serve twice: for itself, and for its transpose."""
        *batch, _, columns, length = given.data.shape
        result = RowBlocks(given.data.new_zeros(*batch, len(rows), columns, length), self.shape[-2], rows.start)
        is_few = columns in FEW_COLUMNS and given.data.device.type == "cpu"
        for i, j in visits:
            tile = tile_at(i, j)
            if i in rows and j in given.numbers:
                if is_few:
                    result.block(i).add_((tile @ given.block(j).mT).mT)
                else:
                    _add_product_(result.block(i), given.block(j), tile.mT)
            if self.symmetric and i != j and j in rows and i in given.numbers:
                _add_product_(result.block(j), given.block(i), tile)
        return result

    def dense_rows(self, rows: Tensor) -> Tensor:
        """Those rows, newly evaluated, [*b, len(rows), m]; every process evaluates them whole."""
        result = self._like.new_empty(*self.shape[:-2], len(rows), self.shape[-1])

        def fill(share: Sequence[slice]) -> None:
            for columns in share:
                result[..., columns] = self.block(rows, columns)

        run([partial(fill, share) for share in self._pieces(len(rows), slice(0, self.shape[-1]))])
        return result

    def _pieces(self, rows: int, columns: slice) -> list[Sequence[slice]]:
        """The columns of so many rows, some at a time, in shares."""
        entries = PICKED_ENTRIES.get(self._like.device.type, PICKED_ENTRIES["cuda"])
        pieces = blocks(columns.stop - columns.start, max(entries // max(rows, 1), 1))
        return self.shares([slice(columns.start + part.start, columns.start + part.stop) for part in pieces])

    def shares(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """The work of each task; on a device other than a CPU there is one task."""
        return shares(items) if self._like.device.type == "cpu" else [items]

    def principal_block(self, block: slice) -> Tensor:
        """The block on the diagonal, as a dense tensor that the caller may overwrite.

        Every process evaluates all of it, in the same way.
        """
        if not self.symmetric:
            raise ValueError("A rectangular kernel matrix has no principal blocks.")
        start, stop, _ = block.indices(self.shape[-1])
        is_alone = self.ranks is None
        numbers = self._numbers(start, stop)
        first, last = numbers.start * self.length, min(numbers.stop * self.length, self.shape[-1])
        result = self._like.new_empty(last - first, last - first)
        with self.claimed():
            for i, j in combinations_with_replacement(numbers, 2):
                tile = self.tile(i, j) if is_alone else self.evaluate(i, j, self.scratch(self.tile_shape(i, j), 0))
                rows, columns = (slice(part.start - first, part.stop - first) for part in (self.rows[i], self.rows[j]))
                result[rows, columns] = tile
                if i != j:
                    result[columns, rows] = tile.mT
        return result[start - first : stop - first, start - first : stop - first]

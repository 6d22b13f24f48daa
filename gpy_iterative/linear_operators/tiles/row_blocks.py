"""Vectors cut into the rows that face a tile each, as products of tiles read and write them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

#: Columns up to which a CPU multiplies tiles by them from the right, and not their transposes from the left.
FEW_COLUMNS = 8


@dataclass(frozen=True)
class TileRun:
    """Neighbouring rows (or columns) of tiles, whole ones or a part of one.

    Attributes:
        numbers: of the tiles.
        inner: rows of the tile, where it is a part of one; all of them otherwise.
        outer: the rows that they cover, of those that were asked for.
        length: rows of each; the last one may have fewer.
    """

    numbers: range
    inner: slice
    outer: slice
    length: int

    @property
    def is_whole(self) -> bool:
        """Whether these are whole tiles."""
        return self.inner == slice(None)


def whole_run(tiles: Sequence[slice]) -> TileRun:
    """All rows of tiles, each of which has as many as the first, but for the last."""
    stop = tiles[-1].stop if tiles else 0
    return TileRun(range(len(tiles)), slice(None), slice(0, stop), tiles[0].stop if tiles else 1)


def tile_runs(tiles: Sequence[slice], wanted: slice) -> list[TileRun]:
    """Some rows as runs of tiles: whole ones together, a part of one by itself. `wanted` has no step."""
    runs: list[TileRun] = []
    for part in overlaps(tiles, wanted):
        if part.is_whole and runs and runs[-1].is_whole:
            first = runs.pop()
            numbers = range(first.numbers.start, part.numbers.stop)
            part = TileRun(numbers, slice(None), slice(first.outer.start, part.outer.stop), first.length)
        runs.append(part)
    return runs


def overlaps(tiles: Sequence[slice], wanted: slice) -> list[TileRun]:
    """The same, tile by tile."""
    whole = whole_run(tiles)
    start, stop, _ = wanted.indices(whole.outer.stop)
    found = []
    for number in range(start // whole.length, -(-stop // whole.length)) if start < stop else ():
        tile = tiles[number]
        first, last = max(start, tile.start), min(stop, tile.stop)
        is_whole = (first, last) == (tile.start, tile.stop)
        inner = slice(None) if is_whole else slice(first - tile.start, last - tile.start)
        found.append(TileRun(range(number, number + 1), inner, slice(first - start, last - start), last - first))
    return found


class RowBlocks:
    """Vectors [*b, n, s] at the rows of a run of tiles, those of each tile together and transposed.

    So every product of a tile reads contiguous memory and adds to it, without a copy in between. Rows that the last block
    lacks are zero.

    Args:
        data: [*b, blocks, s, length].
        run: the tiles.
    """

    def __init__(self, data: Tensor, run: TileRun) -> None:
        self.data, self.run = data, run
        self._size = run.outer.stop - run.outer.start
        # Views of what is asked for again in every row of tiles: making one takes longer than finding it.
        self._parts: dict[range | tuple[int, int], Tensor] = {}

    @classmethod
    def of(cls, vectors: Tensor, run: TileRun) -> Self:
        """Vectors [*b, n, s] in blocks."""
        *batch, size, columns = vectors.shape
        # A copy even where one vector is contiguous already: it has other strides then, for which BLAS is slow.
        data = vectors.new_empty(*batch, len(run.numbers), columns, run.length)
        full, rest = divmod(size, run.length)
        data[..., :full, :, :] = vectors[..., : size - rest, :].unflatten(-2, (full, run.length)).mT
        if rest:
            data[..., full, :, :rest] = vectors[..., size - rest :, :].mT
            data[..., full, :, rest:] = 0
        return cls(data, run)

    @classmethod
    def zeros(cls, like: Tensor, shape: tuple[int, ...], run: TileRun) -> Self:
        """[*b, s] vectors of zeros, with the dtype and device of `like`."""
        *batch, columns = shape
        return cls(like.new_zeros(*batch, len(run.numbers), columns, run.length), run)

    def vectors(self) -> Tensor:
        """[*b, n, s] again."""
        return self.data.mT.flatten(-3, -2)[..., : self._size, :]

    def rows(self, index: Tensor) -> Tensor:
        """Some rows of the vectors, [*b, rows, s]."""
        return self.data.mT[..., index // self.run.length, index % self.run.length, :]

    def part(self, numbers: range) -> Tensor:
        """The blocks that face neighbouring tiles of equal shape, [*b, g, s, rows of one]: a view."""
        found = self._parts.get(numbers)
        if found is None:
            found = self._parts[numbers] = self._view(numbers)
        return found

    def repeated(self, number: int, count: int) -> Tensor:
        """The block that faces one tile, once for each of its neighbours in a row: [*b, count, s, rows], a view."""
        key = number, count
        found = self._parts.get(key)
        if found is None:
            block = self.part(range(number, number + 1))
            found = self._parts[key] = block.expand(*block.shape[:-3], count, *block.shape[-2:])
        return found

    def _view(self, numbers: range) -> Tensor:
        start = numbers.start - self.run.numbers.start
        blocks, width = self.data.narrow(-3, start, len(numbers)), self._size - start * self.run.length
        return blocks if width >= self.run.length else blocks[..., :width]


def block_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """[*b, 1 or g, m, k] times [*b, g, k, l], without the microseconds that `torch.matmul` takes to choose a product."""
    if left.dim() == right.dim() == 3:
        if left.shape[0] != right.shape[0]:
            left = left.expand(right.shape[0], -1, -1)
        return torch.bmm(left, right, out=out)
    return torch.matmul(left, right, out=out)


def add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left [*b, g, k, m] @ right [*b, g, m, l] to out [*b, g, k, l]."""
    if out.dim() == 3:
        out.baddbmm_(left, right)
    else:
        out += left @ right


class RowSums:
    """Sums over rows of tiles, each tile times the vectors that it faces, one row after the other.

    Neighbouring tiles go into one batched product. Its members are added up, and to the row's block, once a row.

    Args:
        result: what is added to.
        most: neighbouring tiles at the most.
    """

    def __init__(self, result: RowBlocks, most: int) -> None:
        self._result, self._most = result, most
        self._is_few = result.data.shape[-2] <= FEW_COLUMNS and result.data.device.type == "cpu"
        self._members = result.data.new_empty(0)
        self._row: Tensor | None = None

    def add(self, number: int, vectors: Tensor, tiles: Tensor) -> None:
        """Adds tiles [*b, g, rows, m] of a row times the vectors [*b, g, s, m] that they face."""
        row, count = self._result.part(range(number, number + 1)), tiles.shape[-3]
        if count == 1 and not self._is_few:
            add_product_(row, vectors, tiles.mT)
            return
        if row is not self._row:
            self._start(row)
        members = self._members if count == self._most else self._members[..., :count, :, :]
        if self._is_few:
            add_product_(members, tiles, vectors.mT)
        else:
            add_product_(members, vectors, tiles.mT)

    def _start(self, row: Tensor) -> None:
        self.finish()
        self._row = row
        *batch, _, columns, rows = row.shape
        shape = torch.Size((*batch, self._most, *((rows, columns) if self._is_few else (columns, rows))))
        if self._members.shape == shape:
            self._members.zero_()
        else:
            self._members = self._members.new_zeros(shape)

    def finish(self) -> None:
        """Adds what is still apart."""
        if self._row is not None:
            total = self._members.sum(-3, keepdim=True)
            self._row += total.mT if self._is_few else total
            self._row = None

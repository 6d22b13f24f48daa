"""Vectors cut into the rows that face a tile each, as products of tiles read and write them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gpy_iterative.linear_operators.precision import TileArithmetic

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
        self._parts: dict[range, Tensor] = {}

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


class RowSum:
    """The sum over one row of tiles, each times the vectors that it faces, added to one of the row blocks in the end.

    Neighbouring tiles go into one batched product, whose members are summed up only once a row.

    Args:
        result: what is added to.
        number: of the row of tiles.
        most: neighbouring tiles at the most.
        arithmetic: how tiles are multiplied.
    """

    def __init__(self, result: RowBlocks, number: int, most: int, arithmetic: TileArithmetic) -> None:
        self._row, self._most, self._arithmetic = result.part(range(number, number + 1)), most, arithmetic
        self._is_few = self._row.shape[-2] <= FEW_COLUMNS and self._row.device.type == "cpu"
        self._members: Tensor | None = None

    def add(self, vectors: Tensor, tiles: Tensor) -> None:
        """Adds tiles [*b, g, rows, m] times the vectors [*b, g, s, m] that they face."""
        count = tiles.shape[-3]
        if count == 1 and not self._is_few:
            sums = self._row
        else:
            if self._members is None:
                self._members = self._zeros()
            sums = self._members if count == self._most else self._members[..., :count, :, :]
        self._arithmetic.add_times_(sums, vectors, tiles.mT)

    def _zeros(self) -> Tensor:
        """[*b, most, s, rows]; for few columns these are neighbours in memory."""
        *batch, _, columns, rows = self._row.shape
        if self._is_few:
            return self._row.new_zeros(*batch, self._most, rows, columns).mT
        return self._row.new_zeros(*batch, self._most, columns, rows)

    def finish(self) -> None:
        """Adds what is still apart."""
        if self._members is not None:
            self._row += self._members.sum(-3, keepdim=True)

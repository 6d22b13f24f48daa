"""Which tiles a product of some rows and columns of a matrix takes, and what for."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

#: No tiles.
NONE = range(0)
#: Visits that are remembered, of a hundred bytes each: those of a solver that goes through the blocks of 200,000 rows and,
#: now and then, through all of them at once.
MOST = 2**17


class Visit(NamedTuple):
    """A strip of tiles, and what is taken of it.

    Attributes:
        row: of tiles.
        strip: the columns of tiles that were evaluated together.
        needed: those of them that have a part.
        direct: those that serve for themselves.
        mirrored: those of a symmetric matrix that serve for their transposes.
    """

    row: int
    strip: range
    needed: range
    direct: range
    mirrored: range


class TileVisits:
    """The visits of every product, remembered: a solver asks for the same ones at every iteration.

    Args:
        strips: of every row of tiles, those that this process has, in the order of the columns.
        symmetric: whether these are the upper triangle of a symmetric matrix.
        most: visits that are remembered, those of the products that were asked for last.
    """

    def __init__(self, strips: Sequence[Sequence[range]], *, symmetric: bool, most: int = MOST) -> None:
        self._strips, self._symmetric, self._most = strips, symmetric, most
        self._known: dict[tuple[range, range], list[Visit]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def of(self, rows: range, columns: range) -> list[Visit]:
        """Every tile that has a part in the product of some rows and columns of tiles, once, in the order of the rows."""
        with self._lock:
            found = self._known.pop((rows, columns), None)
            if found is None:
                found = list(self._found(rows, columns))
                self._count += len(found)
            self._known[rows, columns] = found  # the last of them now
            while self._count > self._most:
                self._count -= len(self._known.pop(next(iter(self._known))))
        return found

    def _found(self, rows: range, columns: range) -> Iterator[Visit]:
        for row in sorted({*rows, *columns}) if self._symmetric else rows:
            is_wanted, is_given = row in rows, self._symmetric and row in columns
            met = _hull(columns if is_wanted else NONE, rows if is_given else NONE)
            for strip in strips_with(met, self._strips[row]):
                direct = _common(strip, columns) if is_wanted else NONE
                mirrored = _common(strip, rows) if is_given and strip[0] != row else NONE
                needed = _hull(direct, mirrored)
                if needed:
                    yield Visit(row, strip, strip if needed == strip else needed, direct, mirrored)


def strips_with(columns: range, strips: Sequence[range]) -> Sequence[range]:
    """Those strips, given in order, that have any of these columns."""
    first = bisect_right(strips, columns.start, key=attrgetter("stop"))
    return strips[first : bisect_left(strips, columns.stop, first, key=attrgetter("start"))]


def _common(strip: range, wanted: range) -> range:
    """The strip itself where all of it is wanted."""
    if strip.start >= wanted.start and strip.stop <= wanted.stop:
        return strip
    return range(max(strip.start, wanted.start), min(strip.stop, wanted.stop))


def _hull(left: range, right: range) -> range:
    if not left or not right:
        return left or right
    return range(min(left.start, right.start), max(left.stop, right.stop))

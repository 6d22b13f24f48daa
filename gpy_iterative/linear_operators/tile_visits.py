"""Which tiles a product of some rows and columns of a matrix takes, and what for."""

from collections.abc import Sequence
from typing import NamedTuple

#: No tiles.
NONE = range(0)
#: Products whose visits are remembered. A solver that goes through the blocks of a matrix whose tiles are kept has no more.
PRODUCTS = 64


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
        strips: of every row of tiles, those that this process has.
        symmetric: whether these are the upper triangle of a symmetric matrix.
    """

    def __init__(self, strips: Sequence[Sequence[range]], *, symmetric: bool) -> None:
        self._strips, self._symmetric = strips, symmetric
        self._known: dict[tuple[range, range], list[Visit]] = {}

    def of(self, rows: range, columns: range) -> list[Visit]:
        """Every tile that has a part in the product of some rows and columns of tiles, once, in the order of the rows."""
        found = self._known.get((rows, columns))
        if found is None:
            found = [visit for row in range(len(self._strips)) for visit in self._in_row(row, rows, columns)]
            if len(self._known) >= PRODUCTS:
                self._known.pop(next(iter(self._known)))
            self._known[rows, columns] = found
        return found

    def _in_row(self, row: int, rows: range, columns: range) -> list[Visit]:
        is_wanted, is_given = row in rows, self._symmetric and row in columns
        found = []
        for strip in self._strips[row] if is_wanted or is_given else ():
            direct = _common(strip, columns) if is_wanted else NONE
            mirrored = _common(strip, rows) if is_given and strip[0] != row else NONE
            needed = _hull(strip, direct, mirrored)
            if needed:
                found.append(Visit(row, strip, needed, direct, mirrored))
        return found


def _common(strip: range, wanted: range) -> range:
    """The strip itself where all of it is wanted."""
    if strip.start >= wanted.start and strip.stop <= wanted.stop:
        return strip
    return range(max(strip.start, wanted.start), min(strip.stop, wanted.stop))


def _hull(strip: range, left: range, right: range) -> range:
    """Of two parts of a strip; the strip itself where that is all of it."""
    parts = [part for part in (left, right) if part]
    hull = range(min(part.start for part in parts), max(part.stop for part in parts)) if parts else NONE
    return strip if hull == strip else hull

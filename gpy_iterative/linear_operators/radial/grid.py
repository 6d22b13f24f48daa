"""Products of radial kernels at inputs on a grid, such as stations and days, some of whose cells may have no datum.

K = S (K_1 x K_2 x ...) S^T: K_a is the kernel matrix of the distinct inputs of an axis, and S picks the data's cells.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import combinations

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.masked import spread_rows
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.worker_threads import ByDevice

_ALL = slice(None)

#: Most cells for each datum.
MOST_CELLS = 8
#: Most cells without data for an exact factor, which may also be a quarter of the data.
MOST_EMPTY = 3000
#: Cells times columns that are multiplied at a time; they bound the memory of products.
ENTRIES = ByDevice(cpu=2**22, accelerator=2**27)


@dataclass(frozen=True, eq=False)
class Axis:
    """The distinct inputs of some factors of a product.

    Attributes:
        factors: their numbers.
        place: each datum's place among the distinct inputs, [n].
        size: the number of distinct inputs.
    """

    factors: tuple[int, ...]
    place: Tensor
    size: int

    @cached_property
    def first(self) -> Tensor:
        """A datum with each input, [size]."""
        data = torch.arange(len(self.place), device=self.place.device)
        return self.place.new_empty(self.size).scatter_(0, self.place, data)

    def in_order_of_data(self) -> tuple[Tensor, Tensor]:
        """`first` and `place` for distinct inputs in the order in which the data have them."""
        data = torch.arange(len(self.place), device=self.place.device)
        first = data.new_empty(self.size).scatter_reduce_(0, self.place, data, "amin", include_self=False)
        first, order = first.sort()
        return first, order.argsort()[self.place]

    def joined(self, other: "Axis") -> "Axis":
        return Axis(self.factors + other.factors, *_numbered(self.place * other.size + other.place))


def axes_of(inputs: Sequence[Tensor]) -> list[Axis]:
    """The axes of a grid for factors with inputs [n, d] each; none if a product of the matrix would cost more than n^2 / 2.

    Factors whose inputs go together, such as two kernels of time, share an axis. The inputs are without scales: a period
    moves points apart that lie on one another on its circle.
    """
    rows, axes = len(inputs[0]), []
    for number, x in enumerate(inputs):
        axis = repeated_inputs(x, rows / 2, (number,))
        if axis is None:
            return []
        axes.append(axis)
    while len(axes) > 1:
        pairs = [
            [axis for axis in axes if axis not in pair] + [pair[0].joined(pair[1])] for pair in combinations(axes, 2)
        ]
        cheapest = min(pairs, key=_cost)
        if _cost(cheapest) > _cost(axes):
            break
        axes = cheapest
    cells = math.prod(axis.size for axis in axes)
    return axes if len(axes) > 1 and cells <= MOST_CELLS * rows and _cost(axes) <= rows**2 / 2 else []


def repeated_inputs(x: Tensor, most: float, factors: tuple[int, ...] = ()) -> Axis | None:
    """The distinct inputs of x [n, d]; None if they are more than `most`, or need a gradient."""
    if x.requires_grad:
        return None
    place, size = x.new_zeros(len(x), dtype=torch.long), 1
    for column in x.unbind(-1):
        values, of_column = column.unique(return_inverse=True)
        place, size = _numbered(place * len(values) + of_column)
        if size > most:
            return None
    return Axis(factors, place, size)


def _numbered(codes: Tensor) -> tuple[Tensor, int]:
    values, place = codes.unique(return_inverse=True)
    return place, len(values)


def _cost(axes: Sequence[Axis]) -> int:
    """Multiply-adds of a product with one column."""
    sizes = [axis.size for axis in axes]
    return math.prod(sizes) * sum(sizes)


def cells_of(axes: Sequence[Axis]) -> Tensor:
    """Each datum's cell [n]."""
    cells = torch.zeros_like(axes[0].place)
    for axis in axes:
        cells = cells * axis.size + axis.place
    return cells


def most_empty(rows: int) -> float:
    """An exact factor costs more with more cells that have no datum."""
    return min(MOST_EMPTY, rows / 4)


def own_cells(axes: Sequence[Axis]) -> Tensor | None:
    """Each datum's cell [n]; None if two data share a cell, or many cells have none."""
    cells, size = cells_of(axes), math.prod(axis.size for axis in axes)
    if size - len(cells) > most_empty(len(cells)) or bool((cells.bincount(minlength=size) > 1).any()):
        return None
    return cells


def spread(vectors: Tensor, cells: Tensor, sizes: Sequence[int]) -> Tensor:
    """Vectors [n, s] of data with these cells, as sums [*sizes, s]."""
    return spread_rows(vectors, cells, math.prod(sizes)).unflatten(0, tuple(sizes))


def along_axis(cells: Tensor, number: int, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Cells [*sizes, s], multiplied along one axis by a function of columns [size, k]."""
    along = cells.movedim(number, 0)
    return multiply(along.flatten(1)).unflatten(1, along.shape[1:]).movedim(0, number)


def row_products(parts: Sequence[Tensor]) -> Tensor:
    """Rows [t, product of sizes]: Kronecker products of rows [t, size]."""
    return reduce(lambda left, right: (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(1), parts)


class Grid:
    """Data in the cells of a grid.

    Args:
        axes: of the grid.
        tiles: the kernel matrices of the axes' inputs, by axis; for each factor of an axis, as a function of it.
    """

    def __init__(self, axes: Sequence[Axis], tiles: Sequence[Sequence[RadialTiles]]) -> None:
        self.axes, self._tiles = axes, tiles
        self._shape = torch.Size(axis.size for axis in axes)
        self._cells = cells_of(axes)

    def columns(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors [*b, n, s] as columns [n, k], some at a time."""
        columns = vectors.movedim(-2, 0).flatten(1)
        return columns.split(max(ENTRIES.on(columns.device) // self._shape.numel(), 1), dim=1)

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors [n, s] in cells [*sizes, s]."""
        return spread(vectors, self._cells, self._shape)

    def picked(self, cells: Tensor) -> Tensor:
        return cells.flatten(0, -2).index_select(0, self._cells)

    def multiplied(self, cells: Tensor, *, without: Axis | None = None) -> Tensor:
        """Cells [*sizes, s] times the kernels of all axes, or all but one."""
        for number, (axis, tiles) in enumerate(zip(self.axes, self._tiles, strict=True)):
            if axis is not without:
                cells = along_axis(cells, number, partial(tiles[0].product, _ALL, _ALL))
        return cells

    def far_field_error(self) -> float | None:
        """The largest of an axis."""
        fields = [of_axis.far_field() for of_axis, *_ in self._tiles if isinstance(of_axis, RadialFarField)]
        return max((field.error for field in fields if field is not None), default=None)

    def of_factor(self, factor: int) -> tuple[Axis, int, RadialTiles]:
        """A factor's axis, the axis' number, and the axis' kernel as a function of the factor."""
        number, axis = next(pair for pair in enumerate(self.axes) if factor in pair[1].factors)
        return axis, number, self._tiles[number][axis.factors.index(factor)]

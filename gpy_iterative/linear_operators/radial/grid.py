"""Products of radial kernels at inputs on a grid, such as stations and days, some of whose cells may have no datum.

K = S (K_1 x K_2 x ...) S^T: K_a is the kernel matrix of the distinct inputs of an axis, and S picks the data's cells.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.far_field import FarField
from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.radial.product_tiles import ProductTiles
from gpy_iterative.linear_operators.radial.tiles import RadialDerivative, RadialTiles
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TileWeights
from gpy_iterative.worker_threads import ByDevice

_ALL = slice(None)

#: Most cells for each datum.
MOST_CELLS = 8
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

    def joined(self, other: "Axis") -> "Axis":
        return Axis(self.factors + other.factors, *_numbered(self.place * other.size + other.place))


def axes_of(inputs: Sequence[Tensor]) -> list[Axis]:
    """The axes of a grid for factors with inputs [n, d] each; none if a product of the matrix would cost more than n^2 / 2.

    Factors whose inputs go together, such as two kernels of time, share an axis. The inputs are without scales: a period
    moves points apart that lie on one another on its circle.
    """
    rows, axes = len(inputs[0]), []
    for number, x in enumerate(inputs):
        place, size = x.new_zeros(rows, dtype=torch.long), 1
        for column in x.unbind(-1):
            values, of_column = column.unique(return_inverse=True)
            place, size = _numbered(place * len(values) + of_column)
            if size > rows / 2:
                return []
        axes.append(Axis((number,), place, size))
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


def _numbered(codes: Tensor) -> tuple[Tensor, int]:
    values, place = codes.unique(return_inverse=True)
    return place, len(values)


def _cost(axes: Sequence[Axis]) -> int:
    """Multiply-adds of a product with one column."""
    sizes = [axis.size for axis in axes]
    return math.prod(sizes) * sum(sizes)


class Grid:
    """Data in the cells of a grid.

    Args:
        axes: of the grid.
        tiles: the kernel matrices of the axes' inputs, by axis; for each factor of an axis, as a function of it.
    """

    def __init__(self, axes: Sequence[Axis], tiles: Sequence[Sequence[RadialTiles]]) -> None:
        self.axes, self._tiles = axes, tiles
        self._shape = torch.Size(axis.size for axis in axes)
        cells = torch.zeros_like(axes[0].place)
        for axis in axes:
            cells = cells * axis.size + axis.place
        self._cells = cells

    def columns(self, vectors: Tensor) -> Sequence[Tensor]:
        """Vectors [*b, n, s] as columns [n, k], some at a time."""
        columns = vectors.movedim(-2, 0).flatten(1)
        return columns.split(max(ENTRIES.on(columns.device) // self._shape.numel(), 1), dim=1)

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors [n, s] in cells [*sizes, s]."""
        cells = vectors.new_zeros(self._shape.numel(), vectors.shape[-1])
        return cells.index_add_(0, self._cells, vectors).unflatten(0, self._shape)

    def picked(self, cells: Tensor) -> Tensor:
        return cells.flatten(0, -2).index_select(0, self._cells)

    def multiplied(self, cells: Tensor, *, without: Axis | None = None) -> Tensor:
        """Cells [*sizes, s] times the kernels of all axes, or all but one."""
        for number, (axis, tiles) in enumerate(zip(self.axes, self._tiles, strict=True)):
            if axis is not without:
                along = cells.movedim(number, 0)
                product = tiles[0].product(_ALL, _ALL, along.flatten(1))
                cells = product.view(along.shape).movedim(0, number)
        return cells

    def far_field_error(self) -> float | None:
        """The largest of an axis."""
        fields = [of_axis.far_field() for of_axis, *_ in self._tiles if isinstance(of_axis, RadialFarField)]
        return max((field.error for field in fields if field is not None), default=None)

    def of_factor(self, factor: int) -> tuple[Axis, int, RadialTiles]:
        """A factor's axis, the axis' number, and the axis' kernel as a function of the factor."""
        for number, axis in enumerate(self.axes):
            if factor in axis.factors:
                return axis, number, self._tiles[number][axis.factors.index(factor)]
        raise LookupError(f"No axis has factor {factor}.")


class GridTiles(ProductTiles):
    """`ProductTiles` whose products and derivatives use a grid, if data are on one.

    Args:
        args: of `ProductTiles`.
        make_grid: finds the grid, which the first tiles keep for all.
    """

    def __init__(self, *args: Any, make_grid: Callable[[], Grid | None]) -> None:
        super().__init__(*args)
        self._make_grid = make_grid

    @cached_property
    def grid(self) -> Grid | None:
        return self._make_grid() if self._first is None else self._first().grid

    def far_field(self) -> FarField | None:
        """See `RadialFarField`; none on a grid."""
        return None if self.grid is not None else super().far_field()

    def product(
        self, rows: slice, columns: slice, rhs: Tensor, values: Callable[[Any], Tensor] | None = None
    ) -> Tensor:
        grid = self.grid if rows == columns == _ALL and values is None else None
        if grid is None:
            return super().product(rows, columns, rhs, values)
        parts = [grid.picked(grid.multiplied(grid.spread(columns))) for columns in grid.columns(rhs)]
        return torch.cat(parts, dim=1).view(rhs.movedim(-2, 0).shape).movedim(0, -2)

    def derivative(self, weights: TileWeights, *, value: bool, alpha: bool) -> RadialDerivative:
        """See `RadialTiles.derivative`. One datum with each input of the axis takes the derivative of them all."""
        grid = self.grid if isinstance(weights, BilinearWeights) else None
        if grid is None:
            return super().derivative(weights, value=value, alpha=alpha)
        axis, number, tiles = grid.of_factor(self.number)
        parts = []
        for columns in zip(*map(grid.columns, weights.tensors), strict=True):
            left, right = map(grid.spread, columns)
            pair = (part.movedim(number, 0).flatten(1) for part in (left, grid.multiplied(right, without=axis)))
            of_axis = BilinearWeights(*pair, torch.Size(), tiles)
            parts.append(tiles.derivative(of_axis, value=value, alpha=alpha))
        sums = zip(*((part.x1, part.value, part.alpha) for part in parts), strict=True)
        x1, *others = (reduce(torch.add, each) for each in sums)
        return RadialDerivative(torch.zeros_like(self.x1).index_copy_(0, axis.first, x1), *others)

    def scale_products(self, rhs: Tensor) -> Tensor:
        return self._by_factor(rhs, lambda tiles, vectors: tiles.scale_products(vectors), super().scale_products)

    def alpha_product(self, rhs: Tensor) -> Tensor:
        return self._by_factor(rhs, lambda tiles, vectors: tiles.alpha_product(vectors), super().alpha_product)

    def _by_factor(
        self,
        rhs: Tensor,
        on_axis: Callable[[RadialTiles, Tensor], Tensor],
        on_tiles: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """[*b, n, k] for rhs [*b, n, 1], from a batch of vectors on the factor's axis."""
        grid = self.grid
        if grid is None:
            return on_tiles(rhs)
        axis, number, tiles = grid.of_factor(self.number)

        def multiply(vectors: Tensor) -> Tensor:
            along = grid.multiplied(grid.spread(vectors), without=axis).movedim(number, 0)
            found = on_axis(tiles, along.flatten(1).mT.unsqueeze(-1))  # [rest s, size, k]
            found = found.movedim(0, 1).unflatten(1, along.shape[1:]).movedim(0, number)
            return grid.picked(found.flatten(-2))

        columns = rhs.movedim(-2, 0).flatten(1)
        return multiply(columns).view(len(columns), *rhs.shape[:-2], -1).movedim(0, -2)

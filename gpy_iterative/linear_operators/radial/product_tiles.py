"""Tiles of a product of radial kernels, as a function of one factor; products and derivatives on a grid (`grid.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.linear_operators.far_field.entries import ProductEntries
from gpy_iterative.linear_operators.far_field.far_field import FarField
from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.grid import Grid
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.tiles import RadialDerivative, RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TileWeights

_ALL = slice(None)


class ProductTiles(RadialFarField):
    """One factor's tiles, times those of others. Products and derivatives use a grid, if data are on one.

    Args:
        factors: of the product.
        number: of the factor whose derivatives these tiles have.
        products: of the first factor's tiles, which may have a far field.
        make_grid: finds the grid, or None.
        first: finds the first factor's tiles, which keep tiles, grid and far field for all; None: these are.
    """

    def __init__(
        self,
        factors: Sequence[RadialKernelLinearOperator],
        number: int,
        products: KernelProducts,
        make_grid: Callable[[], Grid | None],
        first: "Callable[[], ProductTiles] | None",
    ) -> None:
        factor, bare = factors[number], replace(products, cache_memory=0, far_field=None)
        self._make_grid, self._first = make_grid, first
        products, cache = (products, factor.cache) if first is None else (bare, TileCache())
        super().__init__(
            factor.x1, factor.x2, factor.function, factor.alpha, products, cache, angles=factor.angles, number=number
        )
        self._others = [
            RadialFarField(other.x1, other.x2, other.function, other.alpha, bare, TileCache(), number=place)
            for place, other in enumerate(factors)
            if place != number
        ]
        self.owner = (*self.owner, *(tensor for other in self._others for tensor in other.owner))
        self.seen = SeenVersions.of(self.owner)

    @cached_property
    def grid(self) -> Grid | None:
        return self._make_grid() if self._first is None else self._first().grid

    @property
    def entries(self) -> ProductEntries:
        """Only of the first factor's tiles."""
        return ProductEntries([each.own_entries for each in (self, *self._others)])

    def far_field(self) -> FarField | None:
        if self._first is not None:
            return self._first().far_field()
        is_single = self.grid is None and self.symmetric and len(self.shape) == 2
        return super().far_field() if is_single and self.products.may_have_far_field(self.x1) else None

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
        columns = rhs.movedim(-2, 0).flatten(1)
        along = grid.multiplied(grid.spread(columns), without=axis).movedim(number, 0)
        found = on_axis(tiles, along.flatten(1).mT.unsqueeze(-1))  # [rest s, size, k]
        found = found.movedim(0, 1).unflatten(1, along.shape[1:]).movedim(0, number)
        return grid.picked(found.flatten(-2)).view(len(columns), *rhs.shape[:-2], -1).movedim(0, -2)

    def evaluate(self, tile: Any, out: Tensor) -> Tensor:
        return self._times_others(tile, super().evaluate(tile, out))[0]

    def evaluate_both(self, tile: Any, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        value, derivative = self._times_others(tile, *super().evaluate_both(tile, value, derivative))
        return value, derivative

    def alpha_derivatives(self, tile: Any) -> Tensor:
        return self._times_others(tile, super().alpha_derivatives(tile))[0]

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        others = [other.block(rows, columns) for other in self._others]
        return reduce(torch.mul, others, super().block(rows, columns))

    def _times_others(self, tile: Any, *blocks: Tensor) -> tuple[Tensor, ...]:
        """Multiplies the blocks in place."""
        for other in self._others:
            entries = other.evaluate(tile, other.scratch(tile.shape, 0))
            for block in blocks:
                block.mul_(entries)
        return blocks

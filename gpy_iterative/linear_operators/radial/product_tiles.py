"""Tiles of a product of radial kernels, as a function of one factor."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.linear_operators.far_field.entries import ProductEntries
from gpy_iterative.linear_operators.far_field.far_field import FarField
from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.tiles.cache import TileCache


class ProductTiles(RadialFarField):
    """One factor's tiles, times those of others.

    Args:
        factors: of the product.
        number: of the factor whose derivatives these tiles have.
        products: of the first factor's tiles, which may have a far field.
        first: finds the first factor's tiles, which keep tiles and far field for all; None: these are.
    """

    def __init__(
        self,
        factors: Sequence[RadialKernelLinearOperator],
        number: int,
        products: KernelProducts,
        first: "Callable[[], Any] | None",
    ) -> None:
        factor, bare = factors[number], replace(products, cache_memory=0, far_field=None)
        self._first = first
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

    @property
    def entries(self) -> ProductEntries:
        """See `RadialFarField`; only of the first factor's tiles."""
        return ProductEntries([each.own_entries for each in (self, *self._others)])

    def far_field(self) -> FarField | None:
        """See `RadialFarField`."""
        if self._first is not None:
            return self._first().far_field()
        may_have = self.symmetric and len(self.shape) == 2 and self.products.may_have_far_field(self.x1)
        return super().far_field() if may_have else None

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

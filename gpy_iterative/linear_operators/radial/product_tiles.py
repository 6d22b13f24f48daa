"""Tiles of a product of radial kernels."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache


class ProductTiles(RadialTiles):
    """The first factor's tiles, times those of others."""

    def __init__(
        self, first: RadialKernelLinearOperator, others: Sequence[RadialKernelLinearOperator], keeps_tiles: bool
    ) -> None:
        bare = replace(first.products, cache_memory=0)
        products, cache = (first.products, first.cache) if keeps_tiles else (bare, TileCache())
        super().__init__(first.x1, first.x2, first.function, first.alpha, products, cache)
        self._others = [RadialTiles(o.x1, o.x2, o.function, o.alpha, bare, TileCache()) for o in others]
        self.owner = (*self.owner, *(tensor for other in self._others for tensor in other.owner))
        self.seen = SeenVersions.of(self.owner)

    def evaluate(self, tile: Any, out: Tensor) -> Tensor:
        return self._times_others(tile, super().evaluate(tile, out))[0]

    def evaluate_both(self, tile: Any, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        value, derivative = self._times_others(tile, *super().evaluate_both(tile, value, derivative))
        return value, derivative

    def alpha_derivatives(self, tile: Any) -> Tensor:
        return self._times_others(tile, super().alpha_derivatives(tile))[0]

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        return reduce(torch.mul, [other.block(rows, columns) for other in self._others], super().block(rows, columns))

    def _times_others(self, tile: Any, *blocks: Tensor) -> tuple[Tensor, ...]:
        """Multiplies the blocks in place."""
        for other in self._others:
            entries = other.evaluate(tile, other.scratch(tile.shape, 0))
            for block in blocks:
                block.mul_(entries)
        return blocks

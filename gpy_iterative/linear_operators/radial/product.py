"""Products of radial kernels, entry by entry, such as a Matern kernel of space and one of time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator, TileWeights
from gpy_iterative.linear_operators.tiles.tiles import Tiles


class RadialProductLinearOperator(TiledLinearOperator):
    """The product of radial kernel matrices, entry by entry, in tiles.

    Args:
        factors: of one shape, products and cache; those after the first have no outputscale.

    A product of the matrix costs one evaluation of each factor, or n m s multiply-adds of kept tiles; the derivative costs
    such an evaluation for each factor.
    """

    def __init__(self, *factors: RadialKernelLinearOperator) -> None:
        super().__init__(*factors)
        self.factors, first = factors, factors[0]
        self.products, self.cache, self.symmetric = first.products, first.cache, first.symmetric
        self.tile_scale = first.tile_scale
        self.angles = sum(factor.angles for factor in factors)

    @classmethod
    def of(cls, factors: Sequence[LinearOperator]) -> "RadialProductLinearOperator":
        """Factors of several batch shapes."""
        batch = torch.broadcast_shapes(*(factor.batch_shape for factor in factors))
        same = lambda factor: factor if factor.batch_shape == batch else factor._expand_batch(batch)
        return cls(*map(same, factors))

    @cached_property
    def by_factor(self) -> list["ProductByFactor"]:
        """The product as functions of one factor each; the first keeps tiles."""
        first, *rest = self.factors
        scale = first.outputscale.detach()
        found = [ProductByFactor(first, rest, first.outputscale, keeps_tiles=True)]
        for number, factor in enumerate(rest):
            others = [first, *rest[:number], *rest[number + 1 :]]
            found.append(ProductByFactor(factor, others, scale, keeps_tiles=False))
        return found

    def tiles(self) -> Tiles:
        return self.by_factor[0].tiles()

    def _size(self) -> torch.Size:
        return self.factors[0].shape

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        return self._differentiable_values() @ rhs

    def _differentiable_values(self) -> Tensor:
        return reduce(torch.mul, [factor._differentiable_values() for factor in self.factors])

    def _tile_derivatives(self, weights: TileWeights) -> tuple[Tensor | None, ...]:
        return tuple(part for product in self.by_factor for part in product._tile_derivatives(weights))

    def _diagonal(self) -> Tensor:
        return reduce(torch.mul, [factor._diagonal() for factor in self.factors])

    def to_dense(self) -> Tensor:
        return reduce(torch.mul, [factor.to_dense() for factor in self.factors])

    def principal_blocks(self, rows: Tensor) -> Tensor:
        """See `extensions.principal_blocks`; differentiable."""
        return reduce(torch.mul, [factor.principal_blocks(rows) for factor in self.factors])

    def kernel_inputs(self) -> Tensor:
        """See `extensions.kernel_inputs`."""
        return torch.cat([factor.kernel_inputs() for factor in self.factors], dim=-1)

    def _on_factors(self, change: Callable[[RadialKernelLinearOperator], Any]) -> LinearOperator:
        return type(self)(*map(change, self.factors))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return self._on_factors(lambda factor: factor._getitem(row_index, col_index, *batch_indices))

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        entries = [factor._get_indices(row_index, col_index, *batch_indices) for factor in self.factors]
        return reduce(torch.mul, entries)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else self._on_factors(lambda factor: factor._transpose_nonbatch())

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._on_factors(lambda factor: factor._expand_batch(batch_shape))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._on_factors(lambda factor: factor._unsqueeze_batch(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._on_factors(lambda factor: factor._permute_batch(*dims))

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        first, *rest = self.factors
        return type(self)(first._mul_constant(other), *rest)

    def low_precision_copy(self) -> LinearOperator:
        """See `extensions.low_precision_copy`."""
        return self._on_factors(lambda factor: factor.low_precision_copy())

    def with_products(self, *, change: Callable[[KernelProducts], KernelProducts]) -> LinearOperator:
        """See `extensions.with_products`."""
        return self._on_factors(lambda factor: factor.with_products(change=change))

    def in_float64(self, *, keeps_tiles: bool = True) -> LinearOperator:
        """See `extensions.in_float64`."""
        return self._on_factors(lambda factor: factor.in_float64(keeps_tiles=keeps_tiles))


class ProductByFactor(RadialKernelLinearOperator):
    """A product as a function of one factor: its derivatives. The others are constants."""

    def __init__(
        self,
        factor: RadialKernelLinearOperator,
        others: Sequence[RadialKernelLinearOperator],
        outputscale: Tensor,
        *,
        keeps_tiles: bool,
    ) -> None:
        super().__init__(factor.x1, outputscale, **factor._kwargs)
        self._others, self._keeps_tiles = others, keeps_tiles

    def _make_tiles(self) -> RadialTiles:
        return _ProductTiles(self, self._others, self._keeps_tiles)


class _ProductTiles(RadialTiles):
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

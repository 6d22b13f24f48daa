"""Products of radial kernels, entry by entry, such as a Matern kernel of space and one of time."""

from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.grid import Axis, Grid, GridTiles, axes_of
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator, TileWeights


class RadialProductLinearOperator(TiledLinearOperator):
    """The product of radial kernel matrices, entry by entry, in tiles.

    Args:
        factors: of one shape, products and cache; those after the first have no outputscale.
        structured: how products on the axes of a grid are computed; None looks for no grid.
        has_far_field: whether these options may give the product a far field.

    A product of the matrix costs one evaluation of each factor, or n m s multiply-adds of kept tiles; the derivative costs
    such an evaluation for each factor. A symmetric matrix of data in the cells of an S x T grid costs S T (S + T) s.
    """

    def __init__(
        self,
        *factors: RadialKernelLinearOperator,
        structured: KernelProducts | None = None,
        has_far_field: bool = False,
    ) -> None:
        super().__init__(*factors, structured=structured, has_far_field=has_far_field)
        self.factors, self._structured, first = factors, structured, factors[0]
        self._own_products = structured if structured is not None and has_far_field else first.products
        self.products, self.cache, self.symmetric = first.products, first.cache, first.symmetric
        self.tile_scale = first.tile_scale
        self.angles = sum(factor.angles for factor in factors)

    @classmethod
    def of(cls, factors: Sequence[LinearOperator], **options: Any) -> "RadialProductLinearOperator":
        """Factors of several batch shapes."""
        batch = torch.broadcast_shapes(*(factor.batch_shape for factor in factors))
        same = lambda factor: factor if factor.batch_shape == batch else factor._expand_batch(batch)
        return cls(*map(same, factors), **options)

    @cached_property
    def by_factor(self) -> list["ProductByFactor"]:
        """The product as functions of one factor each; the first keeps tiles, and the grid or far field."""
        return [ProductByFactor(self, number) for number in range(len(self.factors))]

    def tiles(self) -> GridTiles:
        return self.by_factor[0].tiles()

    def make_tiles(self, number: int) -> GridTiles:
        """As a function of this factor."""
        first = None if number == 0 else self.tiles
        return GridTiles(self.factors, number, self._own_products, first, make_grid=self._make_grid)

    def _make_grid(self) -> Grid | None:
        products = self._structured
        if products is None or self.batch_shape or not self.symmetric:
            return None
        axes = axes_of([factor.x1.detach() for factor in self.factors])
        return Grid(axes, [self._tiles_on(axis, products, str(i)) for i, axis in enumerate(axes)]) if axes else None

    def _tiles_on(self, axis: Axis, products: KernelProducts, name: str) -> list[RadialTiles]:
        cache = self.cache.part(name)
        operators = [
            RadialKernelLinearOperator(
                factor.x1.detach()[axis.first],
                factor.x1.new_ones(()),
                alpha=None if factor.alpha is None else factor.alpha.detach(),
                function=factor.function,
                angles=factor.angles,
                products=products,
                cache=cache,
            )
            for factor in (self.factors[number] for number in axis.factors)
        ]
        parts = operators if len(operators) == 1 else type(self)(*operators).by_factor
        return [part.tiles() for part in parts]

    def has_fast_products(self) -> bool:
        """See `extensions.has_fast_products`."""
        return self.tiles().grid is not None

    def far_field_error(self) -> float | None:
        """See `extensions.far_field_error`."""
        grid, field = self.tiles().grid, self.tiles().far_field()
        if grid is not None:
            return grid.far_field_error()
        return None if field is None else field.error

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
        return type(self)(*map(change, self.factors), **self._kwargs)

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
        return type(self)(first._mul_constant(other), *rest, **self._kwargs)

    def low_precision_copy(self) -> LinearOperator:
        """See `extensions.low_precision_copy`."""
        return self._on_factors(lambda factor: factor.low_precision_copy())

    def with_products(self, *, change: Callable[[KernelProducts], KernelProducts]) -> LinearOperator:
        """See `extensions.with_products`."""
        factors = [factor.with_products(change=change) for factor in self.factors]
        structured = None if self._structured is None else change(self._structured)
        return type(self)(*factors, **self._kwargs | {"structured": structured})

    def in_float64(self, *, keeps_tiles: bool = True) -> LinearOperator:
        """See `extensions.in_float64`."""
        return self._on_factors(lambda factor: factor.in_float64(keeps_tiles=keeps_tiles))


class ProductByFactor(RadialKernelLinearOperator):
    """A product as a function of one factor: its derivatives. The others are constants."""

    def __init__(self, product: RadialProductLinearOperator, number: int) -> None:
        factor, outputscale = product.factors[number], product.factors[0].outputscale
        super().__init__(factor.x1, outputscale.detach() if number else outputscale, **factor._kwargs)
        self._product, self._number = product, number

    def _make_tiles(self) -> GridTiles:
        return self._product.make_tiles(self._number)

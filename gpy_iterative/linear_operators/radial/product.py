"""Products of radial kernels, entry by entry, such as a Matern kernel of space and one of time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.far_field.far_field import automatic_tolerance
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.grid import ENTRIES, Axis, Grid, cells_of, own_cells, row_products, spread
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.product_tiles import ProductTiles
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator, TileWeights
from gpy_iterative.linear_operators.tiles.tiles import blocks

_ALL = slice(None)


class RadialProductLinearOperator(TiledLinearOperator):
    """The product of radial kernel matrices, entry by entry, in tiles.

    Args:
        factors: of one shape and cache, without far fields; those after the first have no outputscale.
        products: of the whole matrix and of a grid's axes; None: those of the factors.
        axes: of a grid, if the columns' inputs are on one (see `grid.py`).
        is_smooth: whether the whole matrix may have a far field.

    A product of the matrix costs one evaluation of each factor, or n m s multiply-adds of kept tiles; the derivative costs
    such an evaluation for each factor. A symmetric matrix of data in the cells of an S x T grid costs S T (S + T) s.
    """

    def __init__(
        self,
        *factors: RadialKernelLinearOperator,
        products: KernelProducts | None = None,
        axes: Sequence[Axis] = (),
        is_smooth: bool = True,
    ) -> None:
        first = factors[0]
        products = first.products if products is None else products
        super().__init__(*factors, products=products, axes=axes, is_smooth=is_smooth)
        self.factors, self.products, self._axes, self._is_smooth = factors, products, axes, is_smooth
        self.cache, self.symmetric, self.tile_scale = first.cache, first.symmetric, first.tile_scale
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
        # Functions of the operator itself would be a cycle of references, which keeps memory.
        axes = self._axes if self.symmetric and not self.batch_shape else ()
        make_grid = partial(_make_grid, axes, self.factors, self.products, self.cache)
        products = self.products if self._is_smooth else replace(self.products, far_field=None)
        found: list[ProductByFactor] = []
        for number, factor in enumerate(self.factors):
            first = found[0].tiles if found else None
            make_tiles = partial(ProductTiles, self.factors, number, products, make_grid, first)
            scale = self.factors[0].outputscale
            found.append(ProductByFactor(factor, scale.detach() if found else scale, make_tiles))
        return found

    def tiles(self) -> ProductTiles:
        return self.by_factor[0].tiles()

    def has_fast_products(self) -> bool:
        return self.tiles().grid is not None

    def grid_cells(self) -> Tensor | None:
        """Each column's cell, see `own_cells`; None if the columns' inputs are on no such grid."""
        return own_cells(self._axes) if self._axes and not self.batch_shape else None

    def axis_kernels(self) -> list[LinearOperator]:
        """The kernel matrices of the distinct inputs of all axes, with graph."""
        return self._by_axis(lambda factor, first: factor.at(factor.x1[first]))

    def axis_rows(self) -> list[LinearOperator]:
        """Rows [t, size] for all axes, with graph: the matrix's rows are their products."""
        return self._by_axis(lambda factor, first: factor[:, first])

    def _by_axis(
        self, part: Callable[[RadialKernelLinearOperator, Tensor], RadialKernelLinearOperator]
    ) -> list[LinearOperator]:
        found = [[part(self.factors[number], axis.first) for number in axis.factors] for axis in self._axes]
        return [parts[0] if len(parts) == 1 else RadialProductLinearOperator(*parts) for parts in found]

    def far_field_error(self) -> float | None:
        grid, field = self.tiles().grid, self.tiles().far_field()
        if grid is not None:
            return grid.far_field_error()
        return None if field is None else field.error

    def _size(self) -> torch.Size:
        return self.factors[0].shape

    def _matmul(self, rhs: Tensor) -> Tensor:
        needs_graph = torch.is_grad_enabled() and any(each.requires_grad for each in (*self.representation(), rhs))
        if self.symmetric or not self._axes or self.batch_shape or rhs.dim() > 2 or needs_graph:
            return super()._matmul(rhs)
        with torch.no_grad():
            first, *others = [axis.to_dense() for axis in self.axis_rows()]
            cells = spread(rhs, cells_of(self._axes), (first.shape[-1], math.prod(each.shape[-1] for each in others)))
            parts = []
            for rows in blocks(len(first), max(ENTRIES.on(rhs.device) // cells[0].numel(), 1)):
                along = (first[rows] @ cells.flatten(1)).unflatten(1, cells.shape[1:])
                parts.append(torch.einsum("tr,trs->ts", row_products([each[rows] for each in others]), along))
            return torch.cat(parts)

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
        return reduce(torch.mul, [factor.principal_blocks(rows) for factor in self.factors])

    def kernel_inputs(self) -> Tensor:
        return torch.cat([factor.kernel_inputs() for factor in self.factors], dim=-1)

    def _on_factors(self, change: Callable[[RadialKernelLinearOperator], Any], **options: Any) -> LinearOperator:
        return type(self)(*map(change, self.factors), **self._kwargs | options)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        axes = self._axes if isinstance(col_index, slice) and col_index == _ALL else ()
        return self._on_factors(lambda factor: factor._getitem(row_index, col_index, *batch_indices), axes=axes)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        entries = [factor._get_indices(row_index, col_index, *batch_indices) for factor in self.factors]
        return reduce(torch.mul, entries)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else self._on_factors(lambda factor: factor._transpose_nonbatch(), axes=())

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._on_factors(lambda factor: factor._expand_batch(batch_shape), axes=())

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        first, *rest = self.factors
        return type(self)(first._mul_constant(other), *rest, **self._kwargs)

    # Documented in `extensions.py`

    def low_precision_copy(self) -> LinearOperator:
        return self._on_factors(lambda factor: factor.low_precision_copy(), products=self.products.native())

    def in_float64(self, *, keeps_tiles: bool = True) -> LinearOperator:
        products = self.products.native(keeps_tiles=keeps_tiles)
        return self._on_factors(lambda factor: factor.in_float64(keeps_tiles=keeps_tiles), products=products)


class ProductByFactor(RadialKernelLinearOperator):
    """A product as a function of one factor: its derivatives. The others are constants."""

    def __init__(
        self, factor: RadialKernelLinearOperator, outputscale: Tensor, make_tiles: Callable[[], ProductTiles]
    ) -> None:
        super().__init__(factor.x1, outputscale, **factor._kwargs)
        self._tiles_of_product = make_tiles

    def _make_tiles(self) -> ProductTiles:
        return self._tiles_of_product()


def _make_grid(
    axes: Sequence[Axis], factors: Sequence[RadialKernelLinearOperator], products: KernelProducts, cache: TileCache
) -> Grid | None:
    tiles = [
        _tiles_on(axis, [factors[number] for number in axis.factors], products, cache.part(str(i)))
        for i, axis in enumerate(axes)
    ]
    return Grid(axes, tiles) if axes else None


def _tiles_on(
    axis: Axis, factors: Sequence[RadialKernelLinearOperator], products: KernelProducts, cache: TileCache
) -> list[RadialTiles]:
    if len(factors) > 1 or not products.may_have_far_field(axis.first):  # factors may have kinks at different points
        products = replace(products, far_field=None)
    elif products.far_field == "auto":  # errors are repeated along the other axes
        products = replace(products, far_field=automatic_tolerance(len(axis.place), factors[0].dtype))
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
        for factor in factors
    ]
    parts = operators if len(operators) == 1 else RadialProductLinearOperator(*operators).by_factor
    return [part.tiles() for part in parts]

"""Tiles of a radial kernel matrix, and the derivative of a weighted sum of its entries in one pass over them.

With G the weights times df/dq, the derivative with respect to an input is the sum over j of 2 G_ij (x_i - x_j). Two matrix
products give it, G x and G 1. In float32 their difference loses the digits that x has in front of x_i - x_j. So coordinates
that stretch over hundreds of lengthscales, whose differences `SquaredDistances` takes one by one, are differences here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import RadialFunction
from gpy_iterative.linear_operators.radial.fused import fused_value_, fused_value_and_derivative_
from gpy_iterative.linear_operators.radial.squared_distances import SquaredDistances
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TileWeights
from gpy_iterative.linear_operators.tiles.tiles import RowBlocks, Tiles
from gpy_iterative.worker_threads import run


class RadialTiles(Tiles):
    """f(|x1_i - x2_j|^2) in tiles, without the outputscale; symmetric when x2 is None.

    Args:
        x1, x2: scaled inputs [*b, n, d] and [*b, m, d] (or None).
        function, alpha: the radial function, and its alpha [*b, 1] or None.
        products: tile size, memory for kept tiles, compilation.
        cache: where evaluated tiles are kept.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor | None,
        function: RadialFunction,
        alpha: Tensor | None,
        products: KernelProducts,
        cache: TileCache,
    ) -> None:
        self.x1, self.x2 = x1.detach(), None if x2 is None else x2.detach()
        self.alpha = None if alpha is None else alpha.detach()
        columns = self.x1 if self.x2 is None else self.x2
        self._is_fused, length = products.is_fused(x1.device), products.tile_rows(x1.device)
        scale = function.scale(self.alpha)
        self.distances = SquaredDistances(self.x1, columns, scale, has_kink=function.has_kink, length=length)
        self.function = function if self.distances.together else function.at_exact_distances()
        super().__init__(
            torch.Size((*self.distances.batch_shape, x1.shape[-2], columns.shape[-2])),
            symmetric=x2 is None,
            length=length,
            # The tensors themselves, not detached copies: the cache recognises them.
            owner=tuple(tensor for tensor in (x1, x2, alpha) if tensor is not None),
            like=x1,
            products=products,
            cache=cache,
        )

    def evaluate(self, i: int, j: int, out: Tensor) -> Tensor:
        u = self._squared_distances(i, j, out)
        if self._is_fused:
            return fused_value_(self.function, u, self.alpha)
        return self.function.value_(self.function.clamp_(u), self.scratch(out.shape, 1), self.alpha)

    @property
    def keeps_derivatives(self) -> bool:
        """Whether df/dq is kept beside f, for the gradient that follows: one evaluation gives both."""
        return any(tensor.requires_grad for tensor in self._owner)

    def _evaluate_to_keep(self, i: int, j: int, out: Tensor) -> Tensor:
        if self.keeps_derivatives:
            evaluate = lambda derivative: self._evaluate_both(i, j, out, derivative)[1]
            if self.cache.derivatives.evaluate((i, j), out.shape, out, self._budget, evaluate) is not None:
                return out
        return super()._evaluate_to_keep(i, j, out)

    def value_and_derivative(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        """The tile (i, j) of f, and that of df/dq over its factor; see `tile`."""
        if self.keeps_derivatives:
            value, derivative = self.cache.get((i, j)), self.cache.derivatives.get((i, j))
            if value is not None and derivative is not None:
                return value, derivative
        shape = self.tile_shape(i, j)
        return self._evaluate_both(i, j, self.scratch(shape, 0), self.scratch(shape, 1))

    def _evaluate_both(self, i: int, j: int, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        u = self._squared_distances(i, j, value)
        if self._is_fused:
            return fused_value_and_derivative_(self.function, u, derivative, self.alpha)
        return self.function.value_and_derivative_(self.function.clamp_(u), derivative, self.alpha)

    def alpha_derivative(self, i: int, j: int) -> Tensor:
        """df/dalpha in the tile (i, j)."""
        u = self._squared_distances(i, j, self.scratch(self.tile_shape(i, j), 0))
        return self.function.alpha_derivative(self.function.clamp_(u), self.alpha)

    def _squared_distances(self, i: int, j: int, out: Tensor) -> Tensor:
        """May be slightly negative; zero on the diagonal, whatever the rounding."""
        u = self.distances.tile(i, j, out=out, scratch=self.scratch(out.shape, 1))
        if self.symmetric and i == j:
            u.diagonal(dim1=-2, dim2=-1).zero_()
        return u

    def derivative(
        self, weights: TileWeights, *, value: bool, alpha: bool, scales_only: bool = False
    ) -> "RadialDerivative":
        """The derivative for W = weights, in one pass.

        `value` and `alpha` say whether these parts are wanted; they are 0 where not. `scales_only` takes one GEMM less.
        """
        return _DerivativePass(self, weights, value=value, alpha=alpha, scales_only=scales_only).run()

    def scale_products(self, rhs: Tensor) -> Tensor:
        """sum_j G_ij (x_i - x_j)^2 rhs_j by coordinate, [*b, n, d], with G = df/dq over its factor, for rhs [*b, n, 1].

        x^2 (G a) - 2 x G (x a) + G (x^2 a) for coordinates that share a product; from the differences for those apart.
        """
        derivative = lambda i, j: self.value_and_derivative(i, j)[1]
        x = self.x1[..., self.distances.together]
        columns = torch.cat([rhs, x * rhs, x.square() * rhs], dim=-1)
        product = self._product(slice(None), slice(None), columns, derivative)
        plain, once, twice = product.split([1, x.shape[-1], x.shape[-1]], dim=-1)
        found = torch.empty_like(rhs.expand(*rhs.shape[:-1], self.x1.shape[-1]))
        found[..., self.distances.together] = x.square() * plain - 2 * x * once + twice
        for number, coordinate in enumerate(self.distances.apart):
            weighted = lambda i, j, n=number: derivative(i, j) * self.distances.difference(n, i, j).square()
            found[..., coordinate] = self._product(slice(None), slice(None), rhs, weighted).squeeze(-1)
        return found

    def alpha_derivative_matmul(self, rhs: Tensor) -> Tensor:
        """df/dalpha [*b, n, m] times rhs [*b, m, s]."""
        return self._product(slice(None), slice(None), rhs, self.alpha_derivative)

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        chosen = torch.arange(self.shape[-2], device=self.x1.device)[rows]  # any kind of index
        first, stop, step = columns.indices(self.shape[-1])
        u = self.distances.block(chosen, torch.arange(first, stop, step, device=chosen.device))
        if self.symmetric:
            _zero_own_distances(u, chosen, first)
        self.function.clamp_(u)
        return self.function.value_(u, torch.empty_like(u), self.alpha)


def _zero_own_distances(u: Tensor, rows: Tensor, first: int) -> None:
    """Zero where a row meets its own column, of distances [*b, rows, columns] from the column `first` on."""
    place = (rows - first).expand(u.shape[:-1]).unsqueeze(-1)
    index = place.clamp(0, u.shape[-1] - 1)
    u.scatter_(-1, index, u.gather(-1, index).masked_fill(index == place, 0.0))


@dataclass(frozen=True)
class RadialDerivative:
    """The derivative of sum_ij W_ij f(|x1_i - x2_j|^2) for weights W.

    Attributes:
        x1: with respect to x1, [*b, n, d]; of a symmetric matrix through its rows and its columns. Where only the scales of
            the coordinates are wanted, something that has the same inner products with the coordinates of x1.
        x2: with respect to x2, [*b, m, d]; None for a symmetric matrix.
        value: the sum itself, [*b] in float64.
        alpha: with respect to alpha, [*b] in float64.
    """

    x1: Tensor
    x2: Tensor | None
    value: Tensor
    alpha: Tensor


def derivative_of_scales(scales: Tensor, x1: Tensor) -> Tensor:
    """A derivative [*b, n, d] with respect to x1 whose inner products with its coordinates are given, [*b, d] in float64.

    Along x1 itself, so that the inner products have no terms that cancel.
    """
    squares = x1.double().square().sum(-2)
    return ((scales / squares.clamp_min(torch.finfo(torch.float64).tiny)).unsqueeze(-2) * x1).to(x1.dtype)


@dataclass(frozen=True)
class _Sums:
    """Sums over some of the tiles, in float64, since parts of them cancel.

    Attributes:
        rows, columns: G times coordinates and ones, then the coordinates that are taken apart; one object for a symmetric
            matrix.
        scales: of coordinates that are taken apart, [*b, a].
        value, alpha: see `RadialDerivative`.
    """

    rows: RowBlocks
    columns: RowBlocks
    scales: Tensor
    value: Tensor
    alpha: Tensor

    def add_(self, other: "_Sums") -> None:
        """Adds the sums over other tiles."""
        self.rows.data.add_(other.rows.data)
        if self.columns is not self.rows:
            self.columns.data.add_(other.columns.data)
        for own, others in ((self.scales, other.scales), (self.value, other.value), (self.alpha, other.alpha)):
            own.add_(others)


class _DerivativePass:
    """One pass over the tiles; the arguments are those of `RadialTiles.derivative`."""

    def __init__(
        self, tiles: RadialTiles, weights: TileWeights, *, value: bool, alpha: bool, scales_only: bool
    ) -> None:
        self._tiles, self._weights, self._value, self._alpha = tiles, weights, value, alpha
        # x^T G x' is x^T G^T x', so that one of the two products, twice, does for the scales of a symmetric matrix.
        self._is_one_sided = scales_only and tiles.symmetric
        self._together, self._apart = tiles.distances.together, tiles.distances.apart
        self._x1 = self._with_ones(tiles.x1)
        self._x2 = self._x1 if tiles.x2 is None else self._with_ones(tiles.x2)

    def _with_ones(self, x: Tensor) -> RowBlocks:
        """The coordinates of inputs [*b, n, d] that one product serves, and ones."""
        vectors = torch.cat([x[..., self._together], x.new_ones(*x.shape[:-1], 1)], dim=-1)
        vectors = vectors.expand(*self._weights.batch_shape, *vectors.shape[-2:])
        return RowBlocks.of(vectors, x.shape[-2], self._tiles.length)

    def run(self) -> RadialDerivative:
        """The whole derivative."""
        tiles = self._tiles
        with tiles.claimed():
            sums, *others = run([partial(self._share, share) for share in tiles.shares(tiles.visits())])
        for other in others:
            sums.add_(other)
        factor = 2 * tiles.function.derivative_factor
        x2 = None
        if self._is_one_sided:
            x1 = derivative_of_scales(factor * self._scales(sums), tiles.x1)
        else:
            x1 = factor * self._inputs(sums.rows, self._x1)
            x2 = None if tiles.symmetric else factor * self._inputs(sums.columns, self._x2)
        x1, x2 = (None if found is None else found.to(tiles.x1.dtype) for found in (x1, x2))
        parts = [part for part in (x1, x2, sums.value, sums.alpha) if part is not None]
        tiles.complete(parts, self._weights.tensors)
        return RadialDerivative(x1, x2, sums.value, sums.alpha)

    def _zeros(self) -> _Sums:
        batch = self._weights.batch_shape
        zeros = partial(self._tiles.x1.new_zeros, dtype=torch.float64)
        sums_like = lambda x: RowBlocks(
            zeros(*batch, len(x.numbers), len(self._together) + 1 + len(self._apart), self._tiles.length), x.num_rows
        )
        rows = sums_like(self._x1)
        columns = rows if self._tiles.symmetric else sums_like(self._x2)
        return _Sums(rows, columns, zeros(*batch, len(self._apart)), zeros(batch), zeros(batch))

    def _share(self, visits: Sequence[tuple[int, int]]) -> _Sums:
        tiles, sums, count = self._tiles, self._zeros(), len(self._together) + 1
        for i, j in visits:
            out = tiles.scratch((*self._weights.batch_shape, *tiles.tile_shape(i, j)[-2:]), 2)
            weights = self._weights.tile(i, j, out=out)
            if self._alpha:
                sums.alpha.add_((tiles.alpha_derivative(i, j) * weights).sum((-2, -1), dtype=torch.float64))
            value, derivative = tiles.value_and_derivative(i, j)
            if self._value:
                sums.value.add_(torch.linalg.vecdot(value.flatten(-2), weights.flatten(-2)))
            weights.mul_(derivative)
            direct, mirrored = sums.rows.block(i), sums.columns.block(j)
            if self._apart:
                self._add_apart(weights, i, j, sums)
                direct, mirrored = direct[..., :count, :], mirrored[..., :count, :]
            direct += self._x2.block(j) @ weights.mT
            if self._is_one_sided:
                mirrored[..., -1:, :].add_(weights.sum(-2, keepdim=True))
            else:
                mirrored += self._x1.block(i) @ weights
        return sums

    def _add_apart(self, weights: Tensor, i: int, j: int, sums: _Sums) -> None:
        """Adds the weighted differences of coordinates that are taken apart, or for scales their weighted squares."""
        first = len(self._together) + 1
        for number in range(len(self._apart)):
            difference = self._tiles.distances.difference(number, i, j)
            weighted = weights * difference
            if self._is_one_sided:
                sums.scales[..., number] += weighted.mul_(difference).sum((-2, -1), dtype=torch.float64)
            else:
                sums.rows.block(i)[..., first + number, :] += weighted.sum(-1, dtype=torch.float64)
                sums.columns.block(j)[..., first + number, :] -= weighted.sum(-2, dtype=torch.float64)

    def _inputs(self, sums: RowBlocks, inputs: RowBlocks) -> Tensor:
        """sum_j G_ij (x_i - x_j), [*b, n, d]."""
        found, count = sums.data, len(self._together)
        products, ones, apart = found[..., :count, :], found[..., count : count + 1, :], found[..., count + 1 :, :]
        derivative = torch.empty_like(torch.cat([products, apart], dim=-2))
        derivative[..., self._together, :] = ones * inputs.data[..., :count, :] - products
        derivative[..., self._apart, :] = apart
        return RowBlocks(derivative, inputs.num_rows).vectors()

    def _scales(self, sums: _Sums) -> Tensor:
        """sum_ij G_ij (x_i - x_j)^2, [*b, d], from rows of the upper triangle of tiles."""
        found, count = sums.rows.data, len(self._together)
        coordinates = self._x1.data[..., :count, :].double()
        terms = found[..., count : count + 1, :] * coordinates - 2 * found[..., :count, :]
        scales = sums.scales.new_empty(*sums.scales.shape[:-1], count + len(self._apart))
        scales[..., self._together] = (terms * coordinates).sum((-3, -1))
        scales[..., self._apart] = sums.scales
        return scales

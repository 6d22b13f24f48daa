"""The derivative of a weighted sum of a radial kernel's entries, in one pass over its tiles.

With G the weights times df/dq, the derivative with respect to an input is the sum over j of 2 G_ij (x_i - x_j). Two matrix
products make it, G x and G 1. In float32 their difference loses the digits that x has in front of x_i - x_j, so
coordinates that stretch over hundreds of lengthscales, which `SquaredDistances` takes apart, are taken apart here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpy_iterative.linear_operators.tiles.row_blocks import RowBlocks, block_product, whole_run
from gpy_iterative.linear_operators.tiles.weights import TileWeights
from gpy_iterative.worker_threads import run

if TYPE_CHECKING:
    from gpy_iterative.linear_operators.radial.tiles import RadialTiles


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
    """What some of the tiles contribute, in float64.

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
        """Adds what other tiles contribute."""
        self.rows.data.add_(other.rows.data)
        if self.columns is not self.rows:
            self.columns.data.add_(other.columns.data)
        for own, others in ((self.scales, other.scales), (self.value, other.value), (self.alpha, other.alpha)):
            own.add_(others)


class DerivativePass:
    """One pass over the tiles.

    Args:
        tiles: of the matrix.
        weights: W.
        value, alpha: whether these parts are wanted; they are 0 where not.
        scales_only: takes one GEMM less.
    """

    def __init__(
        self, tiles: "RadialTiles", weights: TileWeights, *, value: bool, alpha: bool, scales_only: bool
    ) -> None:
        self._tiles, self._weights, self._value, self._alpha = tiles, weights, value, alpha
        # x^T G x' is x^T G^T x', so that one of the two products, twice, does for the scales of a symmetric matrix.
        self._is_one_sided = scales_only and tiles.symmetric
        self._together, self._apart = tiles.distances.together, tiles.distances.apart
        self._x1 = _with_ones(tiles.x1[..., self._together], weights.batch_shape, tiles.rows)
        self._x2 = self._x1
        if tiles.x2 is not None:
            self._x2 = _with_ones(tiles.x2[..., self._together], weights.batch_shape, tiles.columns)

    def run(self) -> RadialDerivative:
        """The whole derivative."""
        tiles, weights = self._tiles, self._weights
        visits = [(i, columns) for i, strips in enumerate(tiles.strips) for columns in strips]
        shares = tiles.shares(visits, [len(columns) for _, columns in visits])
        with tiles.claimed():
            sums, *others = run([partial(self._share, share) for share in shares])
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
        tiles.complete([part for part in (x1, x2, sums.value, sums.alpha) if part is not None], weights.tensors)
        return RadialDerivative(x1, x2, sums.value, sums.alpha)

    def _share(self, visits: Sequence[tuple[int, range]]) -> _Sums:
        tiles, batch = self._tiles, self._weights.batch_shape
        # Sums of many products, in float64: parts of them cancel. (With float32 gradients on elevators are off by 5e-5, in
        # place of 3e-5, at lengthscales of .3, and a fiftieth of a training step is saved.)
        wide = tiles.x1.new_zeros((), dtype=torch.float64)
        size = (*batch, len(self._together) + 1 + len(self._apart))
        sums1 = RowBlocks.zeros(wide, size, self._x1.run)
        sums2 = sums1 if tiles.symmetric else RowBlocks.zeros(wide, size, self._x2.run)
        sums = _Sums(
            sums1, sums2, wide.new_zeros(*batch, len(self._apart)), wide.new_zeros(batch), wide.new_zeros(batch)
        )
        for i, columns in visits:
            row = range(i, i + 1)
            strip = self._weights.strip(i, columns, out=tiles.scratch((*batch, *tiles.strip_shape(i, columns)[-3:]), 2))
            if self._alpha:
                sums.alpha.add_((tiles.alpha_derivative(i, columns) * strip).sum((-3, -2, -1), dtype=torch.float64))
            function_value, function_derivative = tiles.value_and_derivative(i, columns)
            if self._value:
                sums.value.add_(torch.linalg.vecdot(function_value.flatten(-3), strip.flatten(-3)))
            strip.mul_(function_derivative)
            direct, mirrored = sums1.part(row), sums2.part(columns)
            if self._apart:
                self._add_apart(strip, i, columns, sums, direct, mirrored)
                count = len(self._together) + 1
                direct, mirrored = direct[..., :count, :], mirrored[..., :count, :]
            direct += block_product(self._x2.part(columns), strip.mT).sum(-3, keepdim=True)
            if self._is_one_sided:
                mirrored[..., -1:, :].add_(strip.sum(-2, keepdim=True))
            else:
                mirrored += block_product(self._x1.part(row), strip)
        return sums

    def _add_apart(self, strip: Tensor, i: int, columns: range, sums: _Sums, direct: Tensor, mirrored: Tensor) -> None:
        """Adds the weighted differences of coordinates that are taken apart, or where scales do their squares."""
        first = len(self._together) + 1
        for number in range(len(self._apart)):
            difference = self._tiles.distances.difference(number, i, columns)
            weighted = strip * difference
            if self._is_one_sided:
                sums.scales[..., number] += weighted.mul_(difference).sum((-3, -2, -1), dtype=torch.float64)
            else:
                direct[..., first + number, :] += weighted.sum((-3, -1), dtype=torch.float64).unsqueeze(-2)
                mirrored[..., first + number, :] -= weighted.sum(-2, dtype=torch.float64)

    def _inputs(self, sums: RowBlocks, inputs: RowBlocks) -> Tensor:
        """sum_j G_ij (x_i - x_j), [*b, n, d]."""
        found, count = sums.data, len(self._together)
        products, ones, apart = found[..., :count, :], found[..., count : count + 1, :], found[..., count + 1 :, :]
        derivative = torch.empty_like(torch.cat([products, apart], dim=-2))
        derivative[..., self._together, :] = ones * inputs.data[..., :count, :] - products
        derivative[..., self._apart, :] = apart
        return RowBlocks(derivative, inputs.run).vectors()

    def _scales(self, sums: _Sums) -> Tensor:
        """sum_ij G_ij (x_i - x_j)^2, [*b, d], from rows of the upper triangle of tiles."""
        found, count = sums.rows.data, len(self._together)
        coordinates = self._x1.data[..., :count, :].double()
        terms = found[..., count : count + 1, :] * coordinates - 2 * found[..., :count, :]
        scales = sums.scales.new_empty(*sums.scales.shape[:-1], count + len(self._apart))
        scales[..., self._together] = (terms * coordinates).sum((-3, -1))
        scales[..., self._apart] = sums.scales
        return scales


def _with_ones(x: Tensor, batch: torch.Size, tiles: list[slice]) -> RowBlocks:
    """The coordinates of inputs [*b, n, d], and ones."""
    vectors = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)
    return RowBlocks.of(vectors.expand(*batch, *vectors.shape[-2:]), whole_run(tiles))

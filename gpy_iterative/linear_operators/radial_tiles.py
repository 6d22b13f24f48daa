"""Tiles of a radial kernel matrix: squared distances, mostly from one GEMM, and a few in-place passes each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as keep
from functools import cached_property
from types import FunctionType

import torch
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial_functions import RadialFunction
from gpy_iterative.linear_operators.row_blocks import RowBlocks, block_product, whole_run
from gpy_iterative.linear_operators.squared_distances import SquaredDistances
from gpy_iterative.linear_operators.tile_cache import TileCache
from gpy_iterative.linear_operators.tile_weights import TileWeights
from gpy_iterative.linear_operators.tiles import Tiles, blocks


def _compiled(evaluate: FunctionType, function: RadialFunction, dtype: torch.dtype) -> Callable[..., None]:
    """The passes over a tile in one loop.

    In code of their own: one piece of code is compiled so many times, for other shapes and batch dimensions, and then
    runs pass by pass.
    """
    evaluate.__code__ = evaluate.__code__.replace(co_name=f"{evaluate.__name__}_{function.name}_{dtype}")
    return torch.compile(evaluate, dynamic=True)


@keep
def _fused_value(function: RadialFunction, dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], None]:
    """Clamp and radial function, in place, in one compiled loop."""

    def evaluate(u: Tensor, alpha: Tensor | None) -> None:
        u.copy_(function.value(function.clamp_(u), alpha))

    return _compiled(evaluate, function, dtype)


@keep
def _fused_value_and_derivative(
    function: RadialFunction, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor | None], None]:
    """Clamp, radial function and its derivative, in place, in one compiled loop."""

    def evaluate(u: Tensor, derivative: Tensor, alpha: Tensor | None) -> None:
        function.value_and_derivative_(function.clamp_(u), derivative, alpha)

    return _compiled(evaluate, function, dtype)


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
        self.function = function
        self.alpha = None if alpha is None else alpha.detach()
        self._strip_alpha = None if alpha is None else alpha.detach().unsqueeze(-1)
        columns = self.x1 if self.x2 is None else self.x2
        self._is_fused, length = products.is_fused(x1.device), products.tile_rows(x1.device)
        tiles = {"rows": blocks(x1.shape[-2], length), "columns": blocks(columns.shape[-2], length)}
        self._distances = SquaredDistances(self.x1, columns, function.scale(self.alpha), **tiles)
        super().__init__(
            torch.Size((*self._distances.batch_shape, x1.shape[-2], columns.shape[-2])),
            symmetric=x2 is None,
            **tiles,
            # The very tensors, not detached copies: they are what the cache recognises its owner by.
            owner=tuple(tensor for tensor in (x1, x2, alpha) if tensor is not None),
            products=products,
            cache=cache,
        )

    def evaluate(self, i: int, columns: range, out: Tensor) -> Tensor:
        u = self._squared_distances(i, columns, out)
        if self._is_fused:
            _fused_value(self.function, u.dtype)(u, self._strip_alpha)
            return u
        return self.function.value_(self.function.clamp_(u), self.scratch(out.shape, 1), self._strip_alpha)

    @property
    def keeps_derivatives(self) -> bool:
        """Whether df/dq is kept beside f, whose evaluation has it at hand: a gradient that follows needs both."""
        return any(tensor.requires_grad for tensor in self._owner)

    def _evaluated_to_keep(self, i: int, columns: range, out: Tensor) -> Tensor:
        if self.keeps_derivatives and out.dtype == self._like.dtype:
            evaluate = lambda derivative: self._evaluate_both(i, columns, out, derivative)[1]
            kept = self.cache.derivatives().evaluate((i, columns[0]), out.shape, out, self._budget, evaluate)
            if kept is not None:
                return out
        return super()._evaluated_to_keep(i, columns, out)

    def value_and_derivative(self, i: int, columns: range) -> tuple[Tensor, Tensor]:
        """F, and df/dq over its factor, of a strip: valid as what `strip_part` returns is, and of a claimed cache."""
        kept = self._kept_value_and_derivative(i, columns)
        if kept is not None:
            return kept
        shape = self.strip_shape(i, columns)
        return self._evaluate_both(i, columns, self.scratch(shape, 0), self.scratch(shape, 1))

    def _kept_value_and_derivative(self, i: int, columns: range) -> tuple[Tensor, Tensor] | None:
        if not self.keeps_derivatives:
            return None
        key = (i, columns[0])
        value, derivative = self.cache.get(key), self.cache.derivatives().get(key)
        return None if value is None or derivative is None else (value, derivative)

    def _evaluate_both(self, i: int, columns: range, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        u = self._squared_distances(i, columns, value)
        if self._is_fused:
            _fused_value_and_derivative(self.function, u.dtype)(u, derivative, self._strip_alpha)
            return u, derivative
        return self.function.value_and_derivative_(self.function.clamp_(u), derivative, self._strip_alpha)

    def alpha_derivative(self, i: int, columns: range) -> Tensor:
        """df/dalpha of a strip."""
        out = self.scratch(self.strip_shape(i, columns), 0)
        u = self.function.clamp_(self._squared_distances(i, columns, out))
        return self.function.alpha_derivative(u, self._strip_alpha)

    def derivative(
        self, weights: TileWeights, *, value: bool, alpha: bool, scales_only: bool = False
    ) -> RadialDerivative:
        """The derivative for W = weights, in one pass.

        `value` and `alpha` say whether these parts are wanted; they are 0 where not. `scales_only` takes one GEMM less.
        """
        batch, dimension = weights.batch_shape, self.x1.shape[-1]
        x1 = _with_ones(self.x1, batch, self.rows)
        x2 = x1 if self.x2 is None else _with_ones(self.x2, batch, self.columns)
        # x^T G x' is x^T G^T x', so that one of the two products, twice, does for the scales of a symmetric matrix.
        is_one_sided = scales_only and self.symmetric
        # Sums of many products, in float64: parts of them cancel. (With float32 gradients on elevators are off by 5e-5, in
        # place of 3e-5, at lengthscales of .3, and a fiftieth of a training step is saved.)
        wide = self.x1.new_zeros((), dtype=torch.float64)
        sums1 = RowBlocks.zeros(wide, (*batch, dimension + 1), x1.run)
        sums2 = sums1 if self.symmetric else RowBlocks.zeros(wide, (*batch, dimension + 1), x2.run)
        dvalue, dalpha = wide.new_zeros(batch), wide.new_zeros(batch)
        self._claim()
        for i in range(len(self.rows)):
            row = range(i, i + 1)
            own, direct = x1.part(row), sums1.part(row)
            for columns in self.strips[i]:
                shape = torch.Size((*batch, *self.strip_shape(i, columns)[-3:]))
                strip = weights.strip(i, columns, out=self.scratch(shape, 2))
                if alpha:
                    dalpha += (self.alpha_derivative(i, columns) * strip).sum((-3, -2, -1), dtype=torch.float64)
                function_value, function_derivative = self.value_and_derivative(i, columns)
                if value:
                    dvalue += torch.linalg.vecdot(function_value.flatten(-3), strip.flatten(-3))
                strip.mul_(function_derivative)
                direct += block_product(x2.part(columns), strip.mT).sum(-3, keepdim=True)
                mirrored = sums2.part(columns)
                if is_one_sided:
                    mirrored[..., -1:, :].add_(strip.sum(-2, keepdim=True))
                else:
                    mirrored += block_product(own, strip)
        if is_one_sided:
            sums1.data[..., :-1, :] *= 2
        factor = 2 * self.function.derivative_factor
        dx1 = _input_derivative(sums1, x1, factor)
        dx2 = None if self.symmetric else _input_derivative(sums2, x2, factor)
        self.complete([dx1, dvalue, dalpha] if dx2 is None else [dx1, dx2, dvalue, dalpha], weights.tensors)
        return RadialDerivative(dx1, dx2, dvalue, dalpha)

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        chosen = self._row_numbers[rows]
        first, stop, step = columns.indices(self.shape[-1])
        u = self._distances.block(chosen, torch.arange(first, stop, step, device=chosen.device))
        if self.symmetric:
            _zero_own_distances(u, chosen, first)
        self.function.clamp_(u)
        return self.function.value_(u, torch.empty_like(u), self.alpha)

    @cached_property
    def _row_numbers(self) -> Tensor:
        """Of all rows: what an index, whatever its kind, picks from."""
        return torch.arange(self.shape[-2], device=self.x1.device)

    def _squared_distances(self, i: int, columns: range, out: Tensor) -> Tensor:
        """May be slightly negative; zero on the diagonal, whatever the rounding."""
        scratch = self.scratch(out.shape, 1)
        u = self._distances.strip(i, columns, out=out, scratch=scratch)
        if self.symmetric and i == columns[0]:
            u.diagonal(dim1=-2, dim2=-1).zero_()
        return u


def _zero_own_distances(u: Tensor, rows: Tensor, first: int) -> None:
    """Zero where a row meets its own column, of distances [*b, rows, columns] from the column `first` on."""
    place = (rows - first).expand(u.shape[:-1]).unsqueeze(-1)
    index = place.clamp(0, u.shape[-1] - 1)
    u.scatter_(-1, index, u.gather(-1, index).masked_fill(index == place, 0.0))


def _with_ones(x: Tensor, batch: torch.Size, tiles: list[slice]) -> RowBlocks:
    """The coordinates of inputs [*b, n, d], and ones."""
    vectors = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1)
    return RowBlocks.of(vectors.expand(*batch, *vectors.shape[-2:]), whole_run(tiles))


def _input_derivative(sums: RowBlocks, x: RowBlocks, factor: float) -> Tensor:
    """A factor times (diag(G 1) x - G x') [*b, n, d] for G = weights, from G times x' and ones."""
    found, inputs = sums.data, x.data
    derivative = factor * (found[..., -1:, :] * inputs[..., :-1, :] - found[..., :-1, :])
    return RowBlocks(derivative.to(inputs.dtype), x.run).vectors()

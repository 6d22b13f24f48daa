"""Tiles of a radial kernel matrix, and derivatives of a weighted sum of its entries.

With G the weights times df/dq, the derivative by x_i is sum_j 2 G_ij (x_i - x_j): from G x and G 1, or from differences
for coordinates apart (`SquaredDistances`), which would lose digits.
"""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import RadialFunction
from gpy_iterative.linear_operators.radial.squared_distances import FEW_OF_KINK, FEW_OF_PREDICTION, SquaredDistances
from gpy_iterative.linear_operators.tiles.cache import Tile, TileCache
from gpy_iterative.linear_operators.tiles.operator import TileWeights
from gpy_iterative.linear_operators.tiles.tiles import Tiles

#: The centre is the mean of so many rows and columns, in so many steps to 1, so that it is the same on all processors.
CENTRE_POINTS, CENTRE_STEPS = 64, 64
LEAST_CENTRE = 0.25
#: Least `rounding`, because vectors round, too.
LEAST_ROUNDING = 0.5


class RadialTiles(Tiles):
    """f(|x1_i - x2_j|^2) in tiles, without the outputscale; symmetric when x2 is None.

    Args:
        x1, x2: scaled inputs [*b, n, d] and [*b, m, d].
        alpha: [*b, 1] or None.
        is_centred: whether tiles may leave out a `centre`.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor | None,
        function: RadialFunction,
        alpha: Tensor | None,
        products: KernelProducts,
        cache: TileCache,
        *,
        is_centred: bool = False,
    ) -> None:
        self.x1 = x1.detach()
        self.x2 = self.x1 if x2 is None else x2.detach()
        self.alpha = None if alpha is None else alpha.detach()
        self._function, self.products = function, products
        batches = [tensor.shape[:-dims] for tensor, dims in ((x1, 2), (self.x2, 2), (alpha, 1)) if tensor is not None]
        # The cache compares tensors by identity.
        owner = tuple(tensor for tensor in (x1, x2, alpha) if tensor is not None)
        super().__init__(
            torch.Size((*torch.broadcast_shapes(*batches), x1.shape[-2], self.x2.shape[-2])),
            symmetric=x2 is None,
            length=products.tile_rows(x1.device),
            owner=owner,
            like=x1,
            products=products,
            cache=cache,
        )
        self._keeps_derivatives = products.backend != "keops" and any(tensor.requires_grad for tensor in owner)
        self._is_fused = products.is_fused(x1.device, self.shape[-2], symmetric=self.symmetric)
        few = FEW_OF_PREDICTION
        if self.symmetric:
            few = FEW_OF_KINK if function.has_kink else 0
        self.distances = SquaredDistances(x1, x2, function.scale(self.alpha), few=few)
        self.function = function if self.distances.together else function.at_exact_distances()
        if is_centred:
            strides = [max(-(-size // CENTRE_POINTS), 1) for size in self.shape[-2:]]
            rows = torch.arange(0, self.shape[-2], strides[0], device=x1.device)
            # Another stride for the columns: lines of a grid may have the length of a stride.
            means = self.block(rows, slice(None, None, strides[1] + 1)).mean((-2, -1)).flatten().tolist() or [0.0]
            mean = sum(means) / len(means)
            self.centre = round(mean * CENTRE_STEPS) / CENTRE_STEPS if mean > LEAST_CENTRE else 0.0
            # Rounding errors of f - 1 are relative to r, or smaller.
            r = math.sqrt(function.bend * max(1 - min(means), 0.0))
            self.rounding = min(max(r, LEAST_ROUNDING), 1.0) if self.centre else 1.0

    def evaluate(self, tile: Any, out: Tensor) -> Tensor:
        scratch = self.scratch(out.shape, 1)
        if self.rounding < 1:
            return self.evaluate_both(tile, out, scratch)[0]
        u = self.distances.block(tile.rows, tile.columns, out, scratch)
        if self._is_fused:
            flat, alpha = _flat(u, self.alpha)
            _compiled_value(self.function, u.dtype)(flat, alpha)
        else:
            u = self.function.value_(u, scratch, self.alpha)
        return u.sub_(self.centre) if self.centre else u

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        u = self.distances.block(rows, columns)
        return self.function.value_(u, torch.empty_like(u), self.alpha)

    def values_and_derivatives(self, tile: Any) -> tuple[Tensor, Tensor]:
        """Entries of f minus `centre` and of df/dq, as `values`: kept ones, if both are, else new ones."""
        if self._keeps_derivatives:
            value, derivative = self.cache.tiles.get(tile.key), self.cache.derivatives.tiles.get(tile.key)
            if value is not None and derivative is not None:
                return value, derivative
        return self.evaluate_both(tile, self.scratch(tile.shape, 0), self.scratch(tile.shape, 1))

    def evaluate_both(self, tile: Any, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        """Writes entries of f minus `centre`, and of df/dq over its factor."""
        u = self.distances.block(tile.rows, tile.columns, value, derivative)
        less_one = self.rounding < 1
        if self._is_fused:
            flat, alpha = _flat(u, self.alpha)
            _compiled_both(self.function, u.dtype, less_one=less_one)(flat, derivative.view(flat.shape), alpha)
        else:
            both = self.function.less_one_and_derivative_ if less_one else self.function.value_and_derivative_
            u, derivative = both(u, derivative, self.alpha)
        shift = self.centre - 1 if less_one else self.centre
        return u.sub_(shift) if shift else u, derivative

    def derivative(self, weights: TileWeights, *, value: bool, alpha: bool) -> "RadialDerivative":
        """See `RadialDerivative`; without `value` or `alpha` that part is 0."""
        # [*b, d + 1, n], which is faster than columns: inputs, zero for coordinates apart, and ones.
        inputs = [self.x1] if self.symmetric else [self.x1, self.x2]
        inputs = [torch.cat([x.mT, x.new_ones(*x.shape[:-2], 1, x.shape[-2])], dim=-2) for x in inputs]
        for vectors in inputs:
            vectors[..., self.distances.apart, :] = 0
        share = partial(self._share_of_derivative, weights, inputs[0], inputs[-1], value, alpha)
        sum_of_values, sum_of_alpha, *sums = self.sums(share, self.visits())
        gradients = []  # 2 sum_j G_ij (x_i - x_j) from G x and G 1
        for total, vectors in zip(sums, inputs, strict=True):
            differences = total[..., -1:, :] * vectors[..., :-1, :] - total[..., :-1, :]
            gradients.append((2 * self.function.derivative_factor * differences.mT).to(self.x1.dtype))
        found = [gradients[0], sum_of_values, sum_of_alpha, *gradients[1:]]
        self.complete(found, weights.tensors)
        found[1] = found[1] + self.centre * weights.total
        return RadialDerivative(*found)

    def _share_of_derivative(
        self, weights: TileWeights, x1: Tensor, x2: Tensor, value: bool, alpha: bool, visits: Sequence[Tile]
    ) -> list[Tensor]:
        """Sums of f minus `centre` and of df/dalpha, and G [x, 1] by row [*b, d + 1, n] and without symmetry by column."""
        batch, zeros = weights.batch_shape, partial(self.x1.new_zeros, dtype=torch.float64)  # terms cancel
        rows = zeros((*batch, *x1.shape[-2:]))
        columns = rows if self.symmetric else zeros((*batch, *x2.shape[-2:]))
        sum_of_values, sum_of_alpha = zeros(batch), zeros(batch)
        for tile in visits:
            tile_weights = weights.at(tile, out=self.scratch((*batch, *tile.shape[-2:]), 2))
            if alpha:
                terms = self.alpha_derivatives(tile) * tile_weights
                sum_of_alpha += terms.sum((-2, -1), dtype=torch.float64)
            values, derivatives = self.values_and_derivatives(tile)
            if value:
                sum_of_values += torch.linalg.vecdot(values.flatten(-2), tile_weights.flatten(-2))
            tile_weights.mul_(derivatives)
            of_rows, of_columns = rows[..., tile.rows], columns[..., tile.columns]
            of_rows += x2[..., tile.columns] @ tile_weights.mT
            of_columns += x1[..., tile.rows] @ tile_weights
            for coordinate in self.distances.apart:
                terms = tile_weights * self.distances.difference(coordinate, tile.rows, tile.columns)
                of_rows[..., coordinate, :] -= terms.sum(-1, dtype=torch.float64)
                of_columns[..., coordinate, :] += terms.sum(-2, dtype=torch.float64)
        return [sum_of_values, sum_of_alpha, rows, *([] if self.symmetric else [columns])]

    def scale_products(self, rhs: Tensor) -> Tensor:
        """sum_j G_ij (x_i - x_j)^2 a_j [*b, n, d] with a = rhs [*b, n, 1] and G = df/dq over its factor.

        It is x^2 (G a) - 2 x G (x a) + G (x^2 a) for coordinates together.
        """
        whole = slice(None)
        derivative = lambda tile: self.values_and_derivatives(tile)[1]
        x = self.x1[..., self.distances.together]
        product = self.product(whole, whole, torch.cat([rhs, x * rhs, x.square() * rhs], dim=-1), derivative)
        plain, once, twice = product.split([1, x.shape[-1], x.shape[-1]], dim=-1)
        found = torch.empty_like(rhs.expand(*rhs.shape[:-1], self.x1.shape[-1]))
        found[..., self.distances.together] = x.square() * plain - 2 * x * once + twice
        for c in self.distances.apart:
            difference = lambda tile, c=c: self.distances.difference(c, tile.rows, tile.columns)
            weighted = lambda tile, difference=difference: derivative(tile) * difference(tile).square()
            found[..., c] = self.product(whole, whole, rhs, weighted).squeeze(-1)
        return found

    def alpha_product(self, rhs: Tensor) -> Tensor:
        return self.product(slice(None), slice(None), rhs, self.alpha_derivatives)

    def alpha_derivatives(self, tile: Any) -> Tensor:
        """Entries of df/dalpha, as `values`."""
        scratch = self.scratch(tile.shape, 1)
        u = self.distances.block(tile.rows, tile.columns, self.scratch(tile.shape, 0), scratch)
        return self.function.alpha_derivative(u, self.alpha)


@dataclass(frozen=True)
class RadialDerivative:
    """The derivative of sum_ij W_ij f(|x1_i - x2_j|^2).

    Attributes:
        x1: by x1, [*b, n, d]; through rows and columns for a symmetric matrix.
        value: the sum itself, [*b].
        alpha: by alpha, [*b].
        x2: by x2, [*b, m, d]; None for a symmetric matrix.
    """

    x1: Tensor
    value: Tensor
    alpha: Tensor
    x2: Tensor | None = None


class _CompiledLoop:
    """The passes over a tile in one loop.

    torch.compile compiles a code object a few times only, then runs it uncompiled. So every function and dtype has its own
    code object, tiles are flat, and one thread compiles.
    """

    def __init__(self, evaluate: FunctionType, name: str, dtype: torch.dtype) -> None:
        evaluate.__code__ = evaluate.__code__.replace(co_name=f"{evaluate.__name__}_{name}_{dtype}")
        # The graph cache on disk ignores the processor: AVX-512 code gives wrong numbers without AVX-512.
        self._evaluate = torch.compile(evaluate, dynamic=True, options={"fx_graph_cache": False})
        self._lock = threading.Lock()
        self._compiled: set[tuple[object, ...]] = set()

    def __call__(self, tiles: Tensor, *others: Tensor | None) -> None:
        # Views are also compiled by the dimensions of their base.
        given = [None if tensor is None else tensor.detach() for tensor in (tiles, *others)]
        is_one = tuple(size == 1 for size in tiles.shape)
        variant = (is_one, tiles.device, torch.get_num_threads(), torch.is_inference_mode_enabled())
        if variant in self._compiled:
            self._evaluate(*given)
            return
        with self._lock:
            self._evaluate(*given)
            self._compiled.add(variant)


def _flat(tile: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A tile as a vector, or as a matrix for several values of alpha [*b, 1]."""
    if alpha is None or alpha.numel() == 1:
        return tile.view(-1), None if alpha is None else alpha.view(())
    alpha = alpha.squeeze(-1).expand(tile.shape[:-2]).reshape(-1)
    return tile.view(len(alpha), -1), alpha


@cache
def _compiled_value(function: RadialFunction, dtype: torch.dtype) -> _CompiledLoop:
    def evaluate(u: Tensor, alpha: Tensor | None) -> None:
        u.copy_(function.value(function.clamp_(u), alpha))

    return _CompiledLoop(evaluate, function.name, dtype)


@cache
def _compiled_both(function: RadialFunction, dtype: torch.dtype, *, less_one: bool) -> _CompiledLoop:
    def evaluate(u: Tensor, derivative: Tensor, alpha: Tensor | None) -> None:
        if less_one:
            function.less_one_and_derivative_(u, derivative, alpha)
        else:
            function.value_and_derivative_(u, derivative, alpha)

    return _CompiledLoop(evaluate, f"{function.name}_less_{less_one:d}", dtype)

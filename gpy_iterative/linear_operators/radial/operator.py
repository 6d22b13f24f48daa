"""Radial kernel matrices that are never stored: RBF, Matern and rational quadratic."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import is_principal
from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import RadialFunction
from gpy_iterative.linear_operators.radial.keops import RadialKeOps
from gpy_iterative.linear_operators.radial.squared_distances import (
    differentiable_squared_distances,
    squared_distances_within,
)
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator, TileWeights
from gpy_iterative.linear_operators.tiles.tiles import blocks


class RadialKernelLinearOperator(TiledLinearOperator):
    """outputscale * f(|x1_i - x2_j|^2), in tiles or by KeOps.

    Args:
        x1: inputs over the lengthscale, [*b, n, d], centred for float32.
        outputscale: [*b] (or [] for none).
        x2: [*b, m, d]; None makes the operator symmetric, which halves the work.
        alpha: [*b, 1], rational quadratic only.
        function: from `radial/functions.py`.
        angles: the first so many coordinates are those of circles, whose points a period moves each by its own; RBF only.
        cache: where tiles are kept.

    A product with s columns costs n m (d + s) multiply-adds, or n m s with kept tiles; the derivative costs one more pass.
    """

    def __init__(
        self,
        x1: Tensor,
        outputscale: Tensor,
        *,
        x2: Tensor | None = None,
        alpha: Tensor | None = None,
        function: RadialFunction,
        angles: int = 0,
        products: KernelProducts | None = None,
        cache: TileCache | None = None,
    ) -> None:
        products = KernelProducts() if products is None else products
        cache = TileCache() if cache is None else cache
        tensors = {name: tensor for name, tensor in (("x2", x2), ("alpha", alpha)) if tensor is not None}
        options = {"function": function, "angles": angles, "products": products, "cache": cache}
        super().__init__(x1, outputscale, **tensors, **options)
        self.x1, self.outputscale, self.x2, self.alpha = x1, outputscale, x2, alpha
        self.function, self.products, self.cache, self.symmetric = function, products, cache, x2 is None
        self.angles, self.columns = angles, x1 if x2 is None else x2
        self.tile_scale = outputscale.detach().unsqueeze(-1).unsqueeze(-1)
        # Whether members differ in more than outputscales.
        self._is_batched = x1.dim() > 2 or (alpha is not None and alpha.dim() > 1)

    def _make_tiles(self) -> RadialTiles:
        engine: Callable[..., RadialTiles] = RadialTiles
        if self.products.backend == "keops":
            engine = RadialKeOps
        elif self.symmetric and not self._is_batched and self.products.may_have_far_field(self.x1):
            engine = partial(RadialFarField, angles=self.angles)
        loses_digits = self.dtype != torch.float64 and self.products.backend != "keops"
        return engine(self.x1, self.x2, self.function, self.alpha, self.products, self.cache, is_centred=loses_digits)

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.x1.shape[:-2], self.columns.shape[:-2], self.outputscale.shape)
        if self.alpha is not None:
            batch = torch.broadcast_shapes(batch, self.alpha.shape[:-1])
        return torch.Size((*batch, self.x1.shape[-2], self.columns.shape[-2]))

    def at(self, x1: Tensor) -> LinearOperator:
        """The symmetric kernel at other scaled inputs."""
        return self._rebuild(x1, self.outputscale, None, self.alpha)

    def _rebuild(self, x1: Tensor, outputscale: Tensor, x2: Tensor | None, alpha: Tensor | None) -> LinearOperator:
        products = replace(self.products, far_field=None) if self._is_batched else self.products
        options = {"function": self.function, "angles": self.angles, "products": products}
        return type(self)(x1, outputscale, x2=x2, alpha=alpha, **options)

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        return self._differentiable_values() @ rhs

    def _differentiable_values(self) -> Tensor:
        distances = differentiable_squared_distances(self.x1, self.x2)
        values = self.function.value(distances * self.function.scale(self.alpha), self.alpha)
        return self.outputscale.unsqueeze(-1).unsqueeze(-1) * values

    def _tile_derivatives(self, weights: TileWeights) -> tuple[Tensor | None, ...]:
        tensors = {"x1": self.x1, "outputscale": self.outputscale, "alpha": self.alpha, "x2": self.x2}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        wanted = {name for name, tensor in tensors.items() if tensor.requires_grad}
        if not wanted:
            return (None,) * len(tensors)
        found = self.tiles().derivative(weights, value="outputscale" in wanted, alpha="alpha" in wanted)
        scale = self.outputscale
        factor = scale.unsqueeze(-1).unsqueeze(-1)
        gradients = {"x1": found.x1 * factor, "outputscale": found.value, "alpha": (found.alpha * scale).unsqueeze(-1)}
        if found.x2 is not None:
            gradients["x2"] = found.x2 * factor
        return tuple(
            gradients[name].sum_to_size(tensor.shape).to(tensor.dtype) if name in wanted else None
            for name, tensor in tensors.items()
        )

    def far_field_error(self) -> float | None:
        """See `extensions.far_field_error`."""
        tiles = self.tiles()
        field = tiles.far_field() if isinstance(tiles, RadialFarField) else None
        return None if field is None else field.error

    @torch.no_grad()
    def scale_products(self, rhs: Tensor) -> Tensor:
        """Derivatives [*b, n, d] of K rhs [*b, n] by log s_c, a factor of input coordinate c.

        Cost: a product with 1 + 2d columns for each vector.
        """
        return self.tiles().scale_products(self._column(rhs)) * (2 * self.function.derivative_factor * self.tile_scale)

    @torch.no_grad()
    def alpha_product(self, rhs: Tensor) -> Tensor:
        """The derivative [*b, n] of K rhs [*b, n] by alpha."""
        return (self.tiles().alpha_product(self._column(rhs)) * self.tile_scale).squeeze(-1)

    def _column(self, rhs: Tensor) -> Tensor:
        return rhs.expand(*torch.broadcast_shapes(self.batch_shape, rhs.shape[:-1]), -1).unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        if self.symmetric:
            return self.outputscale.unsqueeze(-1).expand(self.shape[:-1]).clone()
        u = (self.x1 - self.x2).square().sum(-1, keepdim=True) * self.function.scale(self.alpha)
        return self.outputscale.unsqueeze(-1) * self.function.value(u, self.alpha).squeeze(-1)

    def principal_blocks(self, rows: Tensor) -> Tensor:
        """See `extensions.principal_blocks`; differentiable."""
        if torch.is_grad_enabled():
            return self.at(self.x1[rows]).to_dense()
        points, function = self.x1[rows], self.function
        u = squared_distances_within(points).mul_(function.scale(self.alpha))
        return function.value_(u, torch.empty_like(u), self.alpha).mul_(self.tile_scale)

    def kernel_inputs(self) -> Tensor:
        """See `extensions.kernel_inputs`."""
        return self.x1.detach()

    def _full_batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        batch = self.batch_shape
        return (
            self.x1.expand(*batch, *self.x1.shape[-2:]),
            self.outputscale.expand(batch),
            self.columns.expand(*batch, *self.columns.shape[-2:]),
            None if self.alpha is None else self.alpha.expand(*batch, 1),
        )

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if batch_indices:
            return self._on_batches(lambda tensor, _: tensor[batch_indices])._getitem(row_index, col_index)
        x2 = None if self.symmetric and is_principal(row_index, col_index) else self.columns[..., col_index, :]
        return self._rebuild(self.x1[..., row_index, :], self.outputscale, x2, self.alpha)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        x1, outputscale, x2, alpha = self._full_batch()
        u = (x1[(*batch_indices, row_index)] - x2[(*batch_indices, col_index)]).square().sum(-1)[..., None, None]
        alpha = None if alpha is None else alpha[batch_indices]
        return outputscale[batch_indices] * self.function.value(u * self.function.scale(alpha), alpha)[..., 0, 0]

    def _transpose_nonbatch(self) -> LinearOperator:
        if self.symmetric:
            return self
        return self._rebuild(self.x2, self.outputscale, self.x1, self.alpha)

    def _on_batches(self, function: Any) -> LinearOperator:
        x1, outputscale, x2, alpha = self._full_batch()
        return self._rebuild(
            function(x1, 2),
            function(outputscale, 0),
            None if self.symmetric else function(x2, 2),
            None if alpha is None else function(alpha, 1),
        )

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._on_batches(
            lambda tensor, extra: tensor.expand((*batch_shape, *tensor.shape[tensor.dim() - extra :]))
        )

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._on_batches(lambda tensor, _: tensor.unsqueeze(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._on_batches(lambda tensor, extra: tensor.permute(*dims, *range(len(dims), len(dims) + extra)))

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        # Tiles do not contain the outputscale.
        return type(self)(self.x1, self.outputscale * other, **self._kwargs)

    def to_dense(self) -> Tensor:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.representation()):
            return self._differentiable_values()
        result = self.x1.new_empty(self.shape)
        for rows in blocks(self.shape[-2], self.products.tile_rows(self.x1.device)):
            result[..., rows, :] = self.tiles().block(rows, slice(None))
        return result.mul_(self.tile_scale)

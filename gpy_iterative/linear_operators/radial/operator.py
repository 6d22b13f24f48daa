"""A radial kernel matrix that is never stored: RBF, Matern 1/2, 3/2, 5/2 and rational quadratic.

The operator holds scaled inputs and the outputscale. Lengthscales, active dimensions and feature extractors
stay outside, in autograd; the operator differentiates with respect to its scaled inputs in closed form.
"""

from dataclasses import replace
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import RadialFunction
from gpy_iterative.linear_operators.radial.keops import RadialKeOps
from gpy_iterative.linear_operators.radial.squared_distances import differentiable_squared_distances
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator, TileWeights
from gpy_iterative.linear_operators.tiles.tiles import blocks


class RadialKernelLinearOperator(TiledLinearOperator):
    """outputscale * f(|x1_i - x2_j|^2), in tiles or by KeOps.

    Args:
        x1: inputs divided by the lengthscale and centred, [*b, n, d]. Centring is the caller's: without it float32
            loses digits of the distances.
        outputscale: [*b] (or [] for none).
        x2: [*b, m, d]; None makes the operator symmetric, which halves its work.
        alpha: [*b, 1], of the rational quadratic function only.
        function: one of `gpy_iterative.linear_operators.radial.functions`.
        products: how products are computed.
        cache: shared by all rebuilds of the operator; None starts an empty one.

    A product with s columns costs n m (d + s) multiply-adds and a few element-wise passes the first time, n m s
    once all tiles are kept; memory O((n + m)(d + s)) and the tile cache. The derivative costs one further pass.
    KeOps evaluates every entry again for each product, and keeps none.
    """

    def __init__(
        self,
        x1: Tensor,
        outputscale: Tensor,
        *,
        x2: Tensor | None = None,
        alpha: Tensor | None = None,
        function: RadialFunction,
        products: KernelProducts | None = None,
        cache: TileCache | None = None,
    ) -> None:
        products = KernelProducts() if products is None else products
        cache = TileCache() if cache is None else cache
        tensors = {name: tensor for name, tensor in (("x2", x2), ("alpha", alpha)) if tensor is not None}
        options = {"function": function, "products": products, "cache": cache}
        super().__init__(x1, outputscale, **tensors, **options)
        self.x1, self.outputscale, self.x2, self.alpha = x1, outputscale, x2, alpha
        self.function, self.products, self.cache, self.symmetric = function, products, cache, x2 is None
        self.tile_scale = outputscale.detach().unsqueeze(-1).unsqueeze(-1)  # tiles know nothing of it

    @property
    def _is_batched(self) -> bool:
        """Whether there are several matrices besides several outputscales."""
        return self.x1.dim() > 2 or (self.alpha is not None and self.alpha.dim() > 1)

    def _make_tiles(self) -> RadialTiles:
        engine = RadialTiles
        if self.products.backend == "keops":
            engine = RadialKeOps
        elif self.symmetric and not self._is_batched and self.products.may_have_far_field(self.x1):
            engine = RadialFarField
        return engine(self.x1, self.x2, self.function, self.alpha, self.products, self.cache)

    def _size(self) -> torch.Size:
        columns = self.x1 if self.x2 is None else self.x2
        batch = torch.broadcast_shapes(self.x1.shape[:-2], columns.shape[:-2], self.outputscale.shape)
        if self.alpha is not None:
            batch = torch.broadcast_shapes(batch, self.alpha.shape[:-1])
        return torch.Size((*batch, self.x1.shape[-2], columns.shape[-2]))

    def _rebuild(self, x1: Tensor, outputscale: Tensor, x2: Tensor | None, alpha: Tensor | None) -> LinearOperator:
        """The same kernel on other tensors, with a cache of its own. Members of a batch have tiles, as the batch has."""
        products = replace(self.products, far_field=None) if self._is_batched else self.products
        return type(self)(x1, outputscale, x2=x2, alpha=alpha, function=self.function, products=products)

    # Products

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        """Plain autograd, O(n m) memory: the reference that `_bilinear_derivative` is tested against."""
        return self._differentiable_values() @ rhs

    def _differentiable_values(self) -> Tensor:
        """The matrix [*b, n, m], with the graph to every tensor of the representation."""
        distances = differentiable_squared_distances(self.x1, self.x2)
        values = self.function.value(distances * self.function.scale(self.alpha), self.alpha)
        return self.outputscale.unsqueeze(-1).unsqueeze(-1) * values

    # Derivative

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
        """The measured relative error of products through a far field; None where everything is made of tiles."""
        tiles = self.tiles()
        field = tiles.far_field() if isinstance(tiles, RadialFarField) else None
        return None if field is None else field.error

    # Directional derivatives of a product, which information about the hyperparameters is made of

    @torch.no_grad()
    def scale_products(self, rhs: Tensor) -> Tensor:
        """The derivatives [*b, n, d] of K rhs with respect to log s_c, where s_c multiplies coordinate c of the inputs.

        `rhs` is [*b, n]. Cost: one product with 1 + 2d columns, of the derivatives that are kept beside the tiles.
        """
        columns = rhs.unsqueeze(-1).expand(*self.batch_shape, -1, -1)
        return self.tiles().scale_products(columns) * (2 * self.function.derivative_factor * self.tile_scale)

    @torch.no_grad()
    def alpha_product(self, rhs: Tensor) -> Tensor:
        """The derivative [*b, n] of K rhs with respect to alpha, for rhs [*b, n]."""
        columns = rhs.unsqueeze(-1).expand(*self.batch_shape, -1, -1)
        return (self.tiles().alpha_product(columns) * self.tile_scale).squeeze(-1)

    # Parts of the matrix

    def _diagonal(self) -> Tensor:
        if self.symmetric:
            return self.outputscale.unsqueeze(-1).expand(self.shape[:-1]).clone()
        u = (self.x1 - self.x2).square().sum(-1, keepdim=True) * self.function.scale(self.alpha)
        return self.outputscale.unsqueeze(-1) * self.function.value(u, self.alpha).squeeze(-1)

    @torch.no_grad()
    def principal_blocks(self, rows: Tensor) -> Tensor:
        """operator[rows_i, rows_i] for sets of rows [c, k], c k^2 entries."""
        points, function = self.x1[rows], self.function
        distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
        u = distances.square_().mul_(function.scale(self.alpha))
        return function.value_(u, torch.empty_like(u), self.alpha).mul_(self.tile_scale)

    def kernel_inputs(self) -> Tensor:
        """The scaled inputs, see `extensions.kernel_inputs`."""
        return self.x1.detach()

    def _full_batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x1, outputscale, x2 and alpha with all batch dimensions."""
        batch, x2 = self.batch_shape, self.x1 if self.x2 is None else self.x2
        return (
            self.x1.expand(*batch, *self.x1.shape[-2:]),
            self.outputscale.expand(batch),
            x2.expand(*batch, *x2.shape[-2:]),
            None if self.alpha is None else self.alpha.expand(*batch, 1),
        )

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        x1, outputscale, x2, alpha = self._full_batch()
        if batch_indices:
            x1, outputscale, x2 = x1[batch_indices], outputscale[batch_indices], x2[batch_indices]
            alpha = None if alpha is None else alpha[batch_indices]
        principal = (
            self.symmetric and isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index
        )
        return self._rebuild(x1[..., row_index, :], outputscale, None if principal else x2[..., col_index, :], alpha)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        x1, outputscale, x2, alpha = self._full_batch()
        u = (x1[(*batch_indices, row_index)] - x2[(*batch_indices, col_index)]).square().sum(-1)[..., None, None]
        if batch_indices:
            outputscale = outputscale[batch_indices]
            alpha = None if alpha is None else alpha[batch_indices]
        return outputscale * self.function.value(u * self.function.scale(alpha), alpha)[..., 0, 0]

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
        return type(self)(
            self.x1,
            self.outputscale * other,
            x2=self.x2,
            alpha=self.alpha,
            function=self.function,
            products=self.products,
            cache=self.cache,  # tiles do not contain the outputscale
        )

    def to_dense(self) -> Tensor:
        """The matrix [*b, n, m]; O(n m) memory, differentiable."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.representation()):
            return self._differentiable_values()
        result = self.x1.new_empty(self.shape)
        for rows in blocks(self.shape[-2], self.products.tile_rows(self.x1.device)):
            result[..., rows, :] = self.tiles().block(rows, slice(None))
        return result.mul_(self.tile_scale)

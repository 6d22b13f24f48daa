"""A linear operator that is made of tiles: its products, and its derivative as a weighted sum of them."""

from dataclasses import replace
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.tiles import Tiles
from gpy_iterative.linear_operators.tiles.weights import BilinearWeights, MatrixWeights, TileWeights


class TiledLinearOperator(LinearOperator):
    """A linear operator whose products are made of tiles, times a scale.

    Subclasses make the tiles (`_make_tiles`), say by what to multiply them (`tile_scale`), differentiate a weighted sum
    of them (`_tile_derivatives`), and give the plain autograd product that every derivative is defined by
    (`_differentiable_matmul`).

    Several threads may multiply by one operator at the same time. Operators that share a cache but not their tensors wait
    for each other: the cache keeps tiles of one matrix at a time.
    """

    symmetric: bool
    products: KernelProducts
    cache: TileCache

    def _make_tiles(self) -> Tiles:
        raise NotImplementedError

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        raise NotImplementedError

    def _tile_derivatives(self, weights: TileWeights) -> tuple[Tensor | None, ...]:
        """The derivatives of the sum of all entries, weighted, with respect to `representation()`."""
        raise NotImplementedError

    @property
    def tile_scale(self) -> Tensor:
        """[*b, 1, 1] or []: what every tile has to be multiplied by."""
        raise NotImplementedError

    def tiles(self) -> Tiles:
        """The tiles without the scale; one object serves all products of this operator."""
        kept: Tiles | None = self.__dict__.get("_tiles")
        if kept is None or not kept.is_current():
            kept = self.__dict__["_tiles"] = self._make_tiles()
        return kept

    def low_precision_copy(self) -> "TiledLinearOperator":
        """The same matrix in float32, without gradient. All operators that share the cache share its tiles.

        Raises:
            ValueError: the tensors' dtype or the kernel's own code does not allow float32.
        """
        self.products.check(self.dtype)
        lower = lambda part: self.cache.single(part) if torch.is_tensor(part) else part
        options = {name: lower(part) for name, part in self._kwargs.items()}
        options |= {"products": replace(self.products, precision="native"), "cache": self.cache.lowered()}
        return type(self)(*map(lower, self._args), **options)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tiles"}

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*self.representation(), rhs)):
            return self._differentiable_matmul(rhs)
        with torch.no_grad():
            return self.tiles().matmul(rhs) * self.tile_scale

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if left_vecs.dim() == 1:
            left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
        if torch.is_grad_enabled():  # a backward pass that is to be differentiated itself
            return self._differentiable_derivatives(left_vecs, right_vecs)
        return self._tile_derivatives(self.bilinear_weights(left_vecs, right_vecs))

    def bilinear_weights(self, left: Tensor, right: Tensor) -> BilinearWeights:
        """Left right^T [*b, n, m], a weight of every entry."""
        return BilinearWeights(left, right, self.batch_shape, self.tiles())

    def _differentiable_derivatives(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """The same with a graph: plain autograd, O(n m) memory."""
        # Through tensors of its own: the vectors may be functions of the operator's, and are held fixed here.
        own = [tensor.view_as(tensor) for tensor in self.representation()]
        wanted = [tensor for tensor in own if tensor.requires_grad]
        if not wanted:
            return (None,) * len(own)
        product = self.representation_tree()(*own)._differentiable_matmul(right_vecs)
        vectors = left_vecs.expand(product.shape)
        found = iter(torch.autograd.grad(product, wanted, vectors, create_graph=True, allow_unused=True))
        return tuple(next(found) if tensor.requires_grad else None for tensor in own)

    @torch.no_grad()
    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        """See `gpy_iterative.linear_operators.matrix_derivative`."""
        return self._tile_derivatives(MatrixWeights(weights, self.batch_shape, self.tiles()))

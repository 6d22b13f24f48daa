"""Linear operators made of tiles."""

from functools import cached_property, partial
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import Rows, rebuilt
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import Tile, TileCache
from gpy_iterative.linear_operators.tiles.tiles import Tiles
from gpy_iterative.worker_threads import run


class BilinearWeights:
    """Weights W = L R^T in sum_ij W_ij K_ij, for L [*b, n, s] and R [*b, m, s].

    Attributes:
        batch_shape: of W and K, broadcast.
        tensors: L and R.
        total: the sum of W, float64; 0 for tiles without a centre, which do not need it.
        left, right: factors of W, or of W + W^T for a symmetric K.
    """

    def __init__(self, left: Tensor, right: Tensor, batch_shape: torch.Size, tiles: Tiles) -> None:
        self.batch_shape = torch.broadcast_shapes(batch_shape, left.shape[:-2], right.shape[:-2])
        left, right = (vectors.expand(*self.batch_shape, *vectors.shape[-2:]) for vectors in (left, right))
        self.tensors, self._is_symmetric = (left, right), tiles.symmetric
        self.left = torch.cat([left, right], dim=-1) if tiles.symmetric else left
        of_vectors = (vectors.sum(-2, dtype=torch.float64) for vectors in (left, right))
        self.total = torch.linalg.vecdot(*of_vectors) if tiles.centre else 0.0

    @cached_property
    def right(self) -> Tensor:
        """Made when first needed: far fields take swapped halves of `left`."""
        left, right = self.tensors
        return torch.cat([right, left], dim=-1) if self._is_symmetric else right

    def at(self, tile: Tile, out: Tensor | None = None) -> Tensor:
        """W at a tile, which the caller may overwrite; for a symmetric K, W at the transposed tile is added."""
        product = torch.matmul(self.left[..., tile.rows, :], self.right[..., tile.columns, :].mT, out=out)
        return product.mul_(0.5) if self._is_symmetric and tile.rows == tile.columns else product


class MatrixWeights:
    """A dense W [*b, n, m]; see `BilinearWeights`."""

    def __init__(self, matrix: Tensor, batch_shape: torch.Size, tiles: Tiles) -> None:
        self.batch_shape = torch.broadcast_shapes(batch_shape, matrix.shape[:-2])
        self._matrix, self._is_symmetric = matrix.expand(*self.batch_shape, *matrix.shape[-2:]), tiles.symmetric
        self.tensors = (self._matrix,)
        self.total = self._matrix.sum((-2, -1), dtype=torch.float64) if tiles.centre else 0.0

    def at(self, tile: Tile, out: Tensor | None = None) -> Tensor:
        block = self._matrix[..., tile.rows, tile.columns]
        if self._is_symmetric and tile.rows != tile.columns:
            return block + self._matrix[..., tile.columns, tile.rows].mT
        return block.clone(memory_format=torch.contiguous_format)


TileWeights = BilinearWeights | MatrixWeights


class TiledLinearOperator(LinearOperator):
    """A linear operator made of tiles, times a scale.

    Attributes:
        symmetric: whether rows and columns are the same points.
        tile_scale: [*b, 1, 1] or [].

    Threads may share an operator. Operators that share a cache but not their tensors wait for each other.
    """

    symmetric: bool
    tile_scale: Tensor
    products: KernelProducts
    cache: TileCache

    def _make_tiles(self) -> Tiles:
        raise NotImplementedError

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        raise NotImplementedError

    def _tile_derivatives(self, weights: TileWeights) -> tuple[Tensor | None, ...]:
        """Derivatives of sum_ij W_ij K_ij by `representation()`."""
        raise NotImplementedError

    def tiles(self) -> Tiles:
        """The tiles without the scale: one object while tensors are unchanged."""
        kept: Tiles | None = self.__dict__.get("_tiles")
        if kept is None or not kept.seen.are(kept.owner):
            kept = self.__dict__["_tiles"] = self._make_tiles()
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tiles"}

    def _matmul(self, rhs: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*self.representation(), rhs)):
            return self._differentiable_matmul(rhs)
        with torch.no_grad():
            tiles, everything = self.tiles(), slice(None)
            batch = torch.broadcast_shapes(tiles.shape[:-2], rhs.shape[:-2])
            product = tiles.product(everything, everything, rhs.expand(*batch, *rhs.shape[-2:]))
            return product * self.tile_scale if self.batch_shape else product.mul_(self.tile_scale)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # double backward
            return self._differentiable_derivatives(left_vecs, right_vecs)
        return self._tile_derivatives(BilinearWeights(left_vecs, right_vecs, self.batch_shape, self.tiles()))

    def _differentiable_derivatives(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """`_bilinear_derivative` by autograd, O(n m) memory."""
        # Views: vectors that depend on the operator's tensors are constant here.
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
        return self._tile_derivatives(MatrixWeights(weights, self.batch_shape, self.tiles()))

    # Documented in `extensions.py`

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        _check_rows(rhs, self.shape[-1])
        if isinstance(rows, slice):
            return self.tiles().product(rows, slice(None), rhs).mul_(self.tile_scale)
        return self.tiles().picked_product(rows, rhs).mul_(self.tile_scale)

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        _check_rows(rhs, len(range(*columns.indices(self.shape[-1]))))
        return self.tiles().product(slice(None), columns, rhs).mul_(self.tile_scale)

    def principal_block(self, block: slice) -> Tensor:
        if not self.symmetric:
            raise ValueError("A rectangular kernel matrix has no principal blocks.")
        return self.tiles().block(block, block).mul_(self.tile_scale)

    def dense_rows(self, rows: Tensor) -> Tensor:
        tiles, columns = self.tiles(), slice(0, self.shape[-1])
        parts = [partial(tiles.block, rows, part) for part in tiles.parts_of(columns, len(rows))]
        nothing = self.tile_scale.new_empty(*tiles.shape[:-2], len(rows), 0)  # a matrix may have no columns
        # Not in place: the scale may have more batch dimensions.
        return torch.cat([nothing, *run(parts, self.device)], dim=-1) * self.tile_scale

    def low_precision_copy(self) -> LinearOperator:
        self.products.check(self.dtype)
        lower = lambda part: self.cache.in_float32(part) if torch.is_tensor(part) else part
        return rebuilt(self, lower, products=self.products.native(), cache=self.cache.low_precision)

    def in_float64(self, *, keeps_tiles: bool = True) -> LinearOperator:
        double = lambda part: part.double() if torch.is_tensor(part) and part.is_floating_point() else viewed(part)
        return rebuilt(self, double, **self._of_new_tiles(keeps_tiles))

    def _of_new_tiles(self, keeps_tiles: bool) -> dict[str, Any]:
        changes: dict[str, Any] = {"products": self.products.native(keeps_tiles=keeps_tiles)}
        return changes if keeps_tiles else changes | {"cache": TileCache()}


def viewed(part: Any) -> Any:
    """A view of a tensor, which owns tiles of its own; other parts unchanged."""
    return part.view_as(part) if torch.is_tensor(part) else part


def _check_rows(rhs: Tensor, expected: int) -> None:
    if rhs.shape[-2] != expected:
        raise ValueError(f"A matrix with {expected} columns cannot be multiplied by one with {rhs.shape[-2]} rows.")

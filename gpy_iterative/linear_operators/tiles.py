"""Kernel matrices in square tiles, and the products that are made of them.

A symmetric matrix is evaluated in its upper triangle of tiles only, each of which serves twice. Evaluated tiles
are kept in a `TileCache` as far as its budget goes; the rest is evaluated again for every product.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tile_cache import TileCache, version
from gpy_iterative.linear_operators.tile_weights import BilinearWeights, MatrixWeights, TileWeights

Rows = slice | Tensor


def blocks(size: int, length: int) -> list[slice]:
    """Contiguous slices of the given length that cover range(size); the last may be shorter."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


class Tiles(ABC):
    """A matrix [*b, n, m] that is evaluated tile by tile, without autograd.

    Args:
        shape: of the matrix.
        symmetric: whether the tile (j, i) is the transpose of (i, j); only i <= j are asked for then.
        rows, columns: the slices of the tiles.
        owner: the tensors that the tiles depend on.
        products: memory for kept tiles.
        cache: where evaluated tiles are kept.
    """

    def __init__(
        self,
        shape: torch.Size,
        *,
        symmetric: bool,
        rows: list[slice],
        columns: list[slice],
        owner: tuple[Tensor, ...],
        products: KernelProducts,
        cache: TileCache,
    ) -> None:
        self.shape, self.symmetric, self.rows, self.columns = shape, symmetric, rows, columns
        self.products, self.cache = products, cache
        self._owner, self._versions = owner, [version(tensor) for tensor in owner]
        self._like = owner[0]
        self._budget = products.cache_budget(self._like.device)
        self._scratch: dict[tuple[torch.Size, int], Tensor] = {}

    @abstractmethod
    def evaluate(self, i: int, j: int, out: Tensor) -> Tensor:
        """Writes the tile of row block i and column block j into `out` and returns it."""

    @abstractmethod
    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """Any block, evaluated anew: the caller's to overwrite."""

    def is_current(self) -> bool:
        """Whether the tensors are still as they were; in-place changes make the tiles stale."""
        return self._versions == [version(tensor) for tensor in self._owner]

    def tile(self, i: int, j: int) -> Tensor:
        """The tile (i, j), i <= j when symmetric; valid until the next call, and not to be overwritten."""
        shape = self.tile_shape(i, j)
        if self._budget > 0:
            self.cache.claim(*self._owner)
            kept = self.cache.get((i, j))
            if kept is None:
                kept = self.cache.evaluate(
                    (i, j), shape, self._like, self._budget, lambda out: self.evaluate(i, j, out)
                )
            if kept is not None:
                return kept
        return self.evaluate(i, j, self.scratch(shape, 0))

    def tile_shape(self, i: int, j: int) -> torch.Size:
        """[*b, rows, columns] of one tile."""
        rows, columns = self.rows[i], self.columns[j]
        return torch.Size((*self.shape[:-2], rows.stop - rows.start, columns.stop - columns.start))

    def scratch(self, shape: torch.Size, which: int) -> Tensor:
        """Working memory that lives as long as this object; one tensor for every shape and number."""
        key = (shape, which)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
        return self._scratch[key]

    def pairs(self) -> list[tuple[int, int]]:
        """The tiles to visit: the upper triangle of a symmetric matrix, all of any other."""
        return [(i, j) for i in range(len(self.rows)) for j in range(i if self.symmetric else 0, len(self.columns))]

    def matmul(self, rhs: Tensor) -> Tensor:
        """The matrix times rhs [*b, m, s]."""
        batch = torch.broadcast_shapes(self.shape[:-2], rhs.shape[:-2])
        # Columns contiguous: with a handful of them, BLAS is up to eight times slower on the other layout.
        rhs = rhs.mT.contiguous()
        result = rhs.new_zeros(*batch, rhs.shape[-2], self.shape[-2])
        for i, j in self.pairs():
            rows, columns, tile = self.rows[i], self.columns[j], self.tile(i, j)
            add_product(result[..., rows], rhs[..., columns], tile.mT)
            if self.symmetric and i != j:
                add_product(result[..., columns], rhs[..., rows], tile)
        return result.mT

    # Parts of the matrix, without batch dimensions

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        """Those rows of the matrix times rhs [m, s]."""
        if not isinstance(rows, slice):
            return self.block(rows, slice(None)) @ rhs
        size = len(range(*rows.indices(self.shape[-2])))
        rhs = rhs.mT.contiguous()  # as in `matmul`
        result = rhs.new_zeros(rhs.shape[-2], size)
        for i, part, outer in _overlaps(self.rows, rows):
            for j, columns in enumerate(self.columns):
                if self.symmetric and i > j:
                    add_product(result[:, outer], rhs[:, columns], self.tile(j, i)[:, part])
                else:
                    add_product(result[:, outer], rhs[:, columns], self.tile(i, j)[part, :].mT)
        return result.mT

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        """Those columns of the matrix times rhs [len(columns), s]."""
        rhs = rhs.mT.contiguous()
        result = rhs.new_zeros(rhs.shape[-2], self.shape[-2])
        for j, part, outer in _overlaps(self.columns, columns):
            for i, rows in enumerate(self.rows):
                if self.symmetric and i > j:
                    add_product(result[:, rows], rhs[:, outer], self.tile(j, i)[part, :])
                else:
                    add_product(result[:, rows], rhs[:, outer], self.tile(i, j)[:, part].mT)
        return result.mT

    def principal_block(self, block: slice) -> Tensor:
        """The block on the diagonal, as a dense tensor: the caller's to overwrite."""
        if not self.symmetric:
            raise ValueError("A rectangular kernel matrix has no principal blocks.")
        overlaps = _overlaps(self.rows, block)
        if len(overlaps) != 1:
            return self.block(block, block)
        i, part, _ = overlaps[0]
        return self.tile(i, i)[part, part].clone()


def _overlaps(tiles: list[slice], wanted: slice) -> list[tuple[int, slice, slice]]:
    """(tile, slice inside the tile, slice inside `wanted`) for every tile that `wanted` touches."""
    size = tiles[-1].stop if tiles else 0
    start, stop, _ = wanted.indices(size)
    length = tiles[0].stop if tiles else 1
    overlaps = []
    for index in range(start // length, -(-stop // length)):
        first, last = max(start, tiles[index].start), min(stop, tiles[index].stop)
        inner = slice(first - tiles[index].start, last - tiles[index].start)
        overlaps.append((index, inner, slice(first - start, last - start)))
    return overlaps


def add_product(result: Tensor, left: Tensor, right: Tensor) -> None:
    """Result += left @ right, in place where no batch dimension stands in the way."""
    if result.dim() == 2 and left.dim() == 2 and right.dim() == 2:
        result.addmm_(left, right)
    else:
        result += left @ right


class TiledLinearOperator(LinearOperator):
    """A linear operator whose products are made of tiles, times a scale.

    Subclasses make the tiles (`_make_tiles`), say by what to multiply them (`tile_scale`), differentiate a weighted sum
    of them (`_tile_derivatives`), and give the plain autograd product that every derivative is defined by
    (`_differentiable_matmul`).
    """

    symmetric: bool

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

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tiles"}

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*self.representation(), rhs)):
            return self._differentiable_matmul(rhs)
        with torch.no_grad():
            return self.tiles().matmul(rhs) * self.tile_scale

    @torch.no_grad()
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if left_vecs.dim() == 1:
            left_vecs, right_vecs = left_vecs.unsqueeze(-1), right_vecs.unsqueeze(-1)
        return self._tile_derivatives(
            BilinearWeights(left_vecs, right_vecs, self.batch_shape, symmetric=self.symmetric)
        )

    @torch.no_grad()
    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        """See `gpy_iterative.linear_operators.matrix_derivative`."""
        return self._tile_derivatives(MatrixWeights(weights, self.batch_shape, symmetric=self.symmetric))

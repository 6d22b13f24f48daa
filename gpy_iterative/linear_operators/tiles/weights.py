"""The weights of a matrix's entries in a derivative, tile by tile."""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from gpy_iterative.linear_operators.tiles.row_blocks import RowBlocks, block_product, whole_run
from gpy_iterative.linear_operators.tiles.tiles import Tiles


class TileWeights(ABC):
    """W of the sum over all entries, W_ij K_ij, that is differentiated.

    Attributes:
        batch_shape: of W and K together.
    """

    batch_shape: torch.Size

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What W is made of."""

    @abstractmethod
    def strip(self, i: int, columns: range, out: Tensor | None = None) -> Tensor:
        """W of the tiles of row block i and some column blocks, [*b, g, rows, columns], to be overwritten.

        Of a symmetric matrix, what stands for (i, j) and (j, i) together. `out`, of that shape, is memory that may be used.
        """


class BilinearWeights(TileWeights):
    """W = L R^T.

    Args:
        left, right: [*b, n, s] and [*b, m, s].
        batch_shape: of the matrix.
        tiles: its tiles; those of a symmetric one are visited in the upper triangle.
    """

    def __init__(self, left: Tensor, right: Tensor, batch_shape: torch.Size, tiles: Tiles) -> None:
        self.batch_shape = torch.broadcast_shapes(batch_shape, left.shape[:-2], right.shape[:-2])
        self.left, self.right = (vectors.expand(*self.batch_shape, *vectors.shape[-2:]) for vectors in (left, right))
        self._tiles = tiles

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    @cached_property
    def _blocks(self) -> tuple[RowBlocks, RowBlocks]:
        rows, columns = self.both_sides() if self._tiles.symmetric else (self.left, self.right)
        return RowBlocks.of(rows, whole_run(self._tiles.rows)), RowBlocks.of(columns, whole_run(self._tiles.columns))

    def both_sides(self) -> tuple[Tensor, Tensor]:
        """The factors of W + W^T, the weights of the pairs (i, j) and (j, i) together."""
        return torch.cat([self.left, self.right], dim=-1), torch.cat([self.right, self.left], dim=-1)

    def strip(self, i: int, columns: range, out: Tensor | None = None) -> Tensor:
        left, right = self._blocks
        product = block_product(left.part(range(i, i + 1)).mT, right.part(columns), out=out)
        return product.mul_(0.5) if self._tiles.symmetric and i == columns.start else product


class MatrixWeights(TileWeights):
    """W as a dense matrix [*b, n, m]; the other arguments are those of `BilinearWeights`."""

    def __init__(self, matrix: Tensor, batch_shape: torch.Size, tiles: Tiles) -> None:
        self.batch_shape = torch.broadcast_shapes(batch_shape, matrix.shape[:-2])
        self._matrix, self._tiles = matrix.expand(*self.batch_shape, *matrix.shape[-2:]), tiles

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._matrix,)

    def strip(self, i: int, columns: range, out: Tensor | None = None) -> Tensor:
        rows, span = self._tiles.rows[i], self._tiles.span(columns)
        block = self._matrix[..., rows, span]
        if self._tiles.symmetric and i != columns.start:
            block = block + self._matrix[..., span, rows].mT
        return block.unflatten(-1, (len(columns), -1)).transpose(-3, -2).clone(memory_format=torch.contiguous_format)

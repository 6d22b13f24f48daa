"""The weights of a matrix's entries in a derivative, tile by tile."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


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
    def strip(self, rows: slice, columns: slice, parts: int, out: Tensor | None = None) -> Tensor:
        """W of these rows and columns, the columns in equal parts: [*b, parts, rows, columns / parts], to be overwritten.

        Of a symmetric matrix, what stands for (i, j) and (j, i) together. `out`, of that shape, is memory that may be used.
        """


class BilinearWeights(TileWeights):
    """W = L R^T.

    Args:
        left, right: [*b, n, s] and [*b, m, s].
        batch_shape: of the matrix.
        symmetric: whether the matrix is symmetric, and is visited in its upper triangle.
    """

    def __init__(self, left: Tensor, right: Tensor, batch_shape: torch.Size, *, symmetric: bool) -> None:
        self.batch_shape = torch.broadcast_shapes(batch_shape, left.shape[:-2], right.shape[:-2])
        self.left, self.right = (vectors.expand(*self.batch_shape, *vectors.shape[-2:]) for vectors in (left, right))
        self._symmetric = symmetric
        if symmetric:
            self._rows, self._columns = self.both_sides()
        else:
            self._rows, self._columns = self.left, self.right

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def both_sides(self) -> tuple[Tensor, Tensor]:
        """The factors of W + W^T, the weights of the pairs (i, j) and (j, i) together."""
        return torch.cat([self.left, self.right], dim=-1), torch.cat([self.right, self.left], dim=-1)

    def strip(self, rows: slice, columns: slice, parts: int, out: Tensor | None = None) -> Tensor:
        left = self._rows[..., rows, :].unsqueeze(-3)
        right = self._columns[..., columns, :].unflatten(-2, (parts, -1)).mT
        product = torch.matmul(left, right, out=out)
        return product.mul_(0.5) if self._symmetric and rows == columns else product


class MatrixWeights(TileWeights):
    """W as a dense matrix [*b, n, m]; the other arguments are those of `BilinearWeights`."""

    def __init__(self, matrix: Tensor, batch_shape: torch.Size, *, symmetric: bool) -> None:
        self.batch_shape = torch.broadcast_shapes(batch_shape, matrix.shape[:-2])
        self._matrix, self._symmetric = matrix.expand(*self.batch_shape, *matrix.shape[-2:]), symmetric

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._matrix,)

    def strip(self, rows: slice, columns: slice, parts: int, out: Tensor | None = None) -> Tensor:
        block = self._matrix[..., rows, columns]
        if self._symmetric and rows != columns:
            block = block + self._matrix[..., columns, rows].mT
        return block.unflatten(-1, (parts, -1)).transpose(-3, -2).clone(memory_format=torch.contiguous_format)

"""Tiles of a radial kernel matrix: evaluated by one GEMM and a few in-place passes, kept while memory allows.

The squared distances of a tile come from one matrix product of inputs that carry their norms along,

    [-2 x, |x|^2, 1] . [x', 1, |x'|^2] = |x - x'|^2,

with the radial function's own constant folded in. All of this runs without autograd.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial_functions import RadialFunction
from gpy_iterative.linear_operators.tile_cache import TileCache


def blocks(size: int, length: int) -> list[slice]:
    """Contiguous slices of the given length that cover range(size); the last may be shorter."""
    return [slice(start, min(start + length, size)) for start in range(0, size, length)]


@cache
def _fused(function: RadialFunction) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Clamp and radial function in one compiled loop."""

    def evaluate(u: Tensor, alpha: Tensor | None) -> Tensor:
        return function.value(u.clamp_min(0), alpha)

    return torch.compile(evaluate, dynamic=True)


class RadialTiles:
    """f(|x1_i - x2_j|^2) in tiles, without the outputscale; symmetric when x2 is None.

    Args:
        x1, x2: scaled inputs [*b, n, d] and [*b, m, d] (or None), detached.
        function, alpha: the radial function, and its alpha [*b, 1] or None.
        products: tile size, memory for kept tiles, compilation.
        cache: where evaluated tiles are kept; only tiles of the symmetric matrix's upper triangle, or all of a
            rectangular one.
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
        self.symmetric = x2 is None
        self.function, self.cache, self.products = function, cache, products
        self.alpha = None if alpha is None else alpha.detach()
        scale = function.scale(None if alpha is None else alpha.detach())
        self._left = _with_norms(x1, scale, is_left=True)
        self._right = _with_norms(x1 if x2 is None else x2, scale, is_left=False)
        self.rows = blocks(self._left.shape[-2], products.tile_size)
        self.columns = blocks(self._right.shape[-2], products.tile_size)
        self.batch_shape = torch.broadcast_shapes(self._left.shape[:-2], self._right.shape[:-2])
        self._owner = [tensor for tensor in (x1, x2, alpha) if tensor is not None]
        self._versions = [tensor._version for tensor in self._owner]
        self._budget = products.cache_budget(x1.device)
        self._scratch: dict[tuple[torch.Size, int], Tensor] = {}

    def is_current(self) -> bool:
        """Whether the tensors are still as they were; in-place changes make the tiles stale."""
        return self._versions == [tensor._version for tensor in self._owner]

    def tile(self, i: int, j: int) -> Tensor:
        """The tile of row block i and column block j (i <= j when symmetric), valid until the next call."""
        if self._budget == 0:
            return self._evaluate(i, j, self._buffer(self._shape(i, j), 0))
        self.cache.claim(*self._owner)
        kept = self.cache.get((i, j))
        if kept is None:
            shape = self._shape(i, j)
            kept = self.cache.evaluate((i, j), shape, self._left, self._budget, lambda out: self._evaluate(i, j, out))
            if kept is None:
                kept = self._evaluate(i, j, self._buffer(shape, 0))
        return kept

    def value_and_derivative(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        """F and df/dq of one tile, valid until the next call."""
        shape = self._shape(i, j)
        u = self._distances(i, j, self._buffer(shape, 0))
        return self.function.value_and_derivative_(u, self._buffer(shape, 1), self.alpha)

    def alpha_derivative(self, i: int, j: int) -> Tensor:
        """df/dalpha of one tile."""
        return self.function.alpha_derivative(self._distances(i, j, self._buffer(self._shape(i, j), 0)), self.alpha)

    def block(self, rows: slice, columns: slice) -> Tensor:
        """Any block, evaluated anew, never kept."""
        u = torch.matmul(self._left[..., rows, :], self._right[..., columns, :].mT).clamp_min_(0)
        if self.symmetric and rows == columns:
            u.diagonal(dim1=-2, dim2=-1).zero_()
        return self.function.value_(u, torch.empty_like(u), self.alpha)

    def gathered_rows(self, rows: Tensor) -> Tensor:
        """The rows of an index tensor [k], all columns: [*b, k, m]."""
        u = torch.matmul(self._left[..., rows, :], self._right.mT).clamp_min_(0)
        if self.symmetric:
            index = rows.expand(*u.shape[:-2], -1).unsqueeze(-1)
            u.scatter_(-1, index, 0.0)
        return self.function.value_(u, torch.empty_like(u), self.alpha)

    def _shape(self, i: int, j: int) -> torch.Size:
        rows, columns = self.rows[i], self.columns[j]
        return torch.Size((*self.batch_shape, rows.stop - rows.start, columns.stop - columns.start))

    def _buffer(self, shape: torch.Size, which: int) -> Tensor:
        key = (shape, which)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(shape, dtype=self._left.dtype, device=self._left.device)
        return self._scratch[key]

    def _distances(self, i: int, j: int, out: Tensor) -> Tensor:
        u = torch.matmul(self._left[..., self.rows[i], :], self._right[..., self.columns[j], :].mT, out=out)
        u.clamp_min_(0)
        if self.symmetric and i == j:
            u.diagonal(dim1=-2, dim2=-1).zero_()  # exactly, whatever the GEMM's rounding
        return u

    def _evaluate(self, i: int, j: int, out: Tensor) -> Tensor:
        if self.products.compile:
            u = torch.matmul(self._left[..., self.rows[i], :], self._right[..., self.columns[j], :].mT, out=out)
            if self.symmetric and i == j:
                u.diagonal(dim1=-2, dim2=-1).zero_()
            return out.copy_(_fused(self.function)(u, self.alpha))
        return self.function.value_(self._distances(i, j, out), self._buffer(out.shape, 1), self.alpha)


def _with_norms(x: Tensor, scale: float | Tensor, *, is_left: bool) -> Tensor:
    x = x.detach() * (scale**0.5)
    norms, ones = x.square().sum(-1, keepdim=True), torch.ones_like(x[..., :1])
    return torch.cat([x.mul(-2), norms, ones] if is_left else [x, ones, norms], dim=-1)

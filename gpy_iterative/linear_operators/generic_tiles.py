"""Tiles of any GPyTorch kernel, from the kernel's own code."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpy_iterative.linear_operators.tiles.tiles import Tiles, blocks

if TYPE_CHECKING:
    from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator


class KernelTiles(Tiles):
    """k(x1_i, x2_j) in tiles; each input has `outputs` rows of the matrix."""

    def __init__(self, operator: "GenericKernelLinearOperator", outputs: int) -> None:
        # A weak reference: a cycle would keep memory until garbage collection.
        self._operator, self._outputs = weakref.proxy(operator), outputs
        length = max(operator.products.tile_rows(operator.x1.device) // outputs, 1)
        self.input_rows = blocks(operator.x1.shape[-2], length)
        self.input_columns = blocks(operator.columns.shape[-2], length)
        super().__init__(
            operator.shape,
            symmetric=operator.symmetric,
            length=length * outputs,
            owner=operator.representation(),
            like=operator.tile_scale,
            products=operator.products,
            cache=operator.cache,
        )

    def evaluate(self, i: int, j: int, out: Tensor) -> Tensor:
        with torch.no_grad():
            x1 = self._operator.x1[..., self.input_rows[i], :]
            # The same object on the diagonal: kernels then keep distances of exactly zero.
            x2 = x1 if self.symmetric and i == j else self._operator.columns[..., self.input_columns[j], :]
            return out.copy_(self._operator.evaluate(x1, x2))

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        with torch.no_grad():
            if self._outputs > 1:
                return self._block_of_outputs(rows, columns)
            x1, x2 = self._operator.x1[..., rows, :], self._operator.columns[..., columns, :]
            return self._operator.evaluate(x1, x2).clone()

    def _block_of_outputs(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """Evaluates whole inputs, and picks entries from them."""
        operator, outputs = self._operator, self._outputs
        if isinstance(rows, slice):
            rows = torch.arange(self.shape[-2], device=operator.device)[rows]
        inputs, position = (rows // outputs).unique(return_inverse=True)
        start, stop, _ = columns.indices(self.shape[-1])
        first = start // outputs
        values = operator.evaluate(operator.x1[..., inputs, :], operator.columns[..., first : -(-stop // outputs), :])
        values = values[..., position * outputs + rows % outputs, :]
        return values[..., start - first * outputs : stop - first * outputs].clone()

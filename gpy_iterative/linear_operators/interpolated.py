"""Kernels interpolated from a grid, without the tensors of n x m x 4^d numbers of linear_operator's own."""

from functools import cached_property

import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    ConstantMulLinearOperator,
    InterpolatedLinearOperator,
    KroneckerProductLinearOperator,
    ToeplitzLinearOperator,
)
from linear_operator.utils.sparse import bdsmm
from torch import Tensor

from gpy_iterative.linear_operators.extensions import all_parts, principal_blocks

#: Matrices of a stationary kernel on a grid consist of these.
_STATIONARY = (ToeplitzLinearOperator, KroneckerProductLinearOperator, ConstantMulLinearOperator)


class GridLinearOperator(InterpolatedLinearOperator):
    """W G W'^T for the kernel matrix G of a grid and sparse W [n, g] and W' [m, g]."""

    # linear_operator's own matrices take PyTorch's deprecated storage, which warns; its `matmul` makes another one.
    matmul = LinearOperator.matmul

    def _sparse_left_interp_t(self, indices: Tensor, values: Tensor) -> Tensor:
        return self._left if indices.dim() == 2 else super()._sparse_left_interp_t(indices, values)

    def _sparse_right_interp_t(self, indices: Tensor, values: Tensor) -> Tensor:
        return self._right if indices.dim() == 2 else super()._sparse_right_interp_t(indices, values)

    @cached_property
    def _left(self) -> Tensor:
        return _sparse(self.left_interp_indices, self.left_interp_values, self.base_linear_op.shape[-2])

    @cached_property
    def _right(self) -> Tensor:
        return _sparse(self.right_interp_indices, self.right_interp_values, self.base_linear_op.shape[-1])

    def to_dense(self) -> Tensor:
        if torch.is_grad_enabled() and self.requires_grad:
            return super().to_dense()
        rows, columns = self.matrix_shape
        identity = torch.eye(min(rows, columns), dtype=self.dtype, device=self.device)
        identity = identity.expand(*self.batch_shape, *identity.shape)
        with torch.no_grad():
            return self._t_matmul(identity).mT if rows < columns else self._matmul(identity)

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if self.left_interp_values.requires_grad or self.right_interp_values.requires_grad or torch.is_grad_enabled():
            return super()._bilinear_derivative(left_vecs, right_vecs)
        left = bdsmm(self._sparse_left_interp_t(self.left_interp_indices, self.left_interp_values), left_vecs)
        right = bdsmm(self._sparse_right_interp_t(self.right_interp_indices, self.right_interp_values), right_vecs)
        return (*self.base_linear_op._bilinear_derivative(left, right), None, None, None, None)

    def _diagonal(self) -> Tensor:
        return super()._diagonal() if torch.is_grad_enabled() and self.requires_grad else self._constant_diagonal

    @cached_property
    @torch.inference_mode(False)  # for later gradients
    @torch.no_grad()
    def _constant_diagonal(self) -> Tensor:
        nodes, weights = self.left_interp_indices, self.left_interp_values
        if not self._sees_the_same_everywhere():
            return super()._diagonal()  # the grid's entries for 16^d pairs of nodes a row
        between = principal_blocks(self.base_linear_op, nodes[:1])[0]
        return (weights @ between * weights).sum(-1)

    def _sees_the_same_everywhere(self) -> bool:
        """Whether all rows have the same kernel matrix between their nodes."""
        nodes, others = self.left_interp_indices, self.right_interp_indices
        if nodes.dim() > 2 or not len(nodes) or not nodes.equal(others):
            return False
        if not self.left_interp_values.equal(self.right_interp_values):
            return False
        is_stationary = all(isinstance(part, _STATIONARY) for part in all_parts(self.base_linear_op))
        return is_stationary and bool((nodes - nodes[:, :1] == nodes[0] - nodes[0, 0]).all())

    def principal_blocks(self, rows: Tensor) -> Tensor:
        return torch.stack([self._principal_block(block) for block in rows])

    def _principal_block(self, rows: Tensor) -> Tensor:
        """Of rows [k]: [k, k]."""
        # `_get_indices` would evaluate the grid for every pair of interpolation points. Neighbours share most nodes.
        grid = self.base_linear_op
        nodes, places = self.left_interp_indices[rows].unique(return_inverse=True)
        weights = torch.zeros(len(rows), len(nodes), dtype=self.dtype, device=self.device)
        weights = weights.scatter_add(-1, places, self.left_interp_values[rows])
        if len(nodes) ** 2 <= len(rows) * grid.shape[-1]:
            return weights @ principal_blocks(grid, nodes.unsqueeze(0))[0] @ weights.mT
        spread = torch.zeros(grid.shape[-1], len(rows), dtype=self.dtype, device=self.device)
        return weights @ grid._matmul(spread.index_copy(0, nodes, weights.mT))[nodes]


def _sparse(nodes: Tensor, values: Tensor, size: int) -> Tensor:
    """W^T [g, n]."""
    rows = torch.arange(len(nodes), device=nodes.device).unsqueeze(-1).expand_as(nodes)
    index, shape = torch.stack([nodes.flatten(), rows.flatten()]), (size, len(nodes))
    return torch.sparse_coo_tensor(index, values.flatten(), shape, check_invariants=False)

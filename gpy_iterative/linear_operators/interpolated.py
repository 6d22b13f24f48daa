"""Kernels interpolated from a grid, without the tensors of n x m x 4^d numbers of linear_operator's own."""

from functools import cached_property

import torch
from linear_operator import LinearOperator
from linear_operator.operators import InterpolatedLinearOperator
from linear_operator.utils.sparse import bdsmm
from torch import Tensor

#: Numbers of a tensor of `principal_blocks`.
MAX_NUMBERS = 2**25


class GridLinearOperator(InterpolatedLinearOperator):
    """W G W'^T for the kernel matrix G of a grid and sparse W [n, g] and W' [m, g]."""

    @classmethod
    def of(cls, operator: LinearOperator) -> LinearOperator:
        """The operator as one of this class, if it is interpolated."""
        return cls(*operator._args) if type(operator) is InterpolatedLinearOperator else operator

    # linear_operator's own matrices take PyTorch's deprecated storage, which warns.

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

    @cached_property
    def _all_columns(self) -> Tensor:
        return self._columns(torch.arange(self.shape[-1], device=self.device))

    def _columns(self, data: Tensor) -> Tensor:
        """G W'^T [g, c] for some data [c]."""
        grid = self.base_linear_op
        weights = torch.zeros(len(data), grid.shape[-1], dtype=self.dtype, device=self.device)
        weights.scatter_add_(-1, self.right_interp_indices[data], self.right_interp_values[data])
        return grid._matmul(weights.mT)

    def principal_blocks(self, rows: Tensor) -> Tensor:
        """See `extensions.principal_blocks`; differentiable."""
        # `_get_indices` would evaluate the grid for every pair of interpolation points.
        size, count = self.base_linear_op.shape[-1], self.left_interp_indices.shape[-1]
        has_graph = torch.is_grad_enabled() and self.requires_grad
        is_kept = size * self.shape[-1] <= MAX_NUMBERS and not has_graph
        everything = torch.arange(self.shape[-1], device=self.device)
        data, position = (everything, rows) if is_kept else rows.unique(return_inverse=True)
        if len(rows) > 1 and max(size * len(data), rows.numel() * rows.shape[-1] * count) > MAX_NUMBERS:
            return torch.cat([self.principal_blocks(part) for part in rows.tensor_split(2)])
        columns = self._all_columns if is_kept else self._columns(data)
        nodes, shares = self.left_interp_indices[rows], self.left_interp_values[rows]  # [c, k, count]
        found = columns[nodes.unsqueeze(-2), position.unsqueeze(-2).unsqueeze(-1)]
        return (found * shares.unsqueeze(-2)).sum(-1)


def _sparse(nodes: Tensor, values: Tensor, size: int) -> Tensor:
    """W^T [g, n]."""
    rows = torch.arange(len(nodes), device=nodes.device).unsqueeze(-1).expand_as(nodes)
    index, shape = torch.stack([nodes.flatten(), rows.flatten()]), (size, len(nodes))
    return torch.sparse_coo_tensor(index, values.flatten(), shape, check_invariants=False)

"""H = K + diag(noise), the matrix of every solver."""

from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import extensions


class NoisyLinearOperator(LinearOperator):
    """A kernel matrix plus noise variances.

    Args:
        kernel: K, symmetric [*b, n, n].
        noise: variances [*b, n].
        num_variances: so many repeat in turn, whatever their values, missing data counted: 1, or one a task. None: data may
            have their own.
    """

    def __init__(self, kernel: LinearOperator, noise: Tensor, *, num_variances: int | None = None) -> None:
        super().__init__(kernel, noise, num_variances=num_variances)
        self.kernel, self.noise, self.num_variances = kernel, noise, num_variances
        batch = torch.broadcast_shapes(kernel.batch_shape, noise.shape[:-1])
        self._shape = torch.Size((*batch, *kernel.matrix_shape))

    def _size(self) -> torch.Size:
        return self._shape

    def _matmul(self, rhs: Tensor) -> Tensor:
        return torch.addcmul(self.kernel._matmul(rhs), self.noise.unsqueeze(-1), rhs)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        kernel = self.kernel._bilinear_derivative(left_vecs, right_vecs)
        if not self.noise.requires_grad:
            return (*kernel, None)
        return (*kernel, (left_vecs * right_vecs).sum(-1).sum_to_size(self.noise.shape))

    def _diagonal(self) -> Tensor:
        return self.kernel._diagonal() + self.noise

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if not extensions.is_principal(row_index, col_index):
            return super()._getitem(row_index, col_index, *batch_indices)
        kernel, noise = self.kernel, self.noise
        if batch_indices:
            noise = noise.expand(self.shape[:-1])[batch_indices]
        if batch_indices and kernel.batch_shape:
            kernel = kernel.expand(self.shape)._getitem(row_index, col_index, *batch_indices)
        elif row_index != slice(None):
            kernel = kernel._getitem(row_index, col_index)
        # A kernel shared by all members keeps its tiles.
        return NoisyLinearOperator(kernel, noise[..., row_index])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        kernel = self.kernel.expand(self.shape) if batch_indices else self.kernel
        noise = self.noise.expand(self.shape[:-1])[(*batch_indices, row_index)]
        return kernel._get_indices(row_index, col_index, *batch_indices) + noise * (row_index == col_index)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        kernel = self.kernel.expand(*batch_shape, *self.kernel.matrix_shape)
        return NoisyLinearOperator(kernel, self.noise.expand(*batch_shape, self.noise.shape[-1]))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        full = self.kernel.expand(self.shape), self.noise.expand(self.shape[:-1])
        return NoisyLinearOperator(full[0].unsqueeze(dim), full[1].unsqueeze(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        kernel, noise = self.kernel.expand(self.shape), self.noise.expand(self.shape[:-1])
        return NoisyLinearOperator(kernel._permute_batch(*dims), noise.permute(*dims, len(dims)))

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        constant = other.unsqueeze(-1) if torch.is_tensor(other) else other
        return NoisyLinearOperator(self.kernel._mul_constant(other), self.noise * constant)

    def to_dense(self) -> Tensor:
        kernel = self.kernel.to_dense().expand(self.shape)
        diagonal = kernel.diagonal(dim1=-2, dim2=-1) + self.noise
        return torch.diagonal_scatter(kernel.to(diagonal.dtype), diagonal, dim1=-2, dim2=-1)

    @torch.no_grad()
    def signal_to_noise(self) -> Tensor:
        """The mean of H_ii / noise_i, [*b]."""
        noise = self.noise.double()
        return ((self.kernel._diagonal() + noise) / noise).mean(-1)

    def rows_matmul(self, rows: extensions.Rows, rhs: Tensor) -> Tensor:
        """See `extensions.rows_matmul`."""
        return extensions.rows_matmul(self.kernel, rows, rhs) + self.noise[rows].unsqueeze(-1) * rhs[rows]

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        """See `extensions.columns_matmul`."""
        result = extensions.columns_matmul(self.kernel, columns, rhs)
        result[columns] += self.noise[columns].unsqueeze(-1) * rhs
        return result

    def principal_block(self, block: slice) -> Tensor:
        """See `extensions.principal_block`."""
        result = extensions.principal_block(self.kernel, block)
        result.diagonal().add_(self.noise[block])
        return result

    def principal_blocks(self, rows: Tensor) -> Tensor:
        """See `extensions.principal_blocks`."""
        is_same = rows.unsqueeze(-1) == rows.unsqueeze(-2)
        return extensions.principal_blocks(self.kernel, rows) + is_same * self.noise[rows].unsqueeze(-1)

    def kernel_inputs(self) -> Tensor | None:
        """See `extensions.kernel_inputs`."""
        return extensions.kernel_inputs(self.kernel)

    def dense_rows(self, rows: Tensor) -> Tensor:
        """See `extensions.dense_rows`."""
        kernel, batch = extensions.dense_rows(self.kernel, rows), self.batch_shape
        # A kernel matrix that several noises share is copied.
        result = kernel if kernel.shape[:-2] == batch else kernel.expand(*batch, *kernel.shape[-2:]).clone()
        index, noise = rows.expand(*batch, -1), self.noise[..., rows].expand(*batch, -1)
        return result.scatter_add_(-1, index.unsqueeze(-1), noise.unsqueeze(-1).to(result.dtype))

    def matrix_derivative(self, weights: Tensor) -> tuple[Tensor | None, ...]:
        """See `extensions.matrix_derivative`."""
        kernel = extensions.matrix_derivative(self.kernel, weights)
        if not self.noise.requires_grad:
            return (*kernel, None)
        return (*kernel, weights.diagonal(dim1=-2, dim2=-1).sum_to_size(self.noise.shape))


def kernel_and_noise(operator: LinearOperator) -> tuple[LinearOperator, Tensor, Tensor | None]:
    """K [*b, n, n], its diagonal, and the noise [*b, n] if any."""
    noisy = isinstance(operator, NoisyLinearOperator)
    kernel = operator.kernel if noisy else operator
    if kernel.shape != operator.shape:
        kernel = kernel.expand(operator.shape)
    diagonal = kernel.diagonal(dim1=-1, dim2=-2).detach()
    return kernel, diagonal, operator.noise.detach().expand(diagonal.shape) if noisy else None

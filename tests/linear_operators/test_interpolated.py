"""Interpolated kernels beside linear_operator's own."""

import warnings
from typing import Any

import pytest
import torch
from gpytorch import kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpy_iterative.linear_operators import KernelProducts, operator_of_kernel
from gpy_iterative.linear_operators.extensions import dense_rows, matrix_derivative, principal_blocks
from gpy_iterative.linear_operators.interpolated import GridLinearOperator

pytestmark = pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning")


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.layout == torch.strided:
            self.size = max(self.size, out.numel())
        return out


def made(x: Tensor, x2: Tensor | None = None) -> tuple[kernels.Kernel, GridLinearOperator]:
    kernel = kernels.GridInterpolationKernel(
        kernels.ScaleKernel(kernels.RBFKernel()), grid_size=6, num_dims=2, grid_bounds=[(-0.2, 1.2)] * 2
    ).double()
    operator = operator_of_kernel(kernel, x, x2, KernelProducts())
    assert isinstance(operator, GridLinearOperator)
    return kernel, operator


def points(n: int, seed: int = 0) -> Tensor:
    return torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rows", [60, 200])
def test_products_dense_matrices_and_derivatives_take_no_tensor_of_all_nodes(rows: int) -> None:
    """A row has 16 nodes: with 4,000 rows, 1 GB."""
    n = 120
    kernel, operator = made(points(rows), points(n, seed=1))
    expected = operator._matmul(torch.eye(n, dtype=torch.float64))
    weights = torch.randn(rows, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad(), _LargestTensor() as largest:
        torch.testing.assert_close(operator.to_dense(), expected.detach())
        torch.testing.assert_close(operator @ torch.eye(n, dtype=torch.float64), expected.detach())
        torch.testing.assert_close(dense_rows(operator, torch.tensor([3, 1])), expected.detach()[[3, 1]])
        found = matrix_derivative(operator, weights)
    assert largest.size <= 4 * rows * n
    tensors = operator.representation()
    wanted = [part for part, tensor in zip(found, tensors, strict=True) if tensor.requires_grad]
    by_parameter = torch.autograd.grad([t for t in tensors if t.requires_grad], list(kernel.parameters()), wanted)
    again = torch.autograd.grad((made_like(kernel, rows, n) * weights).sum(), list(kernel.parameters()))
    torch.testing.assert_close(by_parameter, again)


def made_like(kernel: kernels.Kernel, rows: int, n: int) -> Tensor:
    operator = operator_of_kernel(kernel, points(rows), points(n, seed=1), KernelProducts())
    return operator.to_dense()  # with a graph: linear_operator's own


def test_learned_inputs_have_gradients() -> None:
    x = points(20).requires_grad_()
    _, operator = made(x)
    vectors = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = torch.autograd.grad((operator @ vectors).square().sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad((operator.to_dense() @ vectors).square().sum(), x)
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0


def test_blocks_have_gradients_after_some_without() -> None:
    kernel, operator = made(points(30))
    rows = torch.tensor([[3, 7], [1, 29]])
    with torch.no_grad():
        expected = operator.to_dense()[rows.unsqueeze(-1), rows.unsqueeze(-2)]
        torch.testing.assert_close(principal_blocks(operator, rows), expected)
    for _ in range(2):
        found = principal_blocks(operator, rows)
        torch.testing.assert_close(found.detach(), expected)
        assert all(
            gradient.abs().max() > 0
            for gradient in torch.autograd.grad(found.sum(), list(kernel.parameters()), retain_graph=True)
        )


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_diagonal_without_a_graph_takes_the_part_of_the_grid_that_one_row_sees(
    dimensions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preconditioner, rounding and variances ask for it: it took four fifths of a training step."""
    kernel = kernels.GridInterpolationKernel(
        kernels.ScaleKernel(kernels.MaternKernel()), grid_size=9, num_dims=dimensions, grid_bounds=[(0, 1)] * dimensions
    ).double()
    x = torch.rand(200, dimensions, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # also at the edge
    operator = operator_of_kernel(kernel, x, None, KernelProducts())
    expected = operator.to_dense().diagonal()
    assert operator.diagonal().requires_grad
    with torch.no_grad(), _LargestTensor() as largest:
        torch.testing.assert_close(operator.diagonal(), expected.detach())
    assert largest.size <= 200 * 16**dimensions // 4
    with torch.no_grad():
        monkeypatch.setattr(type(operator.base_linear_op), "_get_indices", None)
        torch.testing.assert_close(operator.diagonal(), expected.detach())  # is kept


@pytest.mark.parametrize("is_scaled", [False, True])
def test_pytorch_does_not_warn_of_sparse_matrices_in_a_product(is_scaled: bool) -> None:
    grid, _ = made(points(1))
    kernel = (kernels.ScaleKernel(grid) if is_scaled else grid) * kernels.RBFKernel()
    torch.set_warn_always(True)  # else once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = operator_of_kernel(kernel.double(), points(9), points(7, seed=1), KernelProducts()).to_dense()
    finally:
        torch.set_warn_always(False)
    torch.testing.assert_close(found, kernel(points(9), points(7, seed=1)).to_dense())


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_additive_structure_has_fast_products(is_scaled: bool) -> None:
    """A training step by tiles of the whole matrix took six times as long as GPyTorch's."""
    base = kernels.GridInterpolationKernel(kernels.RBFKernel(), grid_size=20, num_dims=1, grid_bounds=[(-0.2, 1.2)])
    kernel = kernels.AdditiveStructureKernel(kernels.ScaleKernel(base) if is_scaled else base, 2).double()
    x = points(30)
    operator, rows = operator_of_kernel(kernel, x, None, KernelProducts()), torch.tensor([[3, 7], [1, 29]])
    assert isinstance(operator, GridLinearOperator)
    with torch.no_grad():
        expected = kernel(x).to_dense()
        torch.testing.assert_close(operator.to_dense(), expected)
        torch.testing.assert_close(operator.diagonal(), expected.diagonal())
        torch.testing.assert_close(principal_blocks(operator, rows), expected[rows.unsqueeze(-1), rows.unsqueeze(-2)])

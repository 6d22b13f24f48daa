"""One operator and several threads, which share its products."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels

from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator, operator_of_kernel
from gpy_iterative.linear_operators.extensions import columns_matmul, dense_rows, principal_block, rows_matmul
from gpy_iterative.linear_operators.radial.functions import MATERN32, RATIONAL_QUADRATIC

SIZE, DIMENSION = 150, 3
PRODUCTS = KernelProducts(tile_size=16)


def inputs(*batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*batch, SIZE, DIMENSION, generator=generator, requires_grad=True)


def matern() -> torch.Tensor:
    return RadialKernelLinearOperator(inputs(), torch.tensor(1.3), function=MATERN32, products=PRODUCTS)


def rational_quadratic_batch() -> torch.Tensor:
    alpha = torch.tensor([[0.7], [1.9]], requires_grad=True)
    scale = torch.tensor([1.3, 0.4], requires_grad=True)
    return RadialKernelLinearOperator(inputs(2), scale, alpha=alpha, function=RATIONAL_QUADRATIC, products=PRODUCTS)


def periodic() -> torch.Tensor:
    return operator_of_kernel(kernels.PeriodicKernel() * kernels.RBFKernel(), inputs(), None, PRODUCTS)


def whole_products(operator) -> list[torch.Tensor]:
    vectors = torch.randn(*operator.batch_shape, SIZE, 11, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        products = [operator._matmul(vectors), operator._matmul(vectors[..., :2])]
        derivatives = operator._bilinear_derivative(vectors[..., :4], vectors[..., 4:8])
    return [*products, *(part for part in derivatives if part is not None)]


def partial_products(operator) -> list[torch.Tensor]:
    vectors = torch.randn(SIZE, 11, generator=torch.Generator().manual_seed(1))
    rows = torch.randperm(SIZE, generator=torch.Generator().manual_seed(2))[:40]
    with torch.no_grad():
        return [
            rows_matmul(operator, slice(20, 101), vectors),
            columns_matmul(operator, slice(30, 90), vectors[:60]),
            rows_matmul(operator, rows, vectors),
            dense_rows(operator, rows),
            principal_block(operator, slice(10, 75)),
        ]


@pytest.mark.parametrize("make", [matern, rational_quadratic_batch, periodic])
def test_products_of_several_threads_are_those_of_one_and_the_same_every_time(make: Callable):
    def products(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        operator = make()
        return [*whole_products(operator), *([] if operator.batch_shape else partial_products(operator))]

    alone = products(1)
    together = [products(3) for _ in range(4)]
    for others in together:
        for one, other, first in zip(alone, others, together[0], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
            assert torch.equal(other, first)


@pytest.mark.slow
def test_tiles_of_several_threads_leave_gpytorchs_settings():
    kernel = kernels.AdditiveKernel(kernels.CosineKernel(), kernels.PeriodicKernel()) * kernels.RBFKernel()
    torch.set_num_threads(4)
    for _ in range(8):
        operator = operator_of_kernel(kernel, inputs().detach(), None, KernelProducts(tile_size=8, cache_memory=0))
        with torch.no_grad():
            operator._matmul(torch.ones(SIZE, 1))
    assert gpytorch.settings.lazily_evaluate_kernels.on()


class _Abstract(kernels.Kernel, ABC):
    @abstractmethod
    def forward(self, *inputs, **options): ...


class _Concrete(_Abstract):
    def forward(self, x1, x2, diag=False, **options):
        values = (1 + (x1 @ x2.mT)).square()
        return values.diagonal(dim1=-2, dim2=-1) if diag else values


@pytest.mark.parametrize("kernel", [_Concrete, lambda: kernels.RFFKernel(num_samples=4) * kernels.RBFKernel()])
def test_what_a_kernel_makes_when_it_is_called_is_the_kernels_own(kernel):
    """A metaclass of its own; frequencies that are drawn at the first call, in whichever thread that is."""
    kernel = kernel()
    torch.set_num_threads(3)
    operator = operator_of_kernel(kernel, inputs().detach(), None, PRODUCTS)
    with torch.no_grad():
        product = operator._matmul(torch.eye(SIZE))
    torch.testing.assert_close(product, kernel(inputs().detach()).to_dense().detach(), rtol=1e-4, atol=1e-4)

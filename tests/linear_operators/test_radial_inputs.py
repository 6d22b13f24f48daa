"""Periodic kernels, and their products with RBF kernels, as RBF kernels of points on circles."""

from collections.abc import Callable

import pytest
import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, operator_of_kernel
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_inputs import radial_factors, with_one_gaussian

PRODUCTS = KernelProducts(tile_size=16)
TWO = torch.Size([2])
Make = Callable[[], kernels.Kernel]
MADE: dict[str, Make] = {
    "periodic": kernels.PeriodicKernel,
    "ARD": lambda: kernels.PeriodicKernel(ard_num_dims=3),
    "batch": lambda: kernels.PeriodicKernel(batch_shape=TWO),
    "product": lambda: kernels.PeriodicKernel(active_dims=(0,)) * kernels.RBFKernel(active_dims=(2, 1), ard_num_dims=2),
    "of scales": lambda: kernels.ScaleKernel(kernels.RBFKernel()) * kernels.ScaleKernel(kernels.PeriodicKernel()),
    "nested": lambda: (
        kernels.ScaleKernel(kernels.PeriodicKernel(active_dims=(1,)) * kernels.RBFKernel())
        * kernels.PeriodicKernel(active_dims=(2,))
    ),
    "RBF alone": lambda: kernels.RBFKernel(active_dims=(0,)) * kernels.keops.RBFKernel(active_dims=(1, 2)),
    "another batch": lambda: kernels.RBFKernel() * kernels.ScaleKernel(kernels.PeriodicKernel(), batch_shape=TWO),
    "two batches": lambda: kernels.RBFKernel(batch_shape=TWO) * kernels.PeriodicKernel(batch_shape=torch.Size([3, 1])),
}


def made(name: str) -> kernels.Kernel:
    """A kernel with random hyperparameters."""
    kernel, generator = MADE[name]().double(), torch.Generator().manual_seed(1)
    for parameter in kernel.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return kernel


def inputs(n: int, *, offset: float = 0.0, seed: int = 0) -> Tensor:
    return offset + 4 * torch.rand(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twin(kernel: kernels.Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """The kernel's own dense matrix."""
    with torch.enable_grad():
        return kernel(x1, x2.clone()).to_dense() if x1 is x2 else kernel(x1, x2).to_dense()


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("is_rectangular", [False, True])
def test_values_products_and_gradients(name: str, is_rectangular: bool) -> None:
    kernel, x1 = made(name), inputs(40)
    x2 = inputs(25, seed=2) if is_rectangular else x1
    operator = operator_of_kernel(kernel, x1, x2 if is_rectangular else None, PRODUCTS)
    assert isinstance(operator, RadialKernelLinearOperator)
    dense = twin(kernel, x1, x2)
    torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-9, atol=1e-9)
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in dense.shape[-2:])
    with torch.no_grad():
        torch.testing.assert_close(operator._matmul(right), dense @ right, rtol=1e-8, atol=1e-8)
    parameters = list(kernel.parameters())
    found = torch.autograd.grad((left * (operator @ right)).sum(), parameters)
    expected = torch.autograd.grad((left * (dense @ right)).sum(), parameters)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_by_inputs() -> None:
    kernel, x = made("nested"), inputs(20).requires_grad_()
    weights = torch.randn(20, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    operator = operator_of_kernel(kernel, x, None, KernelProducts(far_field=1e-4))
    assert operator.products.far_field is None
    found = torch.autograd.grad((operator.to_dense() * weights).sum(), x)
    expected = torch.autograd.grad((twin(kernel, x, x) * weights).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_float32_keeps_the_phases_of_many_periods(offset: float) -> None:
    """The kernel's own float32 code rounds them."""
    x = (inputs(50, offset=offset)[:, :1] * 1000).float()
    kernel, same = kernels.PeriodicKernel(), kernels.PeriodicKernel().double()
    kernel.period_length = 0.37
    same.period_length, same.lengthscale = kernel.period_length.double(), kernel.lengthscale.double()
    found = operator_of_kernel(kernel, x, None, PRODUCTS).to_dense().detach()
    exact = twin(same, x.double(), x.double()).detach()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=1e-5)


def test_whole_numbers() -> None:
    x, kernel = torch.arange(1_700_000_000, 1_700_086_400, 3600).unsqueeze(-1), kernels.PeriodicKernel()
    kernel.period_length = 86400.0
    found = operator_of_kernel(kernel, x, None, PRODUCTS).to_dense().detach()
    times = x.double() - 1_700_000_000
    exact = twin(kernel.double(), times, times).detach()
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_are_rounded_equally_in_every_matrix(dtype: torch.dtype) -> None:
    """Predictions reuse solves of training."""
    x, kernel = inputs(300, offset=1e5).to(dtype), made("product").to(dtype)
    (training,), (cross,) = (with_one_gaussian(radial_factors(kernel, *pair)) for pair in ((x, None), (x[:7], x)))
    assert cross.x2 is not None
    assert torch.equal(cross.x2, training.x1)
    assert torch.equal(cross.x1, training.x1[:7])


class _Doubled(kernels.PeriodicKernel):
    def forward(self, x1: Tensor, x2: Tensor, **options: bool) -> Tensor:
        return 2 * super().forward(x1, x2, **options)


class _AnotherPeriod(kernels.PeriodicKernel):
    @property
    def period_length(self) -> Tensor:
        return 2 * self.raw_period_length.exp()


@pytest.mark.parametrize(
    "make",
    [
        _Doubled,
        _AnotherPeriod,
        kernels.keops.PeriodicKernel,
        lambda: kernels.PeriodicKernel() * kernels.LinearKernel(),
        lambda: kernels.RBFKernel() * _Doubled(),
        lambda: kernels.PeriodicKernel() * (kernels.RBFKernel() + kernels.RBFKernel()),
    ],
)
def test_other_kernels_stay_as_they_are(make: Make) -> None:
    assert isinstance(operator_of_kernel(make().double(), inputs(5), None, PRODUCTS), GenericKernelLinearOperator)


def test_lengthscales_that_do_not_fit_the_inputs() -> None:
    for kernel in (
        kernels.PeriodicKernel(ard_num_dims=2),
        kernels.PeriodicKernel(ard_num_dims=2) * kernels.RBFKernel(),
    ):
        with pytest.raises(ValueError, match="PeriodicKernel has ard_num_dims=2, but its inputs"):
            operator_of_kernel(kernel.double(), inputs(5), None, PRODUCTS)


@pytest.mark.parametrize("dim", [3, -1])
def test_active_dims_that_the_inputs_do_not_have(dim: int) -> None:
    """Torch's error names neither the kernel nor its inputs."""
    kernel = kernels.RBFKernel(active_dims=(0,)) + kernels.MaternKernel(active_dims=(1, dim))
    with pytest.raises(ValueError, match=rf"MaternKernel has active_dims=\[1, {dim}\], but its inputs have 3 columns"):
        operator_of_kernel(kernel.double(), inputs(5), None, PRODUCTS)

"""Operators on an accelerator against the same operators on the CPU."""

from collections.abc import Callable

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
    kernel_operator,
)
from gpy_iterative.linear_operators.extensions import (
    columns_matmul,
    dense_rows,
    low_precision_copy,
    matrix_derivative,
    principal_block,
    rows_matmul,
)
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.latent import latent_operator
from gpy_iterative.linear_operators.radial.functions import MATERN12, MATERN32, MATERN52, RATIONAL_QUADRATIC, RBF
from tests.devices import moved
from tests.simulated_device import DEVICE, SimulatedDevice

N, M = 23, 11
Make = Callable[[torch.device], LinearOperator]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).to(device).requires_grad_()


def radial(function: object, rectangular: bool = False, batch: tuple[int, ...] = ()) -> Make:
    def make(device: torch.device) -> LinearOperator:
        return RadialKernelLinearOperator(
            leaf(device, *batch, N, 3),
            torch.full(batch, 1.7).double().to(device).requires_grad_(),
            x2=leaf(device, M, 3, seed=1) if rectangular else None,
            alpha=torch.full((*batch, 1), 0.8).double().to(device) if function is RATIONAL_QUADRATIC else None,
            function=function,
            products=KernelProducts(tile_size=8),
        )

    return make


def spread(device: torch.device) -> LinearOperator:
    """With a coordinate that is taken out of the distances' product."""
    x = random(N, 2) * torch.tensor([1.0, 3e3]).double()
    return RadialKernelLinearOperator(
        x.float().double().to(device), torch.ones(()).double().to(device), function=MATERN32
    )


def generic(device: torch.device) -> LinearOperator:
    kernel = gpytorch.kernels.PeriodicKernel().double()
    parameters = [parameter.detach().to(device).requires_grad_() for parameter in kernel.parameters()]
    names = tuple(name for name, _ in kernel.named_parameters())
    return GenericKernelLinearOperator(
        leaf(device, N, 2), *parameters, kernel=kernel, names=names, products=KernelProducts(tile_size=8)
    )


def hadamard(device: torch.device) -> LinearOperator:
    numbers = (torch.arange(N) % 3).to(device)
    return HadamardLinearOperator.of(radial(MATERN32)(device), leaf(device, 3, 3), numbers, numbers)


def noisy(device: torch.device) -> LinearOperator:
    return NoisyLinearOperator(radial(MATERN32)(device), leaf(device, N, seed=2).detach().square())


MAKERS = {
    **{function.name: radial(function) for function in (RBF, MATERN12, MATERN32, MATERN52, RATIONAL_QUADRATIC)},
    "rectangular": radial(MATERN32, rectangular=True),
    "batch": radial(RATIONAL_QUADRATIC, batch=(2,)),
    "spread": spread,
    "generic": generic,
    "hadamard": hadamard,
    "noisy": noisy,
    "repeated": lambda device: latent_operator(radial(RBF)(device), 2, shared=True),
}


def everything(operator: LinearOperator) -> dict[str, Tensor]:
    """All that solvers, preconditioners and gradients ask for, by name, on the CPU."""
    device, (rows, columns), batch = operator.device, operator.matrix_shape, operator.batch_shape
    left, right = random(*batch, rows, 3, seed=2).to(device), random(*batch, columns, 3, seed=3).to(device)
    with torch.no_grad():
        found = {"product": operator._matmul(right), "again": operator._matmul(right), "dense": operator.to_dense()}
        if rows == columns:
            found["diagonal"] = operator._diagonal()
        if not batch:
            some, picked = slice(rows // 3, rows - rows // 4), torch.tensor([rows - 1, 0, rows // 2]).to(device)
            found["picked rows"] = rows_matmul(operator, picked, right)
            found["rows"] = rows_matmul(operator, some, right)
            found["dense rows"] = dense_rows(operator, picked)
            if rows == columns:
                found["columns"] = columns_matmul(operator, some, right[some])
                found["block"] = principal_block(operator, some)
    derivatives = {"bilinear": torch.no_grad()(operator._bilinear_derivative)(left, right)}
    derivatives["matrix"] = matrix_derivative(operator, random(*batch, rows, columns, seed=4).to(device))
    for name, parts in derivatives.items():
        found |= {f"{name} {i}": part for i, part in enumerate(parts) if part is not None}
    return {name: value.detach().cpu() for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_everything_is_as_on_the_cpu(name: str, device: torch.device) -> None:
    expected, found = everything(MAKERS[name](torch.device("cpu"))), everything(MAKERS[name](device))
    assert expected.keys() == found.keys()
    for what, value in expected.items():
        torch.testing.assert_close(
            found[what], value, atol=1e-9, rtol=1e-9, msg=lambda text, what=what: f"{what}: {text}"
        )


def test_lower_precision(device: torch.device) -> None:
    operator = RadialKernelLinearOperator(
        random(N, 2).to(device),
        torch.tensor(1.3).double().to(device),
        function=MATERN32,
        products=KernelProducts(tile_size=8, precision="float32"),
    )
    rhs = random(N, 3, seed=1).to(device)
    copy, exact = low_precision_copy(operator), operator._matmul(rhs)
    for _ in range(2):
        found = copy._matmul(rhs.float())
        assert found.dtype == torch.float32
        assert float((found - exact).norm()) <= 2e-6 * float(exact.norm())


def test_kernels_of_gpytorch(device: torch.device) -> None:
    def of(place: torch.device) -> LinearOperator:
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel()) + gpytorch.kernels.MaternKernel(0.5)
        kernel = kernel.double()
        for parameter in kernel.parameters():
            parameter.data.fill_(0.3)
        return kernel_operator(moved(kernel, place)(random(N, 2).to(place)), KernelProducts(tile_size=8))

    rhs = random(N, 3)
    with torch.no_grad():
        expected, found = of(torch.device("cpu"))._matmul(rhs), of(device)._matmul(rhs.to(device))
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.slow
def test_a_far_field(device: torch.device) -> None:
    def of(place: torch.device) -> RadialKernelLinearOperator:
        x = 9 * torch.rand(1500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return RadialKernelLinearOperator(
            x.to(place).requires_grad_(),
            torch.tensor(1.3).double().to(place).requires_grad_(),
            function=MATERN32,
            products=KernelProducts(far_field=1e-6),
        )

    def all_of(operator: RadialKernelLinearOperator) -> list[Tensor]:
        left, right = (random(1500, 3, seed=seed).to(operator.device) for seed in (2, 3))
        with torch.no_grad():
            of_inputs, of_scale = operator._bilinear_derivative(left, right)
            by_lengthscales = (of_inputs * operator.x1).sum(0)  # of one input it depends on which skeletons are picked
            found = [operator._matmul(right), by_lengthscales, of_scale, operator.scale_products(right[:, 0])]
            return [part.cpu() for part in found]

    operator = of(device)
    assert 0 < operator.far_field_error() <= 1e-6
    for found, expected in zip(all_of(operator), all_of(of(torch.device("cpu"))), strict=True):
        assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


def test_products_never_wait_for_the_device() -> None:
    with SimulatedDevice() as simulated:
        for make in (radial(MATERN32), radial(RATIONAL_QUADRATIC, batch=(2,)), generic, hadamard, noisy):
            operator = make(DEVICE)
            right = random(*operator.batch_shape, N, 3).to(DEVICE)
            with torch.no_grad():
                operator._matmul(right)  # which coordinates are apart is read once
                before = simulated.count
                operator._matmul(right)
                assert simulated.count == before
            if make is not generic:  # GPyTorch's own code compares its inputs
                torch.no_grad()(operator._bilinear_derivative)(right, right)
                assert simulated.count == before

"""The derivative of a densely weighted matrix equals autograd's through the dense matrix."""

from collections.abc import Callable

import pytest
import torch
from gpytorch import kernels
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import ConstantMulLinearOperator, RootLinearOperator

from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
)
from gpy_iterative.linear_operators.extensions import matrix_derivative
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.latent import latent_operator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from tests.linear_operators.radial.test_operator import inputs

PRODUCTS = KernelProducts(tile_size=4)


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return inputs(*shape, seed=seed).double().requires_grad_()


def radial(*batch: int, columns: int | None = None) -> LinearOperator:
    return RadialKernelLinearOperator(
        points(*batch, 13, 2),
        torch.full(batch, 1.7, dtype=torch.float64, requires_grad=True),
        x2=None if columns is None else points(*batch, columns, 2, seed=1),
        function=MATERN32,
        products=PRODUCTS,
    )


def generic() -> LinearOperator:
    kernel = (kernels.PeriodicKernel() * kernels.LinearKernel()).double()
    return GenericKernelLinearOperator.of_kernel(kernel, points(13, 2), products=PRODUCTS)


def scaled_batch() -> LinearOperator:
    return (
        generic().expand(2, 13, 13) * torch.tensor([1.3, 0.4], dtype=torch.float64, requires_grad=True)[:, None, None]
    )


def noise(size: int) -> torch.Tensor:
    return torch.linspace(0.1, 0.5, size, dtype=torch.float64).requires_grad_()


def kronecker() -> LinearOperator:
    left, right = points(3, 3, seed=2), points(4, 4, seed=3)
    return KroneckerLinearOperator(to_linear_operator(left @ left.mT), to_linear_operator(right @ right.mT))


CASES: dict[str, Callable[[], LinearOperator]] = {
    "radial": radial,
    "radial, batch": lambda: radial(2),
    "radial, rectangular": lambda: radial(columns=6),
    "any kernel": generic,
    "scaled": lambda: generic() * torch.tensor(1.3, dtype=torch.float64, requires_grad=True),
    "scaled batch": lambda: scaled_batch(),
    "sum": lambda: radial() + generic(),
    "with noise": lambda: NoisyLinearOperator(radial() + generic(), noise(13)),
    "batch with one noise": lambda: NoisyLinearOperator(radial(2), noise(1).expand(13)),
    "structured": kronecker,
    "functions with one kernel": lambda: latent_operator(radial(columns=6), 3, shared=True),
    "functions with their own kernels": lambda: latent_operator(radial(3, columns=6), 3, shared=False),
    "functions with one of a batch": lambda: latent_operator(radial(1), 3, shared=False),
    "root": lambda: RootLinearOperator(points(13, 2)),
    "scaled roots of a batch": lambda: ConstantMulLinearOperator(
        RootLinearOperator(points(2, 13, 2)), torch.tensor([1.3, 0.4], dtype=torch.float64, requires_grad=True)
    ),
    "structured with noise": lambda: NoisyLinearOperator(kronecker(), noise(12)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd_through_the_dense_matrix(name: str) -> None:
    operator = CASES[name]()
    leaves = [tensor for tensor in operator.representation() if tensor.requires_grad]
    # Not symmetric, so that a mistaken transpose shows.
    weights = torch.randn(operator.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    identity = torch.eye(operator.shape[-1], dtype=torch.float64)
    dense = operator @ identity.expand(*operator.batch_shape, *identity.shape)
    expected = torch.autograd.grad((weights * dense).sum(), leaves)
    found = [part for part in matrix_derivative(operator, weights) if part is not None]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-7)

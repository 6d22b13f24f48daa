"""Random sums, products and scales of kernels on random inputs, against dense matrices."""

import random
from functools import partial

import pytest
import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, kernel_operator
from gpy_iterative.linear_operators.extensions import columns_matmul, dense_rows, principal_blocks, rows_matmul

WITH_LENGTHSCALES = [
    kernels.RBFKernel,
    partial(kernels.MaternKernel, nu=1.5),
    partial(kernels.MaternKernel, nu=2.5),
    kernels.RQKernel,
    kernels.PeriodicKernel,
    kernels.LinearKernel,
    partial(kernels.PiecewisePolynomialKernel, q=2),
]
OTHERS = [kernels.CosineKernel, partial(kernels.PolynomialKernel, power=2), kernels.ConstantKernel]


def random_kernel(choices: random.Random, dims: int, depth: int) -> kernels.Kernel:
    kind = choices.choice(["leaf", "scale", "sum", "sum", "product", "product"]) if depth else "leaf"
    if kind == "leaf":
        active = tuple(sorted(choices.sample(range(dims), choices.randint(1, dims))))
        make = choices.choice(WITH_LENGTHSCALES + OTHERS)
        return make(active_dims=active) if make in OTHERS else make(active_dims=active, ard_num_dims=len(active))
    if kind == "scale":
        return kernels.ScaleKernel(random_kernel(choices, dims, depth - 1))
    parts = [random_kernel(choices, dims, depth - 1) for _ in range(choices.choice([2, 3]))]
    return kernels.AdditiveKernel(*parts) if kind == "sum" else kernels.ProductKernel(*parts)


def random_inputs(choices: random.Random, generator: torch.Generator, dims: int) -> Tensor:
    """Scattered, with duplicates, in a cluster, or cells of a grid."""
    x = torch.randn(60, dims, generator=generator, dtype=torch.float64)
    kind = choices.choice(["scattered", "duplicates", "cluster", "grid"])
    if kind == "grid" and dims > 1:
        axes = torch.cartesian_prod(*(x[: round(60 ** (1 / dims)), dim] for dim in range(dims)))
        return axes[torch.randperm(len(axes), generator=generator)][:50]
    return {"duplicates": torch.cat([x, x[:10]]), "cluster": torch.cat([x[:30] / 100, x[30:]])}.get(kind, x)


def dense(kernel: kernels.Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """From GPyTorch's single kernels: its products take Cholesky factors."""
    if isinstance(kernel, kernels.ScaleKernel):
        return kernel.outputscale * dense(kernel.base_kernel, x1, x2)
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        parts = torch.stack([dense(part, x1, x2) for part in kernel.kernels])
        return parts.sum(0) if isinstance(kernel, kernels.AdditiveKernel) else parts.prod(0)
    return kernel(x1, x2).to_dense()


@pytest.mark.parametrize("seed", range(40))
def test_products_rows_and_derivatives_are_the_dense_ones(seed: int) -> None:
    choices, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dims = choices.randint(1, 3)
    x, kernel = random_inputs(choices, generator, dims), random_kernel(choices, dims, 3).double()
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.copy_(normal(parameter.shape) / 2)
    products = KernelProducts(
        tile_size=choices.choice([16, 32, None]),
        cache_memory=choices.choice([0, 20_000, 10**8]),
        far_field=choices.choice([None, 1e-8]),
    )
    v, u, rows = normal(len(x), 3), normal(len(x), 3), torch.arange(3, 20, 4)
    blocks = torch.randint(0, 40, (4, 5), generator=generator)
    expected = dense(kernel, x, x)
    size = expected.detach().diagonal().sqrt().outer(expected.detach().diagonal().sqrt()).max()
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-6 * float(size))

    operator = kernel_operator(kernel(x), products)
    value = operator @ v
    close(value, expected @ v)
    close(operator.diagonal(), expected.diagonal())
    close(dense_rows(operator, rows), expected[rows])
    close(rows_matmul(operator, rows, v), expected[rows] @ v)
    close(columns_matmul(operator, slice(5, 21), v[5:21]), expected[:, 5:21] @ v[5:21])
    close(principal_blocks(operator, blocks), torch.stack([expected[index][:, index] for index in blocks]))
    new = normal(7, dims)
    close(kernel_operator(kernel(new, x), products) @ v, dense(kernel, new, x) @ v)

    parameters = list(kernel.parameters())
    given = torch.autograd.grad((u * value).sum(), parameters)
    for own, wanted in zip(given, torch.autograd.grad((u * (expected @ v)).sum(), parameters), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-6 * float(size * u.norm() * v.norm()))

"""Products of radial kernels beside GPyTorch's dense matrices."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from gpytorch import kernels
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.fitting.steps.directional import directional_product
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator, operator_of_kernel
from gpy_iterative.linear_operators.extensions import (
    far_field_error,
    in_float64,
    low_precision_copy,
    principal_blocks,
    with_products,
)
from gpy_iterative.linear_operators.extensions import rows_matmul as multiply_rows
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator

PRODUCTS = KernelProducts(tile_size=16)
TWO = torch.Size([2])
Make = Callable[[], kernels.Kernel]
MADE: dict[str, Make] = {
    "space and time": lambda: kernels.ScaleKernel(
        kernels.MaternKernel(nu=1.5, active_dims=(0, 1), ard_num_dims=2)
        * kernels.MaternKernel(nu=0.5, active_dims=(2,))
    ),
    "locally periodic": lambda: kernels.PeriodicKernel(active_dims=(2,)) * kernels.MaternKernel(nu=2.5),
    "three": lambda: (
        kernels.ScaleKernel(kernels.RQKernel(active_dims=(0,)))
        * kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, active_dims=(1,)))
        * kernels.RBFKernel(active_dims=(2,))
    ),
    "batch": lambda: kernels.ScaleKernel(
        kernels.MaternKernel(batch_shape=TWO) * kernels.RQKernel(batch_shape=TWO), batch_shape=TWO
    ),
    "one in a batch": lambda: kernels.MaternKernel() * kernels.RQKernel(batch_shape=TWO),
    "a batch of scales": lambda: kernels.ScaleKernel(kernels.MaternKernel() * kernels.RQKernel(), batch_shape=TWO),
}


def made(name: str) -> kernels.Kernel:
    """A kernel with random hyperparameters."""
    kernel, generator = MADE[name]().double(), torch.Generator().manual_seed(1)
    for parameter in kernel.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    return kernel


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operator_of(
    kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None = None, products: KernelProducts = PRODUCTS
) -> RadialProductLinearOperator:
    operator = operator_of_kernel(kernel, x1, x2, products)
    assert isinstance(operator, RadialProductLinearOperator)
    return operator


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("is_rectangular", [False, True])
@pytest.mark.parametrize("cache_memory", [0, None])
def test_values_products_and_gradients(name: str, is_rectangular: bool, cache_memory: int | None) -> None:
    kernel, x1, x2 = made(name), random(40, 3), random(25, 3, seed=2) if is_rectangular else None
    products = KernelProducts(tile_size=16, cache_memory=cache_memory)
    operator, dense = operator_of(kernel, x1, x2, products), kernel(x1, x2).to_dense()
    torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-6, atol=1e-7)
    left, right = (random(n, 3, seed=3) for n in dense.shape[-2:])
    with torch.no_grad():
        torch.testing.assert_close(operator._matmul(right), dense @ right, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(operator.mT.to_dense(), dense.mT, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(operator[..., 3:9, :5].to_dense(), dense[..., 3:9, :5], rtol=1e-6, atol=1e-7)
    parameters = list(kernel.parameters())
    expected = torch.autograd.grad((left * (dense @ right)).sum(), parameters, retain_graph=True)
    for _ in range(2):  # with tiles, and with kept tiles
        found = torch.autograd.grad((left * (operator @ right)).sum(), parameters, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = left @ right.mT
    found = operator.matrix_derivative(weights)
    tensors = [tensor for tensor in operator.representation() if tensor.requires_grad]
    by_tensor = torch.autograd.grad((operator._differentiable_values() * weights).sum(), tensors)
    given = [part for part in found if part is not None]
    torch.testing.assert_close(given, list(by_tensor), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["space and time", "locally periodic", "three"])
def test_rows_blocks_and_copies(name: str) -> None:
    kernel, x = made(name), random(40, 3)
    operator, dense = operator_of(kernel, x), kernel(x).to_dense().detach()
    close = {"rtol": 1e-6, "atol": 1e-6}
    with torch.no_grad():
        rows, vectors = torch.tensor([3, 17, 39]), random(40, 2)
        torch.testing.assert_close(operator.dense_rows(rows), dense[rows], **close)
        torch.testing.assert_close(multiply_rows(operator, slice(7, 30), vectors), dense[7:30] @ vectors, **close)
        torch.testing.assert_close(multiply_rows(operator, rows, vectors), dense[rows] @ vectors, **close)
        torch.testing.assert_close(operator.principal_block(slice(5, 20)), dense[5:20, 5:20], **close)
        sets = torch.stack([rows, rows - 2])
        torch.testing.assert_close(
            principal_blocks(operator, sets), torch.stack([dense[s][:, s] for s in sets]), **close
        )
        torch.testing.assert_close(operator._get_indices(rows, rows - 1), dense[rows, rows - 1], **close)
        torch.testing.assert_close(operator.diagonal(), dense.diagonal(), **close)
        for copied in (
            copy.deepcopy(operator.detach()),
            pickle.loads(pickle.dumps(operator.detach())),
            3 * operator / 3,
        ):
            torch.testing.assert_close(copied @ vectors, dense @ vectors, **close)
        single = low_precision_copy(with_products(operator, lambda _: KernelProducts(precision="float32")))
        assert single.dtype == torch.float32
        torch.testing.assert_close((single @ vectors.float()).double(), dense @ vectors, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(in_float64(single) @ vectors, dense @ vectors, rtol=1e-4, atol=1e-4)


def test_gradients_by_inputs() -> None:
    kernel, x, weights = made("three"), random(20, 3).requires_grad_(), random(20, 20, seed=3)
    operator = operator_of(kernel, x)
    found = torch.autograd.grad((operator.to_dense() * weights).sum(), x)
    expected = torch.autograd.grad((kernel(x).to_dense() * weights).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["space and time", "locally periodic", "three"])
def test_derivatives_along_scales_and_along_other_moves_of_inputs(name: str) -> None:
    # Few points: differences are wrong where two pass each other on the Matern-1/2 kernel's line.
    operator, vector = operator_of(made(name), random(12, 3)), random(12, seed=3)
    tensors = operator.representation()
    product = directional_product(operator, vector)
    for number, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            continue
        for moved in (tensor.detach() * random(*tensor.shape[-1:], seed=4), random(*tensor.shape, seed=5)):
            tangent: list[Tensor | None] = [None] * len(tensors)
            tangent[number] = moved
            step = lambda h, number=number, moved=moved: operator.representation_tree()(
                *(t + h * moved if k == number else t for k, t in enumerate(tensors))
            )
            with torch.no_grad():
                expected = (step(1e-5) @ vector - step(-1e-5) @ vector) / 2e-5
            torch.testing.assert_close(product.along(tangent), expected, rtol=1e-5, atol=1e-5)


def test_tiles_follow_every_factor() -> None:
    kernel, x, vector = made("space and time"), random(40, 3), random(40, 1)
    operator = operator_of(kernel, x)
    with torch.no_grad():
        before = operator @ vector
        factor = operator.factors[1]
        assert isinstance(factor, RadialKernelLinearOperator)
        factor.x1.mul_(2)
        after = operator @ vector
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, operator.to_dense().detach() @ vector)


def test_keops_has_no_such_formula() -> None:
    pytest.importorskip("pykeops")
    with pytest.raises(ValueError, match="ProductKernel has no KeOps formula"):
        operator_of_kernel(made("three"), random(10, 3), None, KernelProducts(backend="keops"))


FAR: dict[str, Make] = {
    "quasi-periodic": lambda: kernels.ScaleKernel(
        kernels.PeriodicKernel(active_dims=(0,)) * kernels.MaternKernel(nu=1.5, active_dims=(0,))
    ),
    "smooth factors of two inputs": lambda: (
        kernels.RQKernel(active_dims=(0,)) * kernels.RBFKernel(active_dims=(1,)) * kernels.RQKernel(active_dims=(0,))
    ),
}


def assert_far_field(
    kernel: kernels.Kernel,
    operator: LinearOperator,
    exact: LinearOperator,
    vectors: Tensor,
    *,
    errors: tuple[float, float],
    atol: float,
) -> None:
    """Only the operator has a far field, with an error in this range; products agree to `atol` of the largest."""
    error, (least, most) = far_field_error(operator), errors
    assert error is not None
    assert least < error < most
    assert far_field_error(exact) is None
    with torch.no_grad():
        product = exact @ vectors
        torch.testing.assert_close(operator @ vectors, product, rtol=0, atol=atol * float(product.abs().max()))
    derivatives = lambda each: torch.autograd.grad((vectors * (each @ vectors)).sum(), list(kernel.parameters()))
    torch.testing.assert_close(derivatives(operator), derivatives(exact), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAR)
def test_far_fields(name: str) -> None:
    kernel, n = FAR[name]().double(), 2000
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.tensor([30.0, 0.5])
    operator, exact = (operator_of(kernel, x, products=KernelProducts(far_field=error)) for error in (1e-6, None))
    vectors = random(n, 2)
    assert_far_field(kernel, operator, exact, vectors, errors=(1e-9, 1e-6), atol=1e-5)
    tensors = operator.representation()
    for number in (number for number, tensor in enumerate(tensors) if tensor.dim() == 2 and len(tensor) == n):
        tangent: list[Tensor | None] = [None] * len(tensors)
        tangent[number] = tensors[number].detach()
        found, expected = (directional_product(each, vectors[:, 0]).along(tangent) for each in (operator, exact))
        assert expected is not None
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_no_far_field_where_factors_have_kinks_at_different_points() -> None:
    kernel, x = made("space and time"), random(200, 3)
    assert far_field_error(operator_of(kernel, x, products=KernelProducts(far_field=0.1))) is None

"""Tiles of float32 leave out a number near all entries: sums over nearly equal entries would lose digits."""

from functools import partial

import pytest
import torch
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial import tiles
from gpy_iterative.linear_operators.radial.functions import MATERN32, RATIONAL_QUADRATIC, RadialFunction
from tests.linear_operators.radial.test_operator import FUNCTIONS, inputs

points = partial(inputs, spread=0.3)


def operator(
    x1: Tensor, x2: Tensor | None = None, function: RadialFunction = MATERN32, **options: object
) -> RadialKernelLinearOperator:
    alpha = x1.new_full((1,), 1.5) if function is RATIONAL_QUADRATIC else None
    scale = x1.new_full(x1.shape[:-2], 2.0)
    products = KernelProducts(tile_size=200, far_field=None, **options)
    return RadialKernelLinearOperator(x1, scale, x2=x2, alpha=alpha, function=function, products=products)


def rhs_of(size: int, *batch: int) -> Tensor:
    return inputs(*batch, size, 3, seed=1, spread=1.0)


def errors(found: RadialKernelLinearOperator) -> float:
    exact = operator(found.x1.double(), None if found.x2 is None else found.x2.double(), found.function)
    rhs = rhs_of(found.shape[-1], *found.batch_shape)
    return float((found @ rhs - exact @ rhs.double()).norm())


@pytest.mark.parametrize("cache_memory", [0, None])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_sums_keep_their_digits(
    function: RadialFunction, cache_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = points(2000, 3, spread=0.05)
    found = operator(x, function=function, cache_memory=cache_memory)
    assert found.tiles().centre > 0.8
    centred = errors(found)
    monkeypatch.setattr(tiles, "LEAST_CENTRE", 2.0)
    plain = operator(x, function=function, cache_memory=cache_memory)
    assert plain.tiles().centre == 0
    assert centred < 0.5 * errors(plain)


def test_all_parts_of_a_product_have_the_centre() -> None:
    x1, x2 = points(150, 2), points(90, 2, spread=0.4)
    for found in (
        operator(x1),
        operator(x1, x2),
        operator(points(2, 150, 2)),
        operator(points(2, 150, 2), points(2, 90, 2)),
    ):
        assert found.tiles().centre > 0.5
        dense, rhs = found.to_dense(), rhs_of(found.shape[-1], *found.batch_shape)
        torch.testing.assert_close(found @ rhs, dense @ rhs, rtol=1e-4, atol=1e-4)
    found, rhs = operator(x1, x2), rhs_of(90)
    dense, some = found.to_dense(), torch.tensor([149, 3, 70])
    torch.testing.assert_close(found.rows_matmul(slice(60, 140), rhs), dense[60:140] @ rhs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.rows_matmul(some, rhs), dense[some] @ rhs, rtol=1e-4, atol=1e-4)
    columns = slice(20, 80)
    torch.testing.assert_close(
        found.columns_matmul(columns, rhs[columns]), dense[:, columns] @ rhs[columns], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("has_x2", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_derivatives_have_the_centre(batch: tuple[int, ...], has_x2: bool) -> None:
    x1 = points(*batch, 150, 2).requires_grad_()
    x2 = points(*batch, 90, 2, spread=0.4).requires_grad_() if has_x2 else None
    found = operator(x1, x2)
    outputscale = found.outputscale.clone().requires_grad_()
    found = RadialKernelLinearOperator(x1, outputscale, **found._kwargs)
    assert found.tiles().centre > 0.5
    left, right = rhs_of(150, *batch), rhs_of(found.shape[-1], *batch).flip(-2)
    gradients = [part for part in found._bilinear_derivative(left, right) if part is not None]
    tensors = [tensor for tensor in (x1, outputscale, x2) if tensor is not None]
    expected = torch.autograd.grad((left * (found._differentiable_values() @ right)).sum(), tensors)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3)
    of_matrix = found.matrix_derivative(left @ right.mT)
    torch.testing.assert_close(of_matrix[1], gradients[1], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("function", [MATERN32, RATIONAL_QUADRATIC], ids=lambda function: function.name)
def test_compiled_tiles_have_it_too(function: RadialFunction) -> None:
    x, rhs = points(2, 150, 2).requires_grad_(), rhs_of(150, 2)
    compiled, plain = (operator(x, function=function, compile=choice) for choice in (True, False))
    assert compiled.tiles().centre > 0.5
    with torch.no_grad():
        torch.testing.assert_close(compiled @ rhs, plain @ rhs, rtol=1e-5, atol=1e-5)
        gradients = (each._bilinear_derivative(rhs, rhs.flip(-2))[0] for each in (compiled, plain))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_grid_whose_lines_have_the_length_of_a_stride() -> None:
    x = torch.cartesian_prod(torch.arange(64.0) / 20, torch.arange(64.0) / 0.1)
    for found in (operator(x), operator(x.flip(-1)), operator(x, x[:-1])):
        mean = found.tiles().block(slice(None), slice(None)).mean()
        assert abs(found.tiles().centre - mean) < 0.1


def test_where_there_is_none() -> None:
    x = points(100, 2)
    assert operator(x.double()).tiles().centre == 0  # float64 has digits enough
    assert operator(100 * x).tiles().centre == 0  # entries differ
    assert operator(x[:0]).tiles().centre == 0
    assert operator(torch.full_like(x, torch.nan)).tiles().centre == 0


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
@pytest.mark.parametrize("largest", [1e-3, 1.0, 100.0])
def test_functions_less_one(function: RadialFunction, largest: float) -> None:
    u = largest * torch.rand(20_000, generator=torch.Generator().manual_seed(0)).view(100, 200)
    alpha = torch.full((1,), 1.5) if function is RATIONAL_QUADRATIC else None

    def evaluate(dtype: torch.dtype, *, less_one: bool) -> tuple[Tensor, Tensor]:
        both = function.less_one_and_derivative_ if less_one else function.value_and_derivative_
        given = u.to(dtype, copy=True)
        return both(given, torch.empty_like(given), None if alpha is None else alpha.to(dtype))

    exact, derivative = evaluate(torch.float64, less_one=True)
    value, plain = evaluate(torch.float64, less_one=False)
    torch.testing.assert_close(exact, value - 1, rtol=0, atol=1e-14)
    torch.testing.assert_close(derivative, plain, rtol=1e-12, atol=1e-300)
    found, derivative = evaluate(torch.float32, less_one=True)
    sizes = 1 - torch.exp(-u.double().sqrt())  # of r for small r, else 1
    assert ((found - exact).abs() < 4 * torch.finfo(torch.float32).eps * sizes).all()
    # Derivatives of Matern-1/2 are zero near zero, where distances are rounding errors.
    is_zero = derivative == 0
    torch.testing.assert_close(derivative[~is_zero].double(), plain[~is_zero], rtol=1e-5, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_rounding_of_entries(function: RadialFunction) -> None:
    for spread in (0.03, 0.1, 0.3):
        x = points(2000, 20, spread=spread / 3)
        found, exact = operator(x, function=function), operator(x.double(), function=function)
        tiles = found.tiles()
        (tile, *_) = tiles.visits()
        error = tiles.values(tile).double() + tiles.centre - exact.tiles().block(tile.rows, tile.columns)
        assert tiles.centre > 0
        assert error.square().mean().sqrt() < 0.4 * tiles.rounding * torch.finfo(torch.float32).eps
    one_differs = torch.stack([x, x, x, 100 * x])
    assert operator(one_differs, function=function).tiles().rounding == 1
    assert operator(100 * x, function=function).tiles().rounding == 1
    assert operator(x.double(), function=function).tiles().rounding == 1

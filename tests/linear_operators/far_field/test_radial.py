"""Radial operators with a far field: the dense matrix to a tolerance, its derivatives, and exact parts."""

import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.extensions import (
    columns_matmul,
    dense_rows,
    far_field_error,
    principal_block,
    rows_matmul,
)
from gpy_iterative.linear_operators.far_field import far_field as far_field_module
from gpy_iterative.linear_operators.far_field import plan as plan_module
from gpy_iterative.linear_operators.far_field.entries import ProductEntries, RadialEntries, ScaledInputs
from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.radial.functions import (
    MATERN12,
    MATERN32,
    RATIONAL_QUADRATIC,
    RBF,
    RadialFunction,
)
from tests.linear_operators.radial.test_operator import FUNCTIONS, dense

N = 2000


def uniform(n: int, d: int, lengthscale: float = 0.5) -> Tensor:
    """Points in [-2, 2]^d, in lengthscales."""
    return (torch.rand(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 2) / lengthscale


def helix(n: int) -> Tensor:
    """Points along a curve in space, clustered around ten places of it."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(10, (n,), generator=generator) + 0.1 * torch.randn(n, generator=generator)
    return torch.stack([places.cos() * 3, places.sin() * 3, places], dim=1).double()


def vectors(n: int, s: int, seed: int = 1) -> Tensor:
    return torch.randn(n, s, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def radial(
    x: Tensor, function: RadialFunction = MATERN32, far_field: object = 1e-5, **options: object
) -> RadialKernelLinearOperator:
    alpha = torch.tensor([0.8], dtype=x.dtype) if function is RATIONAL_QUADRATIC else None
    products = KernelProducts(far_field=far_field, **options)
    return RadialKernelLinearOperator(
        x, torch.tensor(1.7, dtype=x.dtype), alpha=alpha, function=function, products=products
    )


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_product_has_the_tolerance(function: RadialFunction, d: int) -> None:
    operator, v = radial(uniform(N, d), function), vectors(N, 3)
    error = far_field_error(operator)
    assert error is not None
    assert error <= 1e-5
    true = dense(operator) @ v
    assert relative(operator @ v, true) < 2e-5
    # The measured error is that of the product.
    assert relative(operator @ v, true) < max(3 * error, 1e-10)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_product_in_three_dimensions(function: RadialFunction) -> None:
    x = uniform(N, 3, lengthscale=1.0) * torch.tensor([8.0, 1.0, 1.0])
    operator, v = radial(x, function, 1e-3), vectors(N, 3)
    assert far_field_error(operator) is not None
    assert relative(operator @ v, dense(operator) @ v) < 2e-3


def test_points_along_a_curve_cost_as_little_as_a_line() -> None:
    operator, v = radial(helix(N)), vectors(N, 3)
    tiles = operator.tiles()
    assert isinstance(tiles, RadialFarField)
    field = tiles.far_field()
    assert field is not None
    assert sum(batch.shape.numel() for batch in field.levels.batches) < 0.2 * N**2
    assert relative(operator @ v, dense(operator) @ v) < 2e-5


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
def test_ranks_adapt_to_the_tolerance(tolerance: float) -> None:
    operator, v = radial(uniform(N, 2), far_field=tolerance), vectors(N, 3)
    error = far_field_error(operator)
    assert error is not None
    assert error <= tolerance
    assert relative(operator @ v, dense(operator) @ v) < 2 * tolerance


def test_higher_ranks_where_the_first_miss_the_tolerance() -> None:
    with mock.patch.object(plan_module, "AIM", 2.0):
        operator = radial(uniform(N, 2))
        error = far_field_error(operator)
    assert error is not None
    assert error <= 1e-5


def test_an_error_that_nearly_reaches_the_tolerance_is_taken_and_reported() -> None:
    """At a million rows rounding alone was 1.02 tolerances, and tiles would have taken hours."""
    with mock.patch.object(far_field_module, "measured_error", side_effect=[9e-5, 9e-5]):
        assert far_field_error(radial(uniform(N, 2))) == 9e-5


def test_tiles_where_higher_ranks_miss_the_tolerance_by_far() -> None:
    with mock.patch.object(far_field_module, "measured_error", side_effect=[9e-5, 2e-4]) as measured:
        operator, v = radial(uniform(N, 2)), vectors(N, 2)
        assert far_field_error(operator) is None
    assert measured.call_count == 2
    assert relative(operator @ v, dense(operator) @ v) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_blocks_and_evaluated_ones_give_the_same(dtype: torch.dtype) -> None:
    x, v = uniform(N, 2).to(dtype), vectors(N, 5).to(dtype)
    kept, evaluated = (radial(x, cache_memory=memory) for memory in (10**9, 0))
    once, again, without = kept @ v, kept @ v, evaluated @ v
    assert once.equal(again)
    assert once.equal(without)
    assert kept.cache.own_bytes > 0
    assert relative(once.double(), dense(radial(x.double())) @ v.double()) < 2e-5


def test_the_matrix_is_symmetric() -> None:
    operator, u, v = radial(uniform(N, 2)), vectors(N, 4), vectors(N, 4, seed=2)
    left, right = u.T @ (operator @ v), (operator @ u).T @ v
    assert (left - right).abs().max() < 1e-13 * float(u.norm() * (operator @ v).norm())


def test_a_coordinate_of_long_lengthscale_does_not_count() -> None:
    x = torch.cat([uniform(N, 2), 0.02 * uniform(N, 3)], dim=1)
    operator, v = radial(x), vectors(N, 3)
    assert far_field_error(operator) is not None
    assert relative(operator @ v, dense(operator) @ v) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_columns_of_long_lengthscale_do_not_count(dtype: torch.dtype) -> None:
    """Their number was the power by which near proxies are preferred: skeletons missed the far points."""
    x = torch.cat([uniform(N, 1), 0.003 * uniform(N, 29, lengthscale=1.0)], dim=1)
    operator, v = radial(x.to(dtype)), vectors(N, 3)
    error = far_field_error(operator)
    assert error is not None
    assert error <= 1e-5
    assert relative((operator @ v.to(dtype)).double(), dense(radial(x)) @ v) < 2e-5


def test_equal_rows() -> None:
    x = uniform(N, 2)
    x[500:900] = x[0]
    operator, v = radial(x), vectors(N, 3)
    assert far_field_error(operator) is not None
    assert relative(operator @ v, dense(operator) @ v) < 2e-5


@pytest.mark.parametrize("n", [1999, 2000, 2017, 2048])
def test_any_number_of_rows(n: int) -> None:
    operator, v = radial(uniform(n, 2)), vectors(n, 2)
    assert far_field_error(operator) is not None
    assert relative(operator @ v, dense(operator) @ v) < 2e-5


def test_many_columns_and_batches_of_vectors() -> None:
    operator, v = radial(uniform(N, 1)), vectors(N, 150)
    true = dense(operator) @ v
    assert relative(operator @ v, true) < 2e-5
    assert relative(operator @ v[:, 0], true[:, 0]) < 2e-5
    batch = torch.stack([v[:, :3], v[:, 3:6]])
    assert relative(operator._matmul(batch), torch.stack([true[:, :3], true[:, 3:6]])) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "cache_memory"), [*((function, None) for function in FUNCTIONS), (RATIONAL_QUADRATIC, 0)]
)
def test_derivatives(function: RadialFunction, cache_memory: int | None) -> None:
    """By lengthscales, outputscale and alpha, of a bilinear form."""
    inputs, left, right = uniform(N, 2, lengthscale=1.0), vectors(N, 3), vectors(N, 3, seed=2)

    def gradients(of: str) -> list[Tensor]:
        lengthscale = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
        outputscale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
        alpha = torch.tensor([0.8], dtype=torch.float64, requires_grad=True) if function is RATIONAL_QUADRATIC else None
        products = KernelProducts(far_field=1e-5, cache_memory=cache_memory)
        x = inputs / lengthscale
        operator = RadialKernelLinearOperator(x, outputscale, alpha=alpha, function=function, products=products)
        product = operator @ right if of == "operator" else dense(operator) @ right
        wanted = [lengthscale, outputscale, *([] if alpha is None else [alpha])]
        return list(torch.autograd.grad((left * product).sum(), wanted))

    # Of vectors whose form is far from zero: the parts of a gradient then do not cancel.
    left = left + 0.5 * right
    for found, true in zip(gradients("operator"), gradients("dense"), strict=True):
        assert relative(found, true) < 1e-3


def test_the_derivative_beside_a_long_lengthscale() -> None:
    """Of two coordinates, the first had derivatives only at inherited proxies, too far away."""
    inputs, v = uniform(N, 2, lengthscale=4.0), vectors(N, 4)

    def gradient(far_field: float | None) -> Tensor:
        lengthscale = torch.tensor([0.1, 100.0], dtype=torch.float64, requires_grad=True)
        operator = radial(inputs / lengthscale, MATERN32, far_field)
        return torch.autograd.grad((v * (operator @ v)).sum(), lengthscale)[0]

    assert relative(gradient(1e-6), gradient(None)) < 1e-5


def test_derivatives_of_distant_clusters() -> None:
    """Nodes lie in two clusters, thousands of lengthscales apart: in float32 sums of differences lost all digits."""
    cluster = torch.randint(10, (N, 1), generator=torch.Generator().manual_seed(2))
    x = (4000 * vectors(10, 2)[cluster.squeeze(1)] + uniform(N, 2)).float().requires_grad_()
    left = vectors(N, 3).float()
    found, true = (
        torch.autograd.grad((left * (radial(x, MATERN12, far_field) @ left)).sum(), x)[0] for far_field in (1e-5, None)
    )
    assert relative(found, true) < 1e-6


def test_directional_derivatives() -> None:
    v = vectors(N, 1)[:, 0]
    field, tiles = (radial(uniform(N, 2), RATIONAL_QUADRATIC, far_field) for far_field in (1e-5, None))
    assert relative(field.scale_products(v), tiles.scale_products(v)) < 1e-3
    assert relative(field.alpha_product(v), tiles.alpha_product(v)) < 1e-3


def test_rows_columns_and_blocks_are_exact() -> None:
    operator, v = radial(uniform(N, 2)), vectors(N, 2)
    matrix, rows = dense(operator), torch.tensor([3, 1700, 12])
    assert far_field_error(operator) is not None
    assert relative(rows_matmul(operator, rows, v), matrix[rows] @ v) < 1e-13
    assert relative(rows_matmul(operator, slice(100, 300), v), matrix[100:300] @ v) < 1e-13
    assert relative(columns_matmul(operator, slice(100, 300), v[:200]), matrix[:, 100:300] @ v[:200]) < 1e-13
    assert relative(principal_block(operator, slice(600, 700)), matrix[600:700, 600:700]) < 1e-13
    assert relative(dense_rows(operator, rows), matrix[rows]) < 1e-13
    assert relative(operator.diagonal(), matrix.diagonal()) < 1e-13
    assert relative(operator.to_dense(), matrix) < 1e-13


def test_exact_gradients_are_exact() -> None:
    x = uniform(N, 2).requires_grad_()
    field, tiles = radial(x), radial(x, far_field=None)
    weights = vectors(N, N)
    assert field.matrix_derivative(weights)[0].equal(tiles.matrix_derivative(weights)[0])


def test_rebuilt_operators_share_one_far_field() -> None:
    operator = radial(uniform(N, 2))
    other = operator * torch.tensor(2.0, dtype=torch.float64)
    assert other.tiles().far_field() is operator.tiles().far_field()
    rebuilt = operator.representation_tree()(*operator.representation())
    assert rebuilt.tiles().far_field() is operator.tiles().far_field()


def test_changed_inputs_get_a_new_far_field() -> None:
    x, v = uniform(N, 2), vectors(N, 2)
    operator = radial(x)
    before = operator.tiles().far_field()
    x.mul_(1.5)
    assert operator.tiles().far_field() is not before
    assert relative(operator @ v, dense(operator) @ v) < 2e-5


@pytest.mark.parametrize("tolerance", [1e-3, None])
def test_inference_mode_keeps_what_it_has_made(tolerance: float | None) -> None:
    """The products of an operator share far field and tiles, inside and after it; a write is seen."""
    with torch.inference_mode():
        x, v = uniform(1000, 2), vectors(1000, 2)
        operator = radial(x, far_field=tolerance)
        products, tiles, kept = [operator @ v], operator.tiles(), dict(operator.cache.tiles)
        products.append(operator @ v)
    products.append(operator @ v.clone())
    assert operator.tiles() is tiles
    assert kept
    assert all(operator.cache.tiles[key] is tile for key, tile in kept.items())
    assert products[0].equal(products[1])
    assert products[0].equal(products[2])
    with torch.inference_mode():
        x *= 1.5
    assert relative(operator @ v.clone(), dense(operator) @ v) < 3e-3


def test_the_float32_copy_has_a_far_field_of_its_own() -> None:
    operator, v = radial(uniform(N, 2), precision="float32"), vectors(N, 2)
    copy = operator.low_precision_copy()
    assert far_field_error(copy) is not None
    assert relative((copy @ v.float()).double(), dense(operator) @ v) < 2e-5


def test_batches_and_rectangles_are_made_of_tiles() -> None:
    x = uniform(300, 2)
    batch = radial(x.expand(2, 300, 2))
    cross = RadialKernelLinearOperator(
        x, torch.tensor(1.0).double(), x2=x[:50], function=RBF, products=KernelProducts(far_field=1e-5)
    )
    assert not isinstance(batch.tiles(), RadialFarField)
    assert not isinstance(cross.tiles(), RadialFarField)
    assert far_field_error(batch) is None


class TestAuto:
    def test_yes_for_a_plane(self) -> None:
        rounded, exact = (
            radial(uniform(20_000, 2).to(dtype), far_field="auto") for dtype in (torch.float32, torch.float64)
        )
        assert 1e-9 < far_field_error(exact) <= 5e-8 < far_field_error(rounded) <= 1e-6

    def test_no_for_many_dimensions(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(5000, 18, generator=generator)
        with mock.patch.object(far_field_module, "build_levels") as build, counted_entries() as entries:
            assert far_field_error(radial(x / 3, far_field="auto")) is None
        assert not build.called
        assert 0 < sum(entries) < 0.05 * 5000**2

    @pytest.mark.parametrize("n", [300, 3000])
    def test_no_for_few_rows(self, n: int) -> None:
        with counted_entries() as entries:
            assert far_field_error(radial(uniform(n, 2), far_field="auto")) is None
        assert not entries

    def test_yes_where_far_entries_are_zero(self) -> None:
        x, v = 50 * uniform(5000, 3), vectors(5000, 2)
        operator = radial(x, far_field="auto")
        assert far_field_error(operator) == 0
        rows = torch.arange(0, 5000, 50)
        assert relative((operator @ v)[rows], rows_matmul(operator, rows, v)) < 1e-6


@contextmanager
def counted_entries() -> Iterator[list[int]]:
    """How many entries each call evaluates inside."""
    found, evaluate = [], RadialEntries.squared_distances

    def counted(
        self: RadialEntries, left: ScaledInputs, right: ScaledInputs, *memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        found.append(left.apart[:, 0].numel() * right.apart.shape[2])
        return evaluate(self, left, right, *memory)

    with mock.patch.object(RadialEntries, "squared_distances", counted):
        yield found


def test_float32_in_units_of_hundreds_of_lengthscales() -> None:
    x, v = uniform(N, 1, lengthscale=0.002), vectors(N, 3)
    x = x.float()
    operator = radial(x, MATERN12)
    assert far_field_error(operator) is not None
    assert relative((operator @ v.float()).double(), dense(radial(x.double(), MATERN12)) @ v) < 2e-5


class TestConformance(LinearOperatorTestCase, unittest.TestCase):
    """With small leaves. Derivatives by inputs are those of all points together, and are tested above."""

    seed = 3
    tolerances = LinearOperatorTestCase.tolerances | {"matmul": {"rtol": 1e-3, "atol": 1e-3}}
    x1_shape = (24, 2)

    def setUp(self) -> None:
        for name, value in (("SMALLEST_LEAF", 2), ("POINT_COST", 0), ("RANK_STEP", 1)):
            patch = mock.patch.object(plan_module, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        super().setUp()

    def assertAllClose(self, first: Tensor, second: Tensor, *args: object, **kwargs: object) -> None:
        if first.shape != self.x1_shape:
            super().assertAllClose(first, second, *args, **kwargs)

    def create_linear_op(self) -> RadialKernelLinearOperator:
        line = torch.linspace(-12, 12, self.x1_shape[0])
        operator = RadialKernelLinearOperator(
            torch.stack([line, line.sin()], dim=1),
            torch.tensor(2.3, requires_grad=True),
            function=MATERN32,
            products=KernelProducts(far_field=1e-4),
        )
        assert far_field_error(operator) is not None
        return operator

    def evaluate_linear_op(self, linear_op: RadialKernelLinearOperator) -> Tensor:
        return dense(linear_op)


def test_inputs_without_dimensions_have_tiles() -> None:
    operator = radial(torch.zeros(4100, 0), far_field="auto")
    with torch.no_grad():
        expected = 4100 * operator.outputscale.detach().expand(4100, 1)
        torch.testing.assert_close(operator._matmul(torch.ones(4100, 1)), expected)


def test_float32_interpolates_the_points_of_its_entries() -> None:
    """Far from the origin, rounding of the scaled inputs moves points: those of the interpolations, too."""
    x = uniform(4096, 2).float() + 20_000
    entries = ProductEntries([RadialEntries(x, MATERN32, None)])
    field = far_field_module.far_field(entries, 1e-5)
    assert field is not None
    vectors = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    product = field.levels.matmul(
        vectors.float(), lambda batch: entries.factors[0].blocks(*batch.inputs(0)), field.levels.batches
    )
    rows = entries.inputs(torch.arange(len(x)).unsqueeze(0))
    exact = entries.blocks(rows, rows).squeeze(0).double()
    error = (product - exact @ vectors).square().mean().sqrt() / len(x) ** 0.5 / exact.std()
    assert float(error) < 1e-5


def test_lengthscale_derivative_of_inputs_that_span_many_lengthscales() -> None:
    """Times in seconds at a lengthscale of one second: rounding errors of equal points' derivatives reached .04."""
    generator = torch.Generator().manual_seed(0)
    x = 4e7 * torch.rand(N, 1, generator=generator, dtype=torch.float64) - 2e7
    x[:100], x[200:300] = x[100:200], x[300:400] + 0.5
    v, scale = vectors(N, 3), torch.ones((), dtype=torch.float64, requires_grad=True)
    distances = 3**0.5 * scale * (x - x.mT).abs()
    (1.7 * (1 + distances) * torch.exp(-distances) * (v @ v.mT)).sum().backward()
    operator = radial(x.requires_grad_())
    assert far_field_error(operator) is not None
    with torch.no_grad():
        derivative = operator._bilinear_derivative(v, v)[0]
    assert scale.grad is not None
    assert float((x.detach() * derivative).sum()) == pytest.approx(float(scale.grad), rel=1e-6)

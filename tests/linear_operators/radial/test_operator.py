"""The radial operator: linear_operator's conformance suite, and what that suite does not see."""

import functools
import pickle
import unittest

import pytest
import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial import tiles as radial_tiles
from gpy_iterative.linear_operators.radial.functions import (
    MATERN12,
    MATERN32,
    MATERN52,
    RATIONAL_QUADRATIC,
    RBF,
    RadialFunction,
)
from gpy_iterative.linear_operators.radial.squared_distances import SquaredDistances

FUNCTIONS = [RBF, MATERN12, MATERN32, MATERN52, RATIONAL_QUADRATIC]
SMALL_TILES = KernelProducts(tile_size=2)


def inputs(*shape: int, seed: int = 0, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, generator=generator)


def dense(operator: RadialKernelLinearOperator) -> Tensor:
    """The naive twin: pairwise differences, the function's formula, differentiable."""
    x2 = operator.x1 if operator.x2 is None else operator.x2
    q = (operator.x1.unsqueeze(-2) - x2.unsqueeze(-3)).square().sum(-1)
    r = (q + 1e-20).sqrt()
    outputscale = operator.outputscale[..., None, None]
    if operator.function is RBF:
        return outputscale * torch.exp(-q / 2)
    if operator.function is MATERN12:
        return outputscale * torch.exp(-r)
    if operator.function is MATERN32:
        return outputscale * (1 + 3**0.5 * r) * torch.exp(-(3**0.5) * r)
    if operator.function is MATERN52:
        return outputscale * (1 + 5**0.5 * r + 5 * q / 3) * torch.exp(-(5**0.5) * r)
    alpha = operator.alpha[..., None]
    return outputscale * (1 + q / (2 * alpha)) ** -alpha


def check_gradients_by_alpha(products: KernelProducts, dtype: torch.dtype) -> None:
    """For small u, u / (1 + u) - log(1 + u) loses digits, and its series -u^2 / 2 + 2 u^3 / 3 - ... does not."""
    x = torch.linspace(0, 1, 20, dtype=torch.float64).exp().unsqueeze(-1) * torch.tensor([1.0, 0.0])
    for lengthscale in (0.3, 1.0, 3.0, 10.0, 100.0, 1000.0):
        scaled, alpha = (x / lengthscale).to(dtype), torch.ones(1, dtype=dtype, requires_grad=True)
        operator = RadialKernelLinearOperator(
            scaled, torch.ones((), dtype=dtype), alpha=alpha, function=RATIONAL_QUADRATIC, products=products
        )
        (found,) = torch.autograd.grad((operator @ torch.ones(20, 1, dtype=dtype)).sum(), alpha)
        u = (scaled[:, :1].double() - scaled[:, 0].double()).square() / 2
        series = sum((-1) ** (k + 1) * (1 - 1 / k) * u**k for k in range(2, 20))
        difference = torch.where(u < 0.1, series, u / (1 + u) - u.log1p())
        expected = (difference / (1 + u)).sum().reshape(1)
        torch.testing.assert_close(found.double(), expected, rtol=100 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_by_alpha_of_long_lengthscales(dtype: torch.dtype) -> None:
    check_gradients_by_alpha(SMALL_TILES, dtype)


#: Distances in float32 from a GEMM, and derivatives whose parts cancel: over 200 seeds the worst entry of the conformance
#: suite's gradients, which are of order 1, is off by 1e-5 in the median and 5e-5 at the most; in float64 by 1e-13.
RADIAL_TOLERANCES = LinearOperatorTestCase.tolerances | {"matmul": {"rtol": 1e-3, "atol": 1e-4}}


class _Conformance:
    """What the suite needs; subclasses name the shapes."""

    seed = 3
    tolerances = RADIAL_TOLERANCES
    should_test_sample = True
    x1_shape: tuple[int, ...] = (5, 2)
    x2_shape: tuple[int, ...] | None = None
    batch_shape: tuple[int, ...] = ()
    function: RadialFunction = MATERN32
    products = SMALL_TILES

    def create_linear_op(self) -> RadialKernelLinearOperator:
        alpha = None
        if self.function is RATIONAL_QUADRATIC:
            alpha = (
                0.7 + torch.rand(*self.batch_shape, 1, generator=torch.Generator().manual_seed(2))
            ).requires_grad_()
        return RadialKernelLinearOperator(
            inputs(*self.x1_shape, spread=2.0).requires_grad_(),
            (2 + torch.rand(self.batch_shape, generator=torch.Generator().manual_seed(1))).requires_grad_(),
            x2=None if self.x2_shape is None else inputs(*self.x2_shape, seed=4, spread=2.0).requires_grad_(),
            alpha=alpha,
            function=self.function,
            products=self.products,
        )

    def evaluate_linear_op(self, linear_op: RadialKernelLinearOperator) -> Tensor:
        return dense(linear_op)


class TestSymmetric(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    pass


class TestSymmetricRationalQuadratic(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    function = RATIONAL_QUADRATIC


class TestBatch(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    x1_shape, batch_shape = (3, 5, 2), (3,)


class TestTwoBatchDimensions(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    x1_shape, batch_shape, function = (2, 3, 5, 2), (2, 3), RATIONAL_QUADRATIC
    should_test_sample = False


class TestPrecisionConcernsOnlyTheCopy(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    products = KernelProducts(tile_size=2, precision="float32")


class TestSquareCross(_Conformance, RectangularLinearOperatorTestCase, unittest.TestCase):
    x2_shape = (5, 2)


class TestRectangular(_Conformance, RectangularLinearOperatorTestCase, unittest.TestCase):
    x2_shape = (4, 2)


class TestRectangularBatch(_Conformance, RectangularLinearOperatorTestCase, unittest.TestCase):
    x1_shape, x2_shape, batch_shape = (3, 5, 2), (3, 4, 2), (3,)


def operator_of(
    function: RadialFunction, products: KernelProducts, rectangular: bool = False, batch: tuple[int, ...] = ()
) -> RadialKernelLinearOperator:
    return RadialKernelLinearOperator(
        inputs(*batch, 23, 3).double().requires_grad_(),
        torch.full(batch, 1.7).double().requires_grad_(),
        x2=inputs(*batch, 11, 3, seed=1).double().requires_grad_() if rectangular else None,
        alpha=torch.full((*batch, 1), 0.8).double().requires_grad_() if function is RATIONAL_QUADRATIC else None,
        function=function,
        products=products,
    )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("cache_memory", [0, 10 * 8 * 8 * 8, None])
def test_fast_and_differentiable_products_agree(
    function: RadialFunction, rectangular: bool, batch: tuple[int, ...], cache_memory: int | None
) -> None:
    operator = operator_of(function, KernelProducts(tile_size=8, cache_memory=cache_memory), rectangular, batch)
    rhs = inputs(*batch, operator.shape[-1], 4, seed=5).double()
    expected = dense(operator) @ rhs
    torch.testing.assert_close(operator._matmul(rhs), expected, atol=1e-7, rtol=1e-9)
    for _ in range(2):  # the second product comes from kept tiles
        with torch.no_grad():
            torch.testing.assert_close(operator._matmul(rhs), expected, atol=1e-7, rtol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(operator.to_dense(), dense(operator), atol=1e-7, rtol=1e-9)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_closed_form_derivative(function: RadialFunction, rectangular: bool, batch: tuple[int, ...]) -> None:
    operator = operator_of(function, KernelProducts(tile_size=8), rectangular, batch)
    left = inputs(*batch, operator.shape[-2], 4, seed=6).double()
    right = inputs(*batch, operator.shape[-1], 4, seed=7).double()
    expected = torch.autograd.grad((left * (dense(operator) @ right)).sum(), operator.representation())
    for ours, theirs in zip(torch.no_grad()(operator._bilinear_derivative)(left, right), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("weights", ["bilinear", "matrix"])
def test_scales_alone_have_the_same_derivative(
    function: RadialFunction, rectangular: bool, batch: tuple[int, ...], weights: str
) -> None:
    base = operator_of(function, KernelProducts(tile_size=8), rectangular, batch).detach()
    scale = (0.7 + inputs(*batch, 1, 3, seed=8).double().abs()).requires_grad_()
    operator = RadialKernelLinearOperator(
        base.x1 / scale,
        base.outputscale,
        x2=None if base.x2 is None else base.x2 / scale,
        alpha=base.alpha,
        function=function,
        products=base.products,
    )
    left = inputs(*batch, operator.shape[-2], 4, seed=6).double()
    right = inputs(*batch, operator.shape[-1], 4, seed=7).double()
    (expected,) = torch.autograd.grad((left * (dense(operator) @ right)).sum(), scale, retain_graph=True)
    with torch.no_grad():
        if weights == "matrix":
            given = operator.matrix_derivative(left @ right.mT)
        else:
            given = (operator * 1.0)._bilinear_derivative(left, right)
    pairs = [pair for pair in zip(operator.representation(), given, strict=True) if pair[1] is not None]
    found = torch.autograd.grad([tensor for tensor, _ in pairs], scale, [gradient for _, gradient in pairs])[0]
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


def test_derivative_is_none_exactly_where_none_is_wanted() -> None:
    operator = RadialKernelLinearOperator(inputs(7, 2), torch.tensor(1.0).requires_grad_(), function=RBF)
    gradients = torch.no_grad()(operator._bilinear_derivative)(inputs(7, 1), inputs(7, 1))
    assert gradients[0] is None
    assert gradients[1] is not None


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duplicate_rows_have_finite_derivatives(function: RadialFunction, dtype: torch.dtype) -> None:
    x = inputs(10, 2).to(dtype)
    x[5:] = x[:5]
    alpha = torch.ones(1, dtype=dtype) if function is RATIONAL_QUADRATIC else None
    operator = RadialKernelLinearOperator(
        x.requires_grad_(), torch.ones((), dtype=dtype), alpha=alpha, function=function, products=SMALL_TILES
    )
    left, right = inputs(10, 3, seed=1).to(dtype), inputs(10, 3, seed=2).to(dtype)
    gradient = torch.no_grad()(operator._bilinear_derivative)(left, right)[0]
    assert torch.isfinite(gradient).all()
    reference = RadialKernelLinearOperator(
        x.detach().double().requires_grad_(),
        torch.ones(()).double(),
        function=function,
        alpha=None if alpha is None else alpha.double(),
    )
    expected = torch.autograd.grad((left.double() * (dense(reference) @ right.double())).sum(), reference.x1)[0]
    torch.testing.assert_close(gradient.double(), expected, atol=1e-3 if dtype == torch.float32 else 1e-6, rtol=1e-3)


def test_inputs_may_have_no_dimension() -> None:
    x, scale = torch.zeros(5, 0, requires_grad=True), torch.tensor(1.3, requires_grad=True)
    operator = RadialKernelLinearOperator(x, scale, function=MATERN32, products=KernelProducts(tile_size=2))
    vectors = torch.arange(10.0).view(5, 2)
    with torch.no_grad():
        torch.testing.assert_close(operator._matmul(vectors), 1.3 * vectors.sum(0).expand(5, 2))
        inputs_derivative, derivative = operator._bilinear_derivative(vectors, vectors)
    assert inputs_derivative is not None
    assert inputs_derivative.shape == (5, 0)
    torch.testing.assert_close(derivative, vectors.sum(0).square().sum())


def test_cache_serves_only_its_own_tensors() -> None:
    operator = operator_of(MATERN32, KernelProducts(tile_size=8))
    rhs = inputs(23, 2, seed=5).double()
    with torch.no_grad():
        operator._matmul(rhs)
        assert operator.cache.pool.num_bytes() > 0
        other = RadialKernelLinearOperator(
            operator.x1 + 0.1 * rhs[:, :1],
            operator.outputscale,
            function=MATERN32,
            products=operator.products,
            cache=operator.cache,
        )
        torch.testing.assert_close(other._matmul(rhs), dense(other) @ rhs)
        torch.testing.assert_close(operator._matmul(rhs), dense(operator) @ rhs)
        held = operator.cache.pool.num_bytes()
        operator.x1.mul_(1.1)  # in place: the same object at another version
        torch.testing.assert_close(operator._matmul(rhs), dense(operator) @ rhs)
        assert operator.cache.pool.num_bytes() == held  # the same memory was used again


@pytest.mark.parametrize("function", [MATERN12, MATERN32, MATERN52, RBF], ids=lambda function: function.name)
def test_derivatives_are_kept_beside_the_tiles(function: RadialFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradient, and nothing is evaluated for it once a product was made."""
    left, right = inputs(23, 3, seed=5).double(), inputs(23, 3, seed=6).double()
    operator = operator_of(function, KernelProducts(tile_size=8))
    with torch.no_grad():
        keeps_none = operator_of(function, KernelProducts(tile_size=8, cache_memory=0))
        expected = keeps_none._bilinear_derivative(left, right)
        product = operator._matmul(right)
        assert torch.equal(product, operator.detach()._matmul(right))
        operator.x1.mul_(1.0)  # another version: other tiles
        operator._matmul(right)
    monkeypatch.setattr(SquaredDistances, "block", lambda *arguments: pytest.fail("evaluated again"))
    with torch.no_grad():
        found = operator._bilinear_derivative(left, right)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other)


def test_derivatives_are_kept_only_where_there_is_a_gradient_and_room() -> None:
    one = sum(rows * columns for rows, columns in ((8, 8), (8, 8), (8, 7), (8, 8), (8, 7), (7, 7))) * 8
    rhs = inputs(23, 2).double()
    # Which derivative finds no room depends on the order in which threads ask: the smallest tile's, or the largest one's.
    for memory, least, most in (
        (None, one, one),
        (2 * one, one, one),
        (2 * one - 1, one - 8 * 8 * 8, one - 7 * 7 * 8),
        (one, 0, 0),
    ):
        operator = operator_of(MATERN32, KernelProducts(tile_size=8, cache_memory=memory))
        with torch.no_grad():
            operator._matmul(rhs)
            assert operator.cache.own_bytes == one  # tiles displace derivatives, and not the other way round
            assert least <= operator.cache.derivatives.own_bytes <= most
        constant = operator_of(MATERN32, KernelProducts(tile_size=8, cache_memory=memory)).detach()
        constant._matmul(rhs)
        assert constant.cache.pool.num_bytes() == one


def test_cache_respects_its_budget() -> None:
    products = KernelProducts(tile_size=8, cache_memory=3 * 8 * 8 * 8)
    operator = operator_of(MATERN32, products)
    with torch.no_grad():
        operator._matmul(inputs(23, 2).double())
    assert 0 < operator.cache.pool.num_bytes() <= products.cache_memory


def test_slices_stay_free_of_the_matrix() -> None:
    operator = operator_of(MATERN32, KernelProducts(tile_size=8))
    assert operator[3:9, 3:9].symmetric
    assert isinstance(operator[3:9, 2:9], RadialKernelLinearOperator)
    index = torch.tensor([4, 1, 7])
    assert isinstance(operator[index, :], RadialKernelLinearOperator)
    torch.testing.assert_close(operator[3:9, 2:9].to_dense(), dense(operator)[3:9, 2:9], atol=1e-7, rtol=1e-7)


def test_pickle_leaves_the_tiles_behind() -> None:
    operator = operator_of(MATERN32, KernelProducts(tile_size=8))
    with torch.no_grad():
        operator._matmul(inputs(23, 2).double())
    copy = pickle.loads(pickle.dumps(operator))
    assert copy.cache.pool.num_bytes() == 0
    torch.testing.assert_close(copy.to_dense(), operator.to_dense())


@pytest.mark.slow
def test_compiled_tiles_are_the_same_tiles() -> None:
    eager = operator_of(MATERN32, KernelProducts(tile_size=8))
    compiled = operator_of(MATERN32, KernelProducts(tile_size=8, compile=True))
    rhs = inputs(23, 2).double()
    with torch.no_grad():
        expected = eager._matmul(rhs)
        torch.testing.assert_close(compiled.detach()._matmul(rhs), expected)
        # With a gradient to come, tiles and their derivatives are evaluated together.
        torch.testing.assert_close(compiled._matmul(rhs), expected)
        found, wanted = (operator._bilinear_derivative(rhs, rhs.flip(0)) for operator in (compiled, eager))
    for derivative, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(derivative, reference)
    # PyTorch's graph cache would hand loops of this processor's width to processes on others, which they serve wrongly.
    kept = torch.compiler.save_cache_artifacts()
    assert kept is None or not kept[1].inductor_artifacts


@pytest.mark.slow
def test_functions_and_dtypes_have_compilations_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the backend, one piece of code is compiled eight times; what would be the ninth runs pass by pass.

    What is compiled for one thread is not for several, and threads that are first at once would compile one each.
    """
    compiled = (radial_tiles._compiled_value, radial_tiles._compiled_both)
    for evaluate in compiled:
        monkeypatch.setattr(radial_tiles, evaluate.__name__, functools.cache(evaluate.__wrapped__))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    products = KernelProducts(tile_size=8, compile=True)
    every = [(function, dtype, (8, 2)) for function in FUNCTIONS for dtype in (torch.float32, torch.float64)]
    # A tile alone, a last tile of one row, or of several, and batch dimensions.
    shapes = ((1, 2), (5, 2), (25, 2), (31, 2), (2, 25, 2), (2, 31, 2), (2, 2, 31, 2))
    every += [(function, torch.float32, shape) for function in (MATERN32, RATIONAL_QUADRATIC) for shape in shapes]
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for function, dtype, shape in every:
            x, scale = inputs(*shape).to(dtype), torch.ones(shape[:-2], dtype=dtype)
            alpha = None
            if function is RATIONAL_QUADRATIC:
                alpha = 1 + torch.arange(scale.numel(), dtype=dtype).view(*scale.shape, 1)
            operator = RadialKernelLinearOperator(x, scale, function=function, alpha=alpha, products=products)
            rhs = inputs(*shape[:-1], 1).to(dtype)
            torch.testing.assert_close(operator._matmul(rhs), dense(operator) @ rhs, rtol=1e-4, atol=1e-4)


def test_float32_far_from_the_origin_needs_only_centring() -> None:
    x = inputs(50, 3).double()
    centred = (x.float() + 2000) - (x.float() + 2000).mean(0)
    operator = RadialKernelLinearOperator(centred, torch.tensor(1.0), function=MATERN32)
    expected = dense(RadialKernelLinearOperator(centred.double(), torch.tensor(1.0).double(), function=MATERN32))
    with torch.no_grad():
        torch.testing.assert_close(operator.to_dense().double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{"tile_size": 0}, {"cache_memory": -1}, {"backend": "magma"}, {"precision": "half"}]
)
def test_options_outside_their_range(options: dict) -> None:
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        KernelProducts(**options)


@pytest.mark.parametrize("rectangular", [False, True])
def test_dense_values_are_differentiable_and_need_no_product(
    rectangular: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = RadialKernelLinearOperator(
        inputs(6, 2).double().requires_grad_(),
        torch.tensor([1.5, 0.7]).double().requires_grad_(),
        x2=inputs(4, 2, seed=1).double().requires_grad_() if rectangular else None,
        function=MATERN52,
        products=SMALL_TILES,
    )
    weights = inputs(*operator.shape, seed=2).double()
    expected = torch.autograd.grad((weights * dense(operator)).sum(), operator.representation())
    with torch.no_grad():
        operator.to_dense()  # leaves nothing behind that would be returned without a graph
    monkeypatch.setattr(RadialKernelLinearOperator, "_matmul", None)
    values = operator.to_dense()
    assert values.shape == operator.shape
    for ours, theirs in zip(
        torch.autograd.grad((weights * values).sum(), operator.representation()), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
def test_far_points_make_no_denormal_numbers(function: RadialFunction) -> None:
    x = torch.tensor([[0.0], [12.0], [95.0], [1e4]])
    alpha = torch.ones(1) if function is RATIONAL_QUADRATIC else None
    operator = RadialKernelLinearOperator(x, torch.tensor(1.0), alpha=alpha, function=function)
    with torch.no_grad():
        matrix = operator.to_dense()
    assert (matrix >= 1e-30).all()
    torch.testing.assert_close(matrix.double(), dense(operator.double()), atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("rectangular", [False, True])
def test_dense_matrices_with_a_graph_take_no_dimension_more(rectangular: bool) -> None:
    x = inputs(100, 60).requires_grad_()
    x2 = inputs(90, 60, seed=1) if rectangular else None
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda t: t):
        RadialKernelLinearOperator(x, torch.tensor(1.0), x2=x2, function=MATERN32).to_dense()
    assert max(saved) <= 100 * 100


def test_dense_matrices_with_a_graph_keep_the_digits_of_neighbours_far_away() -> None:
    """Hours of a year, in lengthscales of a day."""
    x1 = torch.stack([torch.linspace(-180.0, 180.0, 200), inputs(200, seed=3)], dim=-1)
    x2 = x1 + 0.1 * inputs(200, 2, seed=1)
    operator = RadialKernelLinearOperator(x1.requires_grad_(), torch.tensor(1.0), x2=x2, function=MATERN32)
    exact = RadialKernelLinearOperator(x1.double(), torch.tensor(1.0).double(), x2=x2.double(), function=MATERN32)
    torch.testing.assert_close(operator.to_dense().double(), dense(exact), atol=1e-4, rtol=0)
    (gradient,) = torch.autograd.grad(operator.to_dense().sum(), x1)
    (expected,) = torch.autograd.grad(dense(exact).sum(), x1)
    torch.testing.assert_close(gradient, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("function", [MATERN12, MATERN32, MATERN52, RBF])
@pytest.mark.parametrize("of_scales", [True, False])
@pytest.mark.parametrize("spread", [200.0, 20_000.0])
def test_float32_derivatives_of_inputs_that_span_thousands_of_lengthscales(
    function: RadialFunction, of_scales: bool, spread: float
):
    """The weighted sum of (x_i - x_j)^2 of neighbours, beside which the squares of x are 10^8 times as large."""
    generator = torch.Generator().manual_seed(0)
    x = 24 * torch.rand(300, 2, generator=generator)
    x[150:, 0] += spread
    x = x - x.mean(0)
    left, right = torch.rand(2, 300, 4, generator=generator)  # positive: the terms do not cancel

    def derivative(dtype: torch.dtype) -> Tensor:
        x1 = x.to(dtype).requires_grad_()
        operator = RadialKernelLinearOperator(
            x1, torch.ones((), dtype=dtype), function=function, products=KernelProducts(tile_size=64)
        )
        found = operator._bilinear_derivative(left.to(dtype), right.to(dtype))[0]
        return ((found * x1).sum(0) if of_scales else found).detach().double()

    truth = derivative(torch.float64)
    torch.testing.assert_close(derivative(torch.float32), truth, rtol=0, atol=1e-3 * float(truth.norm()))


@pytest.mark.parametrize("function", [MATERN12, MATERN32, MATERN52, RBF], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_billions_of_lengthscales_apart_nothing_has_a_derivative(function: RadialFunction, dtype: torch.dtype) -> None:
    """As time stamps in seconds: derivatives at the largest r, times squared distances, were large."""
    x = torch.arange(60, dtype=dtype).unsqueeze(-1) * 2.0**28
    x[1] = x[0]
    x.requires_grad_()
    operator = RadialKernelLinearOperator(x, torch.ones((), dtype=dtype), function=function)
    ones = torch.ones(60, 1, dtype=dtype)
    with torch.no_grad():
        assert float((operator._bilinear_derivative(ones, ones)[0] * x).sum().abs()) < 1e-3

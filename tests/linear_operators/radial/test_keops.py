"""KeOps in place of tiles: the same conformance suite, dense references, and models that train the same.

Every formula, dimension, width and dtype is a program that g++ compiles for about 7 s where the disk cache is cold.
All tests therefore use inputs of 2 dimensions and one width of 8 columns, float32 serves two functions only, and
what needs no program (how columns are split into widths) is tested without one. A derivative's program has the
function's value in it, too: products serve two functions, with alpha and without. 10 programs in all.
"""

import unittest
from collections.abc import Callable
from pathlib import Path

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator import LinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch import Tensor

from gpy_iterative.linear_operators import (
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
    kernel_operator,
)
from gpy_iterative.linear_operators import products as products_module
from gpy_iterative.linear_operators.extensions import columns_matmul, dense_rows, principal_block, rows_matmul
from gpy_iterative.linear_operators.radial import keops as keops_sums
from gpy_iterative.linear_operators.radial.functions import (
    MATERN12,
    MATERN32,
    MATERN52,
    RATIONAL_QUADRATIC,
    RBF,
    RadialFunction,
)
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from gpy_iterative.solvers import AlternatingProjections, ConjugateGradients
from tests.exact.gaussian_models import Regression, data
from tests.linear_operators.radial.test_operator import FUNCTIONS, _Conformance, check_gradients_by_alpha, dense, inputs

pytest.importorskip("pykeops")

pytestmark = pytest.mark.xdist_group("compiler")

KEOPS = KernelProducts(backend="keops", tile_size=8)
DIMENSION = 2


@pytest.fixture(autouse=True)
def _one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keops_sums, "WIDTHS", (8,))


class _Sums(_Conformance):
    products = KEOPS
    tolerances = LinearOperatorTestCase.tolerances


class TestSymmetric(_Sums, LinearOperatorTestCase, unittest.TestCase):
    pass


class TestBatch(_Sums, LinearOperatorTestCase, unittest.TestCase):
    x1_shape, batch_shape = (3, 5, DIMENSION), (3,)


class TestTwoBatchDimensions(_Sums, LinearOperatorTestCase, unittest.TestCase):
    x1_shape, batch_shape = (2, 3, 5, DIMENSION), (2, 3)
    should_test_sample = False


class TestSquareCross(_Sums, RectangularLinearOperatorTestCase, unittest.TestCase):
    x2_shape = (5, DIMENSION)


class TestRectangular(_Sums, RectangularLinearOperatorTestCase, unittest.TestCase):
    x2_shape = (4, DIMENSION)


class TestRectangularBatch(_Sums, RectangularLinearOperatorTestCase, unittest.TestCase):
    x1_shape, x2_shape, batch_shape = (3, 5, DIMENSION), (3, 4, DIMENSION), (3,)


def operator_of(
    function: RadialFunction,
    rectangular: bool = False,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    rows: int = 23,
) -> RadialKernelLinearOperator:
    return RadialKernelLinearOperator(
        inputs(*batch, rows, DIMENSION).to(dtype).requires_grad_(),
        torch.full(batch, 1.7, dtype=dtype).requires_grad_(),
        x2=inputs(*batch, 11, DIMENSION, seed=1).to(dtype).requires_grad_() if rectangular else None,
        alpha=torch.full((*batch, 1), 0.8, dtype=dtype).requires_grad_() if function is RATIONAL_QUADRATIC else None,
        function=function,
        products=KEOPS,
    )


@pytest.mark.parametrize("function", [MATERN32, RATIONAL_QUADRATIC], ids=lambda f: f.name)
@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("columns", [1, 11])
def test_products_equal_the_dense_ones(
    function: RadialFunction, rectangular: bool, batch: tuple[int, ...], columns: int
) -> None:
    operator = operator_of(function, rectangular, batch)
    left = inputs(*batch, operator.shape[-2], columns, seed=6).double()
    right = inputs(*batch, operator.shape[-1], columns, seed=7).double()
    with torch.no_grad():
        matrix = dense(operator)
        # The twin's own distances carry 1e-20 under their root.
        torch.testing.assert_close(operator._matmul(right), matrix @ right, atol=1e-8, rtol=1e-9)
        torch.testing.assert_close(operator.to_dense(), matrix, atol=1e-7, rtol=1e-9)
        torch.testing.assert_close(operator._t_matmul(left), matrix.mT @ left, atol=1e-8, rtol=1e-9)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("columns", [1, 11])
def test_derivatives_equal_the_dense_ones(
    function: RadialFunction, rectangular: bool, batch: tuple[int, ...], columns: int
) -> None:
    operator = operator_of(function, rectangular, batch)
    left = inputs(*batch, operator.shape[-2], columns, seed=6).double()
    right = inputs(*batch, operator.shape[-1], columns, seed=7).double()
    expected = torch.autograd.grad((left * (dense(operator) @ right)).sum(), operator.representation())
    for ours, theirs in zip(torch.no_grad()(operator._bilinear_derivative)(left, right), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("rectangular", [False, True])
def test_float32_has_the_accuracy_of_float32(rectangular: bool) -> None:
    single, double = (operator_of(MATERN32, rectangular, dtype=dtype) for dtype in (torch.float32, torch.float64))
    left, right = inputs(single.shape[-2], 3, seed=6), inputs(single.shape[-1], 3, seed=7)
    with torch.no_grad():
        product = single._matmul(right)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), dense(double) @ right.double(), atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad((left.double() * (dense(double) @ right.double())).sum(), double.representation())
    for ours, theirs in zip(torch.no_grad()(single._bilinear_derivative)(left, right), expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
def test_duplicate_rows_have_finite_derivatives(function: RadialFunction) -> None:
    operator = operator_of(function, rows=10)
    operator.x1.data[5:] = operator.x1.data[:5]
    left, right = inputs(10, 3, seed=1).double(), inputs(10, 3, seed=2).double()
    expected = torch.autograd.grad((left * (dense(operator) @ right)).sum(), operator.x1)[0]
    torch.testing.assert_close(
        torch.no_grad()(operator._bilinear_derivative)(left, right)[0], expected, atol=1e-6, rtol=1e-6
    )


def test_derivative_is_none_exactly_where_none_is_wanted() -> None:
    operator = operator_of(MATERN32)
    operator.x1.requires_grad_(False)
    vectors = inputs(23, 1).double()
    gradients = torch.no_grad()(operator._bilinear_derivative)(vectors, vectors)
    assert gradients[0] is None
    assert gradients[1] is not None
    operator.outputscale.requires_grad_(False)
    assert torch.no_grad()(operator._bilinear_derivative)(vectors, vectors) == (None, None)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("block", [slice(0, 8), slice(3, 6), slice(5, 19), slice(0, 23)])
def test_parts_equal_the_dense_ones(block: slice, noisy: bool) -> None:
    operator: LinearOperator = operator_of(MATERN32)
    if noisy:
        operator = NoisyLinearOperator(operator, torch.linspace(0.1, 0.5, 23).double())
    with torch.no_grad():
        matrix, rhs, rows = operator.to_dense(), inputs(23, 4, seed=9).double(), torch.tensor([7, 0, 20, 13])
        torch.testing.assert_close(columns_matmul(operator, block, rhs[block]), matrix[:, block] @ rhs[block])
        torch.testing.assert_close(rows_matmul(operator, block, rhs), matrix[block] @ rhs)
        torch.testing.assert_close(rows_matmul(operator, rows, rhs), matrix[rows] @ rhs)
        torch.testing.assert_close(principal_block(operator, block), matrix[block, block])
        torch.testing.assert_close(dense_rows(operator, rows), matrix[rows])


def test_products_store_nothing() -> None:
    operator = operator_of(MATERN32)
    with torch.no_grad():
        operator._matmul(inputs(23, 2).double())
    assert operator.cache.pool.num_bytes() == 0


def test_no_rows_or_no_columns() -> None:
    operator = operator_of(MATERN32, rectangular=True)
    with torch.no_grad():
        assert operator[:0, :]._matmul(inputs(11, 2).double()).shape == (0, 2)
        assert torch.equal(operator[:, :0]._matmul(torch.zeros(0, 2).double()), torch.zeros(23, 2).double())
        assert operator._matmul(torch.zeros(11, 0).double()).shape == (23, 0)


@pytest.mark.parametrize("size", [0, 1, 8, 9, 33, 64, 65, 130, 200])
def test_columns_are_covered_once_by_few_widths(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    blocks = keops_sums.column_blocks(size)
    assert [column for part, _ in blocks for column in range(part.start, part.stop)] == list(range(size))
    assert all(part.stop - part.start <= width for part, width in blocks)
    assert {width for _, width in blocks} <= set(keops_sums.WIDTHS)


def test_programs_are_compiled_on_one_row_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str | int] = []

    class Lock:
        def __init__(self, path: Path) -> None:
            assert path.parent.is_dir()

        def __enter__(self) -> None:
            events.append("locked")

        def __exit__(self, *error: object) -> None:
            events.append("released")

    monkeypatch.setattr(keops_sums, "FileLock", Lock)
    monkeypatch.setattr(keops_sums, "Genred", lambda *_, **__: lambda x, backend: events.append(len(x)))
    program = keops_sums._Program("formula", MATERN32, DIMENSION)
    for dtype in (torch.float32, torch.float64):
        for _ in range(2):
            program(torch.zeros(5, 1, dtype=dtype))
    assert events == 2 * ["locked", 1, "released", 5, 5]


def test_sums_are_computed_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[str] = []
    monkeypatch.setattr(keops_sums, "Genred", lambda *_, **__: lambda x, backend: backends.append(backend))
    program = keops_sums._Program("formula", MATERN32, DIMENSION)
    program(torch.zeros(5, 1))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    program(torch.zeros(5, 1))
    assert backends == ["CPU", "CPU", "GPU"]


# Models


def model_of(kernel: kernels.Kernel) -> tuple[Regression, Tensor, Tensor]:
    x, y = data(40, DIMENSION)
    return Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double(), x, y


def value_and_gradients(
    kernel: kernels.Kernel, products: KernelProducts, solver: Solver
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The mll, its gradients, and the predictive mean at a few points; probes are the same for every backend."""
    model, x, y = model_of(kernel)
    mll = HutchinsonMarginalLogLikelihood(
        model.likelihood, model, num_probes=3, solver=solver, products=products, generator=0
    )
    value = mll(model(x), y)
    value.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        mean = mll.posterior()(x[:5] + 0.1).mean
    return value.detach(), gradients, mean


def _kernel() -> kernels.Kernel:
    """A sum of scaled radial kernels, one of them on other active dims, and a structured one beside them."""
    return (
        kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=DIMENSION))
        + kernels.ScaleKernel(kernels.RQKernel(active_dims=(1, 0)))
        + kernels.LinearKernel()
    )


@pytest.mark.parametrize(
    "solver", [ConjugateGradients(tolerance=1e-9), AlternatingProjections(tolerance=1e-9, block_size=16)]
)
def test_mll_and_prediction_are_those_of_tiles(solver: Solver) -> None:
    by_keops = value_and_gradients(_kernel(), KEOPS, solver)
    by_tiles = value_and_gradients(_kernel(), KernelProducts(backend="tiles"), solver)
    for ours, theirs in zip(by_keops[1], by_tiles[1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(by_keops[0], by_tiles[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(by_keops[2], by_tiles[2], atol=1e-6, rtol=1e-6)


Make = Callable[[], kernels.Kernel]
AUTO = KernelProducts()


@pytest.mark.parametrize(
    ("make", "make_stock", "products"),
    [
        (lambda: kernels.keops.RBFKernel(ard_num_dims=2), lambda: kernels.RBFKernel(ard_num_dims=2), AUTO),
        (lambda: kernels.keops.MaternKernel(nu=1.5), lambda: kernels.MaternKernel(nu=1.5), AUTO),
        (lambda: kernels.keops.MaternKernel(nu=1.5), lambda: kernels.MaternKernel(nu=1.5), KEOPS),
        (kernels.PeriodicKernel, kernels.PeriodicKernel, KEOPS),
        # The two periodic kernels are different functions of their lengthscale: this one stands for itself.
        (kernels.keops.PeriodicKernel, kernels.keops.PeriodicKernel, AUTO),
    ],
    ids=["RBF, auto", "Matern, auto", "Matern, keops", "stock periodic, keops", "Periodic, auto"],
)
def test_gpytorchs_keops_kernels_train_like_the_stock_ones(
    make: Make, make_stock: Make, products: KernelProducts
) -> None:
    (model, x, y), (stock, _, _) = (model_of(kernels.ScaleKernel(made())) for made in (make, make_stock))
    mll = HutchinsonMarginalLogLikelihood(model.likelihood, model, products=products)
    reference = gpytorch.mlls.ExactMarginalLogLikelihood(stock.likelihood, stock)
    for objective, member in ((mll, model), (reference, stock)):
        optimizer = torch.optim.Adam(member.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = -objective(member(x), y)
            loss.backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_keops_periodic_kernel_is_evaluated_densely_in_its_tiles() -> None:
    x = inputs(900, DIMENSION).double()  # beyond GPyTorch's own threshold for KeOps
    kernel = kernels.keops.PeriodicKernel().double()
    with torch.no_grad():
        product = kernel_operator(kernel(x), KernelProducts())._matmul(torch.ones(900, 1).double())
        with gpytorch.settings.use_keops(False):
            torch.testing.assert_close(product, kernel(x).to_dense().sum(-1, keepdim=True))


# Bad input


@pytest.mark.parametrize("kernel", [kernels.CosineKernel(), kernels.RBFKernel() * kernels.MaternKernel()])
def test_kernels_without_a_formula(kernel: kernels.Kernel) -> None:
    x, _ = data(20, DIMENSION)
    with pytest.raises(ValueError, match=rf"{type(kernel).__name__} has no KeOps formula.*backend='auto'"):
        kernel_operator(kernel.double()(x), KEOPS)


def test_radial_functions_without_a_formula() -> None:
    class Unknown(type(MATERN12)):
        keops = None

    operator = RadialKernelLinearOperator(
        inputs(5, DIMENSION), torch.tensor(1.0), function=Unknown("unknown"), products=KEOPS
    )
    with torch.no_grad(), pytest.raises(ValueError, match=r"unknown function has no KeOps formula.*backend='auto'"):
        operator._matmul(inputs(5, 1))


def test_products_where_pykeops_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when options come from another machine's checkpoint, past their own check."""
    monkeypatch.setattr(products_module, "pykeops", None)
    operator = RadialKernelLinearOperator(inputs(5, 7), torch.tensor(1.0), function=MATERN52, products=KEOPS)
    with torch.no_grad(), pytest.raises(ImportError, match="pip install"):
        operator._matmul(inputs(5, 1))
    assert RBF.keops is not None


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
def test_gradients_by_alpha_of_long_lengthscales(dtype: torch.dtype) -> None:
    check_gradients_by_alpha(KEOPS, dtype)


def test_products_with_a_large_alpha() -> None:
    """The logarithm of 1 + u is multiplied by alpha, and so is its rounding."""
    x, v = torch.randn(2, 13, 2, generator=torch.Generator().manual_seed(0)).double()
    alpha = torch.tensor([1e6]).double()
    products = [
        RadialKernelLinearOperator(x, torch.tensor(1.3).double(), alpha=alpha, function=RATIONAL_QUADRATIC, products=by)
        @ v
        for by in (KEOPS, KernelProducts(tile_size=8))
    ]
    torch.testing.assert_close(*products, rtol=0, atol=1e-13)


def test_products_of_derivatives_are_those_of_tiles() -> None:
    x, v = torch.randn(2, 13, 2, generator=torch.Generator().manual_seed(0)).double()
    by_keops, by_tiles = (
        RadialKernelLinearOperator(
            x.requires_grad_(),
            torch.tensor(1.3).double(),
            alpha=torch.tensor([1.5]).double(),
            function=RATIONAL_QUADRATIC,
            products=products,
        )
        for products in (KEOPS, KernelProducts(tile_size=8))
    )
    with torch.no_grad():
        torch.testing.assert_close(by_keops.scale_products(v[:, 0]), by_tiles.scale_products(v[:, 0]))
        torch.testing.assert_close(by_keops.alpha_product(v[:, 0]), by_tiles.alpha_product(v[:, 0]))

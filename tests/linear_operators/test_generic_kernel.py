"""Any kernel in tiles: conformance, closed derivative, multi-output kernels, and a user's kernel left as it was."""

import itertools
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase, RectangularLinearOperatorTestCase
from torch import Tensor

from gpy_iterative.linear_operators import GenericKernelLinearOperator, KernelProducts, generic_kernel
from gpy_iterative.linear_operators.extensions import in_float64, rows_matmul
from gpy_iterative.linear_operators.kernel_functions import kernel_diagonal, kernel_matrix
from gpy_iterative.linear_operators.tiles import tiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.worker_threads import ByDevice
from tests.linear_operators.radial.test_operator import inputs


class UserKernel(kernels.Kernel):
    """Written by somebody else: no diag, no batch."""

    has_lengthscale = True

    def forward(self, x1: Tensor, x2: Tensor, **params) -> Tensor:
        return torch.exp(-(x1[:, None] - x2[None]).abs().sum(-1) / self.lengthscale)


KERNELS: dict[str, Callable[[], kernels.Kernel]] = {
    "product": lambda: kernels.ScaleKernel(kernels.PeriodicKernel() * kernels.LinearKernel()),
    "spectral mixture": lambda: kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2),
    "sum": lambda: kernels.RBFKernel(active_dims=(0,)) + kernels.ScaleKernel(kernels.PeriodicKernel(active_dims=(1,))),
    "user's own": UserKernel,
    "polynomial": lambda: kernels.PolynomialKernel(power=2),
    "gradients": kernels.RBFKernelGrad,
    "batch": lambda: kernels.PeriodicKernel(batch_shape=torch.Size([3])),
}


def operator_of(name: str, rectangular: bool = False, dtype: torch.dtype = torch.float64):
    kernel = KERNELS[name]().to(dtype)
    x2 = inputs(6, 2, seed=1).to(dtype).requires_grad_() if rectangular else None
    return GenericKernelLinearOperator.of_kernel(
        kernel, inputs(13, 2).to(dtype).requires_grad_(), x2, products=KernelProducts(tile_size=4)
    )


def reference(operator: GenericKernelLinearOperator) -> Tensor:
    with gpytorch.settings.lazily_evaluate_kernels(False):
        return gpytorch.Module.__call__(operator.kernel, operator.x1, operator.columns).to_dense()


def originals(operator: GenericKernelLinearOperator) -> list[Tensor]:
    """What `representation()` stands for in `reference`: the operator's parameters are copies of the kernel's."""
    return originals_of(operator.kernel, operator.x1, operator.x2)


def originals_of(kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None) -> list[Tensor]:
    return [x1, *kernel.parameters(), *([] if x2 is None else [x2])]


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rectangular", [False, True])
def test_products_and_derivatives_equal_the_dense_ones(name: str, rectangular: bool) -> None:
    operator = operator_of(name, rectangular)
    matrix = reference(operator)
    assert operator.shape == matrix.shape
    rhs = inputs(operator.shape[-1], 3, seed=5).double()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(operator._matmul(rhs), matrix @ rhs)
    torch.testing.assert_close(operator._matmul(rhs), matrix @ rhs)
    left = inputs(operator.shape[-2], 3, seed=6).double().expand(*matrix.shape[:-1], 3)
    right = rhs.expand(*matrix.shape[:-2], -1, -1)
    expected = torch.autograd.grad((left * (matrix @ right)).sum(), originals(operator), allow_unused=True)
    for ours, theirs in zip(torch.no_grad()(operator._bilinear_derivative)(left, right), expected, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", KERNELS)
def test_diagonal_and_slices(name: str) -> None:
    operator = operator_of(name)
    with torch.no_grad():
        matrix = reference(operator)
        torch.testing.assert_close(operator.diagonal(dim1=-1, dim2=-2), matrix.diagonal(dim1=-1, dim2=-2))
        torch.testing.assert_close(operator[..., 3:9, 3:9].to_dense(), matrix[..., 3:9, 3:9])
        torch.testing.assert_close(operator[..., 3:9, :6].to_dense(), matrix[..., 3:9, :6])
        index = torch.tensor([5, 0, 9])
        torch.testing.assert_close(operator[..., index, :].to_dense(), matrix[..., index, :])


def test_diagonals_of_batches_with_tasks() -> None:
    """GPyTorch multiplied vectors by the IndexKernel's matrices."""
    batch = torch.Size([3])
    kernel = kernels.RBFKernel(active_dims=(0,), batch_shape=batch) * kernels.IndexKernel(
        2, 1, batch_shape=batch, active_dims=(1,)
    )
    x = torch.stack([torch.linspace(0, 1, 13), torch.arange(13) % 2.0], dim=-1)
    operator = GenericKernelLinearOperator.of_kernel(kernel, x, products=KernelProducts(tile_size=4))
    torch.testing.assert_close(operator._diagonal(), reference(operator).diagonal(dim1=-1, dim2=-2))


def test_a_low_rank_term_leaves_the_terms_before_it_unfactorised(recwarn: pytest.WarningsRecorder) -> None:
    """GPyTorch's sum factorises them, and fails where they have no Cholesky factor."""
    cosine, linear = kernels.CosineKernel(), kernels.LinearKernel()  # a cosine of distances in the plane is indefinite
    x = inputs(13, 2)
    expected = cosine(x).to_dense() + 2 * linear(x).to_dense()
    assert torch.allclose(kernel_matrix(cosine + linear + linear, x, x), expected)
    tiled = GenericKernelLinearOperator.of_kernel(cosine + linear + linear, x, products=KernelProducts(tile_size=7))
    assert torch.allclose(tiled.to_dense(), expected)
    assert not recwarn


def test_a_product_of_factors_that_are_not_positive_definite() -> None:
    # linear_operator's own multiplies Cholesky factors, with jitter, of sums with a low rank.
    factors = kernels.LinearKernel() + kernels.CosineKernel(), kernels.RBFKernel() + kernels.ConstantKernel()
    kernel, x = kernels.ProductKernel(*factors).double(), inputs(40, 2)
    wanted = torch.stack([factor(x).to_dense() for factor in factors]).prod(0)

    torch.testing.assert_close(kernel_matrix(kernel, x, x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kernel_diagonal(kernel, x), wanted.diagonal(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [6, 13])
def test_a_product_over_dimensions_of_grids(rows: int) -> None:
    """GPyTorch's fails for different numbers of inputs, and approximates many."""
    base = kernels.GridInterpolationKernel(kernels.RBFKernel(), 20, num_dims=1, grid_bounds=[(-5.0, 5.0)]).double()
    x, other = inputs(13, 2).double(), inputs(rows, 2, seed=1).double()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # GPyTorch deprecates this kernel, torch what grids use
        kernel = kernels.ProductStructureKernel(base, 2)
        operator = GenericKernelLinearOperator.of_kernel(kernel, x, other, products=KernelProducts(tile_size=5))
        expected = base(x[:, :1], other[:, :1]).to_dense() * base(x[:, 1:], other[:, 1:]).to_dense()
        torch.testing.assert_close(operator @ torch.eye(rows).double(), expected)
        whole = GenericKernelLinearOperator.of_kernel(kernel, x)
        torch.testing.assert_close(whole._diagonal(), whole.to_dense().diagonal())
        torch.testing.assert_close(
            kernel_diagonal(kernel * kernels.RBFKernel().double(), x), whole.to_dense().diagonal()
        )


@pytest.mark.parametrize("structure", [kernels.AdditiveStructureKernel, kernels.ProductStructureKernel])
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_the_diagonal_of_as_many_points_as_dimensions(structure: type[kernels.Kernel]) -> None:
    """GPyTorch takes a number for each dimension and point for a matrix of the points."""
    kernel = structure(kernels.PolynomialKernel(power=2, active_dims=(0, 2, 3)), 3).double()
    x = inputs(3, 4).double()
    torch.testing.assert_close(kernel_diagonal(kernel, x), kernel_matrix(kernel, x, x).diagonal())


def test_the_diagonal_of_as_many_points_as_members() -> None:
    """GPyTorch takes a number for each member and point for a matrix of the points: variances were wrong."""
    three = torch.Size([3])
    kernel = kernels.PolynomialKernel(power=2, batch_shape=three) * kernels.LinearKernel(batch_shape=three)
    kernel = kernel.double().initialize(**{"kernels.1.variance": torch.tensor([1.0, 2.0, 3.0]).double().view(3, 1, 1)})
    operator = GenericKernelLinearOperator.of_kernel(
        kernel, inputs(7, 2).double(), products=KernelProducts(tile_size=4)
    )
    torch.testing.assert_close(operator.diagonal(), operator.to_dense().diagonal(dim1=-2, dim2=-1))


class Calling(kernels.Kernel):
    """A user's kernel that calls a part in one of GPyTorch's ways."""

    def __init__(self, part: kernels.Kernel, call: Callable[..., Any]) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        return self.call(self.part, x1, x2, diag)


@pytest.mark.parametrize(
    "call",
    [
        lambda part, x1, x2, diag: part(x1, x2, diag),
        lambda part, x1, x2, diag: part(x1=x1, x2=x2, diag=diag),
        lambda part, x1, x2, diag: part(x1, None, diag=True) if diag else part(x1, x2),
        lambda part, x1, x2, diag: part(x1[..., 0], x2[..., 0], diag=diag),
    ],
    ids=["position", "names", "one argument", "one dimension"],
)
def test_diagonals_of_parts_that_a_users_kernel_calls(call: Callable[..., Any]) -> None:
    kernel, x = Calling(kernels.LinearKernel(batch_shape=torch.Size([3])), call).double(), inputs(3, 2).double()
    torch.testing.assert_close(kernel_diagonal(kernel, x), kernel(x).to_dense().diagonal(dim1=-2, dim2=-1))


def test_aligned_slices_of_a_multi_output_kernel_stay_free_of_the_matrix() -> None:
    operator = operator_of("gradients")
    assert isinstance(operator[3:9, 3:9], GenericKernelLinearOperator)
    assert operator[3:9, 3:9].symmetric


def test_a_kernel_that_raises_is_left_as_it_was() -> None:
    class Broken(UserKernel):
        def forward(self, x1: Tensor, x2: Tensor, **params) -> Tensor:
            raise RuntimeError("broken")

    kernel = Broken(active_dims=(0, 1)).double()
    parameter = kernel.raw_lengthscale
    with torch.no_grad():
        operator = GenericKernelLinearOperator.of_kernel(kernel, inputs(5, 2).double())
    with pytest.raises(RuntimeError, match="broken"):
        operator._matmul(inputs(5, 1).double())
    with pytest.raises(RuntimeError, match="broken"):
        GenericKernelLinearOperator.of_kernel(kernel, inputs(5, 2).double())
    assert kernel.raw_lengthscale is parameter
    assert kernel.active_dims.tolist() == [0, 1]


def test_a_kernel_that_returns_another_shape_is_named() -> None:
    class Short(UserKernel):
        def forward(self, x1: Tensor, x2: Tensor, **params) -> Tensor:
            return super().forward(x1, x2)[:, :-1]

    with torch.no_grad():
        operator = GenericKernelLinearOperator.of_kernel(Short().double(), inputs(5, 2).double())
    with pytest.raises(ValueError, match=r"Short has a matrix of shape \(5, 4\) for 5 and 5 inputs: its forward must"):
        operator.to_dense()
    with pytest.raises(ValueError, match=r"Short has a diagonal of shape \(5, 4\) for 5 inputs: with diag=True"):
        operator.diagonal(dim1=-1, dim2=-2)


def test_a_kernel_that_fails_for_different_numbers_of_inputs_is_named() -> None:
    """GPyTorch's RBFKernelGradGrad."""
    x, kernel = inputs(13, 2).double(), kernels.RBFKernelGradGrad().double()
    operator = GenericKernelLinearOperator.of_kernel(kernel, x, products=KernelProducts(tile_size=40))
    with pytest.raises(RuntimeError, match="must match the size") as raised:
        operator @ torch.ones(operator.shape[-1], 1).double()
    assert "RBFKernelGradGrad was called with 8 and 5 inputs" in raised.value.__notes__[0]


class Borrowing(UserKernel):
    """Uses whatever tensor it is given."""

    def forward(self, x1: Tensor, x2: Tensor, **params) -> Tensor:
        return self.borrowed() * super().forward(x1, x2)


@pytest.mark.parametrize("source", ["a leaf", "a graph", "its own parameter", "its inputs"])
@pytest.mark.parametrize("rectangular", [False, True])
def test_gradients_reach_tensors_that_a_kernel_does_not_register(source: str, rectangular: bool) -> None:
    kernel, leaf = Borrowing().double(), torch.tensor(0.7).double().requires_grad_()
    x1 = inputs(13, 2).double().requires_grad_()
    x2 = inputs(6, 2, seed=1).double().requires_grad_() if rectangular else None
    leaves = [*originals_of(kernel, x1, x2), leaf]
    borrowed = {
        "a leaf": leaf,
        "a graph": leaf.exp(),
        "its own parameter": kernel.raw_lengthscale.exp() * leaf,
        "its inputs": x1.sum() * leaf,
    }[source]
    kernel.borrowed = lambda: borrowed
    operator = GenericKernelLinearOperator.of_kernel(kernel, x1, x2, products=KernelProducts(tile_size=4))
    left, right = (inputs(size, 3, seed=size).double() for size in operator.shape)
    expected = torch.autograd.grad((left * (reference(operator) @ right)).sum(), leaves, retain_graph=True)
    found = torch.autograd.grad((left * (operator.clone() @ right)).sum(), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)


def test_second_derivatives_by_tensors_that_a_kernel_does_not_register_are_refused() -> None:
    kernel, leaf = Borrowing().double(), torch.tensor(0.7).double().requires_grad_()
    kernel.borrowed = lambda: leaf
    operator = GenericKernelLinearOperator.of_kernel(kernel, inputs(5, 2).double())
    product = (operator @ inputs(5, 1).double()).sum()
    with pytest.raises(NotImplementedError, match="register them"):
        torch.autograd.grad(product, leaf, create_graph=True)


class _Conformance:
    seed = 4
    x2_shape: tuple[int, ...] | None = None

    def create_linear_op(self) -> GenericKernelLinearOperator:
        kernel = kernels.ScaleKernel(kernels.PeriodicKernel() * kernels.RBFKernel())
        kernel.outputscale = 2.0
        kernel.base_kernel.kernels[0].lengthscale = 2.0
        kernel.base_kernel.kernels[1].lengthscale = 2.0
        return GenericKernelLinearOperator.of_kernel(
            kernel,
            inputs(5, 2, spread=2.0).requires_grad_(),
            None if self.x2_shape is None else inputs(*self.x2_shape, seed=3).requires_grad_(),
            products=KernelProducts(tile_size=2),
        )

    def evaluate_linear_op(self, linear_op: GenericKernelLinearOperator) -> Tensor:
        return linear_op.evaluate(linear_op.x1, linear_op.columns)


class TestGeneric(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    pass


class TestGenericRectangular(_Conformance, RectangularLinearOperatorTestCase, unittest.TestCase):
    x2_shape = (4, 2)


@pytest.mark.parametrize("index", [1, slice(0, 2), torch.tensor([2, 0])])
def test_members_of_a_batch_keep_products_and_gradients(index: int | slice | Tensor) -> None:
    operator = operator_of("batch")
    matrix, member = reference(operator)[index], operator[index]
    assert isinstance(member, GenericKernelLinearOperator)
    assert member.shape == matrix.shape
    rhs = inputs(13, 2, seed=5).double()
    with torch.no_grad():
        torch.testing.assert_close(member._matmul(rhs), matrix @ rhs)
        torch.testing.assert_close(member.diagonal(dim1=-1, dim2=-2), matrix.diagonal(dim1=-1, dim2=-2))
        torch.testing.assert_close(member[..., 3:9, 2:].to_dense(), matrix[..., 3:9, 2:])
    left = rhs.expand(*matrix.shape[:-1], 2)
    expected = torch.autograd.grad((left * (matrix @ left)).sum(), originals(operator))
    for ours, theirs in zip(torch.no_grad()(member._bilinear_derivative)(left, left), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)


def test_rows_of_a_kernel_with_several_outputs_take_no_full_matrix() -> None:
    operator = operator_of("gradients")
    assert len(operator.tiles().rows) > 1
    evaluated = []
    evaluate = operator.evaluate
    operator.evaluate = lambda x1, x2, *rest: evaluated.append(x1.shape[-2]) or evaluate(x1, x2, *rest)  # pyright: ignore
    matrix = reference(operator)
    for rows in (torch.tensor([38, 0, 7, 8, 7]), slice(4, 9)):
        torch.testing.assert_close(operator.tiles().block(rows, slice(None)), matrix.detach()[rows])
    assert max(evaluated) <= 4


@pytest.mark.parametrize("length", [1, 4, 10, 11, 1000])  # three outputs an input: parts begin and end within one
def test_picked_rows_of_several_outputs_are_evaluated_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their columns come in parts, whose inputs alone are evaluated for them."""
    operator = operator_of("gradients")
    rows, matrix = torch.tensor([38, 0, 7, 8, 7]), reference(operator).detach()
    monkeypatch.setattr(tiles, "PICKED_ENTRIES", ByDevice(cpu=length * len(rows), accelerator=1))
    entries: list[int] = []
    evaluate = operator.evaluate
    operator.evaluate = lambda x1, x2, *rest: (  # pyright: ignore
        entries.append(x1.shape[-2] * x2.shape[-2]) or evaluate(x1, x2, *rest)
    )
    rhs = matrix[:, :3] ** 2 + 1
    torch.testing.assert_close(rows_matmul(operator, rows, rhs), matrix[rows] @ rhs)
    size = operator.shape[-1]
    inputs_behind = [-(-min(start + length, size) // 3) - start // 3 for start in range(0, size, length)]
    assert sorted(entries) == sorted(3 * count for count in inputs_behind)  # in whatever order threads take them
    torch.testing.assert_close(operator.tiles().block(rows, slice(4, 4 + length)), matrix[rows][:, 4 : 4 + length])


def test_a_parameter_that_was_set_has_tiles_of_its_own() -> None:
    """GPyTorch's setters write through `.data`, which a tensor's version does not tell."""
    kernel, x, cache = kernels.PeriodicKernel().double(), inputs(13, 2).double(), TileCache()
    rhs = inputs(13, 3, seed=5).double()
    for lengthscale in (0.7, 0.2):
        kernel.lengthscale = lengthscale
        operator = GenericKernelLinearOperator.of_kernel(kernel, x, products=KernelProducts(tile_size=4), cache=cache)
        with torch.no_grad():
            torch.testing.assert_close(operator._matmul(rhs), reference(operator) @ rhs)
    assert cache.pool.num_bytes() > 0


def test_precisions_share_a_cache_but_no_tiles() -> None:
    class Single(kernels.RBFKernel):
        def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Tensor:
            return super().forward(x1, x2, **params) @ torch.eye(x2.shape[-2])  # fails in float64

    for kernel in (Single(), kernels.RBFKernel()):
        operator = GenericKernelLinearOperator.of_kernel(kernel, inputs(13, 2).float()).detach()
        double = in_float64(operator)
        rhs = inputs(13, 3, seed=5).float()
        for _ in range(2):
            for each in (operator, double):
                matrix = each.to_dense()
                assert matrix.dtype == each.dtype
                torch.testing.assert_close(each._matmul(rhs.to(matrix)), matrix @ rhs.to(matrix))
                assert {tile.dtype for tile in operator.cache.tiles.values()} == {each.dtype}


def test_a_tile_that_failed_takes_no_room() -> None:
    operator, rhs = operator_of("product"), inputs(13, 3, seed=5).double()
    with torch.no_grad():
        operator._matmul(rhs)
    whole, evaluate = operator.cache.pool.num_bytes(), operator.evaluate
    for failing in range(1, 6):
        operator.__dict__.pop("_tiles")
        with operator.cache.serving():
            pass
        calls = itertools.count()

        def fail(*arguments: Tensor, failing: int = failing, calls: Iterator[int] = calls) -> Tensor:
            if next(calls) == failing:
                raise MemoryError
            return evaluate(*arguments)

        operator.evaluate = fail  # pyright: ignore
        with torch.no_grad(), pytest.raises(MemoryError):
            operator._matmul(rhs)
        held = [*operator.cache.tiles.values(), *itertools.chain(*operator.cache._spare.values())]
        assert sum(tile.nbytes for tile in held) == operator.cache.pool.num_bytes() < whole


@pytest.mark.parametrize("name", ["product", "gradients", "batch"])
@pytest.mark.parametrize("size", [3, 7])  # three is the batch, too
def test_diagonals_of_rectangular_matrices(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic_kernel, "DIAGONAL_BLOCK", 4)
    x1, x2 = (inputs(size, 2, seed=seed).double().requires_grad_() for seed in (0, 1))
    operator = GenericKernelLinearOperator.of_kernel(KERNELS[name]().double(), x1, x2)
    expected = reference(operator).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(operator.diagonal(dim1=-2, dim2=-1), expected)


@pytest.mark.parametrize("name", ["product", "gradients", "batch", "user's own"])
@pytest.mark.parametrize("block", [1, 256])
def test_single_entries_take_no_full_matrix(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic_kernel, "DIAGONAL_BLOCK", block)
    operator = operator_of(name, rectangular=True)
    matrix = reference(operator)
    rows, columns = torch.tensor([[3, 12], [0, 5]]), torch.tensor([[5, 0], [1, 1]])
    batch = [torch.tensor([[2, 0], [1, 1]])] * len(operator.batch_shape)
    monkeypatch.setattr(operator, "to_dense", None)
    torch.testing.assert_close(operator._get_indices(rows, columns, *batch), matrix[(*batch, rows, columns)])
    if batch:
        torch.testing.assert_close(operator[1]._get_indices(rows, columns), matrix[1][rows, columns])


@pytest.mark.parametrize("name", ["product", "gradients", "user's own"])
def test_an_expanded_matrix_is_evaluated_once(name: str) -> None:
    """Its kernel never sees the batch that targets ask for: kernels of a user's need not know batches."""
    operator = operator_of(name)
    matrix, batch = reference(operator), operator.expand(2, *operator.shape).unsqueeze(0)
    seen, evaluate = [], batch.evaluate
    batch.evaluate = lambda x1, x2, *rest: seen.append(x1.dim()) or evaluate(x1, x2, *rest)
    assert batch.shape == (1, 2, *matrix.shape)
    left, right = (inputs(len(matrix), 6, seed=seed).double().view(len(matrix), 2, 3).movedim(1, 0) for seed in (5, 6))
    with torch.no_grad():
        torch.testing.assert_close(batch._matmul(right), (matrix @ right).unsqueeze(0))
        found = batch._bilinear_derivative(left.unsqueeze(0), right.unsqueeze(0))
        torch.testing.assert_close(batch._diagonal(), matrix.diagonal().expand(1, 2, -1))
        torch.testing.assert_close(batch[0, 1].to_dense(), matrix)
    for ours, theirs in zip(
        found, torch.autograd.grad((left * (matrix @ right)).sum(), originals(operator)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)
    assert set(seen) == {2}


def test_a_diagonal_taken_of_the_whole_matrix_needs_the_memory_of_a_tile() -> None:
    asked = []

    class WholeMatrix(UserKernel):
        def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params) -> Tensor:
            matrix = super().forward(x1, x2)
            asked.append(matrix.numel())
            return matrix.diagonal() if diag else matrix

    operator = GenericKernelLinearOperator.of_kernel(
        WholeMatrix().double(), inputs(13, 2).double(), products=KernelProducts(tile_size=4)
    )
    torch.testing.assert_close(operator._diagonal(), torch.ones(13).double())
    assert max(asked) <= 4 * 4


def test_inputs_without_gradient_are_not_differentiated() -> None:
    kernel, asked = kernels.PeriodicKernel().double(), []
    operator = GenericKernelLinearOperator.of_kernel(kernel, inputs(13, 2).double())
    evaluate = operator.evaluate
    operator.evaluate = lambda x1, x2, *rest: asked.append(x1.requires_grad) or evaluate(x1, x2, *rest)  # pyright: ignore
    torch.no_grad()(operator._bilinear_derivative)(torch.ones(13, 1).double(), torch.ones(13, 1).double())
    assert asked == [False]


def test_an_operator_stays_in_the_mode_that_it_was_made_in() -> None:
    """Tiles are evaluated late, the derivative's in `backward`: the model may be in evaluation mode by then."""

    class TwiceAsLargeInTraining(kernels.PeriodicKernel):
        def forward(self, x1: torch.Tensor, x2: torch.Tensor, diag: bool = False, **options: object) -> torch.Tensor:
            return (2.0 if self.training else 1.0) * super().forward(x1, x2, diag=diag, **options)

    kernel, x = TwiceAsLargeInTraining().double(), torch.linspace(0, 1, 7, dtype=torch.float64).unsqueeze(-1)
    wanted = kernel(x).to_dense().detach()
    operator = GenericKernelLinearOperator.of_kernel(kernel, x)
    kernel.eval()
    torch.testing.assert_close(operator @ torch.eye(7, dtype=torch.float64), wanted)

"""Rows, columns and principal blocks equal those of the dense matrix, whatever the operator and the alignment."""

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, RBFKernelGrad
from linear_operator import LinearOperator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
)
from gpy_iterative.linear_operators.extensions import (
    columns_matmul,
    dense_rows,
    kernel_inputs,
    principal_block,
    principal_blocks,
    rows_matmul,
)
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32, RBF
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles import tiles as tiles_module
from gpy_iterative.linear_operators.tiles.cache import Tile
from gpy_iterative.linear_operators.tiles.tiles import Tiles
from gpy_iterative.worker_threads import ByDevice
from tests.linear_operators.radial.test_operator import inputs
from tests.linear_operators.test_generic_kernel import UserKernel

N = 21


def radial(cache_memory: int | None = None) -> RadialKernelLinearOperator:
    return RadialKernelLinearOperator(
        inputs(N, 3).double(),
        torch.tensor(1.7).double(),
        function=MATERN32,
        products=KernelProducts(tile_size=8, cache_memory=cache_memory),
    )


def several_outputs() -> GenericKernelLinearOperator:
    """A function and its derivatives: three neighbouring rows an input, and tiles that are not symmetric themselves."""
    products = KernelProducts(tile_size=6, cache_memory=0)
    return GenericKernelLinearOperator.of_kernel(
        RBFKernelGrad().double(), inputs(N // 3, 2).double(), None, products=products
    )


def dense_operator() -> LinearOperator:
    x = inputs(N, 3, seed=3).double()
    return DenseLinearOperator(torch.exp(-torch.cdist(x, x)))


def interleaved() -> LinearOperator:
    """Three latent functions of seven points, each with an outputscale of its own."""
    x, outputscales = inputs(N // 3, 3).double(), torch.tensor([1.7, 0.4, 2.0]).double()
    products = KernelProducts(tile_size=4)
    return BlockInterleavedLinearOperator(
        RadialKernelLinearOperator(x, outputscales, function=MATERN32, products=products)
    )


def kronecker(points: LinearOperator | None = None) -> LinearOperator:
    """Three tasks at seven points."""
    x, tasks = inputs(7, 3).double(), inputs(3, 2).double()
    points = RadialKernelLinearOperator(x, torch.tensor(1.7).double(), function=RBF) if points is None else points
    return KroneckerLinearOperator(points, DenseLinearOperator(torch.exp(-torch.cdist(tasks, tasks))))


def observed() -> LinearOperator:
    """Of 24 values of three tasks."""
    numbers = torch.tensor([number for number in range(24) if number not in (0, 11, 22)])
    x, tasks = inputs(8, 3).double(), inputs(3, 2).double()
    points = RadialKernelLinearOperator(x, torch.tensor(1.7).double(), function=RBF)
    whole = KroneckerLinearOperator(points, DenseLinearOperator(torch.exp(-torch.cdist(tasks, tasks))))
    return ObservedLinearOperator(whole, numbers, numbers)


def hadamard() -> LinearOperator:
    tasks = inputs(3, 2).double()
    numbers = torch.arange(N) * 5 % 3
    return HadamardLinearOperator.of(radial(), torch.exp(-torch.cdist(tasks, tasks)), numbers, numbers)


OPERATORS: dict[str, Callable[[], LinearOperator]] = {
    "radial": radial,
    "radial, cache off": lambda: radial(0),
    "radial, cache of one tile": lambda: radial(8 * 8 * 8),
    "several outputs": several_outputs,
    "dense": dense_operator,
    "sum": lambda: SumLinearOperator(radial(), dense_operator()),
    "constant": lambda: ConstantMulLinearOperator(dense_operator(), torch.tensor(0.3).double()),
    "interleaved": interleaved,
    "kronecker": kronecker,
    "kronecker, noise of tasks": lambda: kronecker(DiagLinearOperator(torch.linspace(0.1, 0.5, 7).double())),
    "kronecker of three": lambda: KroneckerLinearOperator(
        DenseLinearOperator(torch.eye(1).double()), *kronecker().linear_ops
    ),
    "observed": observed,
    "hadamard": hadamard,
    "diagonal": lambda: DiagLinearOperator(torch.linspace(0.1, 0.5, N).double()),
    "noisy": lambda: NoisyLinearOperator(radial(), torch.linspace(0.1, 0.5, N).double()),
    "noisy sum": lambda: NoisyLinearOperator(
        SumLinearOperator(
            radial(),
            RadialKernelLinearOperator(inputs(N, 2).double(), torch.tensor(0.4).double(), function=RBF),
        ),
        torch.linspace(0.1, 0.5, N).double(),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("block", [slice(0, 8), slice(8, 16), slice(16, 21), slice(3, 6), slice(5, 19), slice(0, N)])
def test_parts_equal_the_dense_ones(name: str, block: slice) -> None:
    operator = OPERATORS[name]()
    with torch.no_grad():
        matrix = operator.to_dense()
        rhs = inputs(N, 4, seed=9).double()
        torch.testing.assert_close(columns_matmul(operator, block, rhs[block]), matrix[:, block] @ rhs[block])
        torch.testing.assert_close(rows_matmul(operator, block, rhs), matrix[block] @ rhs)
        torch.testing.assert_close(principal_block(operator, block), matrix[block, block])
        rows = torch.tensor([7, 0, 20, 13])
        torch.testing.assert_close(rows_matmul(operator, rows, rhs), matrix[rows] @ rhs)
        torch.testing.assert_close(dense_rows(operator, rows), matrix[rows])


@pytest.mark.parametrize("name", OPERATORS)
def test_principal_blocks_of_sets_of_rows(name: str) -> None:
    operator = OPERATORS[name]()
    rows = torch.tensor([[7, 0, 20, 13], [1, 2, 3, 4], [20, 19, 0, 7]])
    with torch.no_grad():
        matrix = operator.to_dense()
        found = principal_blocks(operator, rows)
    torch.testing.assert_close(found, matrix[rows.unsqueeze(-1), rows.unsqueeze(-2)])


def test_blocks_of_neighbours_far_from_the_origin_keep_their_digits() -> None:
    x = (inputs(N, 2) + torch.tensor([3000.0, 0.0])).double()
    single = RadialKernelLinearOperator(x.float(), torch.tensor(1.7), function=RBF)
    rows = torch.arange(N).view(3, 7)
    exact = RadialKernelLinearOperator(x.float().double(), torch.tensor(1.7).double(), function=RBF)
    torch.testing.assert_close(
        principal_blocks(single, rows).double(), principal_blocks(exact, rows), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_with_many_inputs_keep_their_digits(dtype: torch.dtype) -> None:
    x = (inputs(N, 40).double() + 300).to(dtype)
    x[5] = x[2]
    rows = torch.arange(N).view(3, 7)
    u = (x[rows].double().unsqueeze(-2) - x[rows].double().unsqueeze(-3)).square().sum(-1)
    operator = RadialKernelLinearOperator(x, torch.tensor(1.7).to(dtype), function=RBF)
    torch.testing.assert_close(principal_blocks(operator, rows), (1.7 * torch.exp(-u / 2)).to(dtype))


@pytest.mark.parametrize("kernel", [RBFKernel() * PeriodicKernel(), UserKernel()], ids=["takes a batch", "takes none"])
def test_blocks_of_a_kernel_that_may_take_no_batch(kernel: Kernel) -> None:
    operator = GenericKernelLinearOperator.of_kernel(kernel.double(), inputs(N, 2).double())
    rows = torch.arange(N).view(7, 3)  # as many points in a set as sets that are tried together, and more
    for sets in (rows, rows[:2], torch.arange(20).view(10, 2)):
        with torch.no_grad():
            expected = operator.to_dense()[sets.unsqueeze(-1), sets.unsqueeze(-2)]
        torch.testing.assert_close(principal_blocks(operator, sets), expected)


def test_blocks_of_a_root_pick_no_row_of_it_for_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances of an RFFKernel with 100 features took fifty times as long as those of an RBFKernel."""
    root = inputs(N, 100).double()
    rows = torch.arange(N).view(3, 7)
    monkeypatch.setattr(DenseLinearOperator, "_get_indices", None)
    expected = (root @ root.mT)[rows.unsqueeze(-1), rows.unsqueeze(-2)]
    torch.testing.assert_close(principal_blocks(RootLinearOperator(root), rows), expected)


class OwnInputs(Kernel):
    """Its part has other inputs, as in BoTorch's LinearTruncatedFidelityKernel (iterations failed)."""

    def __init__(self) -> None:
        super().__init__()
        self.part = RBFKernel(ard_num_dims=3)

    def forward(self, x1: Tensor, x2: Tensor, **params) -> Tensor:
        return self.part(*(torch.cat([x, x[..., :1]], dim=-1) for x in (x1, x2)), **params)


def test_inputs_that_tell_which_points_are_near() -> None:
    x, operator = inputs(N, 2).double(), radial()
    assert kernel_inputs(dense_operator()) is None
    noise = torch.ones(N).double()
    torch.testing.assert_close(kernel_inputs(NoisyLinearOperator(operator, noise)), operator.x1)
    both = SumLinearOperator(
        operator, dense_operator(), ConstantMulLinearOperator(operator, torch.tensor(0.3).double())
    )
    torch.testing.assert_close(kernel_inputs(both), torch.cat([operator.x1, operator.x1], dim=-1))
    kernel = (RBFKernel() * MaternKernel(ard_num_dims=2)).double()
    kernel.kernels[0].lengthscale = 0.5
    kernel.kernels[1].lengthscale = torch.tensor([[0.1, 3.0]])
    generic = GenericKernelLinearOperator.of_kernel(kernel, x)
    torch.testing.assert_close(kernel_inputs(generic), x / torch.tensor([0.1, 0.5]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(kernel_inputs(GenericKernelLinearOperator.of_kernel(OwnInputs().double(), x)), x)
    points = kronecker()
    torch.testing.assert_close(kernel_inputs(points), points.points.x1.repeat_interleave(3, dim=0))
    some = observed()
    torch.testing.assert_close(kernel_inputs(some), kernel_inputs(some.base)[some.row_mask])
    assert kernel_inputs(kronecker(DiagLinearOperator(torch.linspace(0.1, 0.5, 7).double()))) is None
    several = several_outputs()
    assert kernel_inputs(several).shape == (several.shape[-1], 2)
    batch = torch.stack([x, 2 * x])
    member = GenericKernelLinearOperator.of_kernel(kernel, batch)[1]
    torch.testing.assert_close(kernel_inputs(member), 2 * kernel_inputs(generic))
    both = SumLinearOperator(RadialKernelLinearOperator(batch, torch.ones(2).double(), function=MATERN32)[1], member)
    assert kernel_inputs(both).shape == (N, 4)


def test_several_outputscales_share_the_rows_of_one_matrix() -> None:
    operator, rows = radial(), torch.tensor([7, 0, 20])
    several = RadialKernelLinearOperator(operator.x1, torch.tensor([1.7, 0.4, 2.0]).double(), function=MATERN32)
    with torch.no_grad():
        torch.testing.assert_close(dense_rows(several, rows), several.to_dense()[:, rows])


def test_rows_of_batches_of_sums_and_multiples() -> None:
    x, rows = inputs(N, 3).double(), torch.tensor([7, 0, 20])
    batch = RadialKernelLinearOperator(torch.stack([x, 2 * x]), torch.ones(2).double(), function=MATERN32)
    total = SumLinearOperator(batch, ConstantMulLinearOperator(dense_operator(), torch.tensor([0.3, 2.0]).double()))
    with torch.no_grad():
        torch.testing.assert_close(dense_rows(total, rows), total.to_dense()[:, rows])


@pytest.mark.parametrize("entries", [1, 4, 12, 10**6])
def test_picked_rows_are_evaluated_in_parts(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, rhs, rows = radial(), inputs(N, 4, seed=9).double(), torch.tensor([7, 0, 20, 13])
    expected = operator.to_dense().detach()[rows] @ rhs
    widths, block = [], type(operator.tiles()).block

    def counting(tiles: Tiles, picked: torch.Tensor, columns: slice) -> torch.Tensor:
        widths.append(columns.stop - columns.start)
        return block(tiles, picked, columns)

    monkeypatch.setattr(tiles_module, "PICKED_ENTRIES", ByDevice(cpu=entries, accelerator=1))
    monkeypatch.setattr(type(operator.tiles()), "block", counting)
    with torch.no_grad():
        torch.testing.assert_close(rows_matmul(operator, rows, rhs), expected)
    assert max(widths) <= max(entries // 4, 1)


@pytest.mark.parametrize(
    ("block", "tiles"),
    [
        pytest.param(slice(40, 48), {5}, id="a tile"),
        pytest.param(slice(19, 22), {2}, id="a part of a tile"),
        pytest.param(slice(16, 32), {2, 3}, id="a pair of tiles"),
        pytest.param(slice(8, 24), {1, 2}, id="tiles of two pairs"),
    ],
)
@pytest.mark.parametrize("part", ["rows", "columns"])
@pytest.mark.parametrize("cache_memory", [0, 10**6])
def test_tiles_above_the_diagonal_serve_both_sides_of_it(
    block: slice, tiles: set[int], part: str, cache_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = RadialKernelLinearOperator(
        inputs(48, 3).double(),
        torch.tensor(1.7).double(),
        function=MATERN32,
        products=KernelProducts(tile_size=8, cache_memory=cache_memory),
    )
    rhs, visited, evaluate = inputs(48, 4, seed=9).double(), [], RadialTiles.evaluate

    def counting(self: RadialTiles, tile: Tile, out: torch.Tensor) -> torch.Tensor:
        visited.append(tile.key)
        return evaluate(self, tile, out)

    with torch.no_grad():
        operator._matmul(inputs(48, 1).double())
        monkeypatch.setattr(RadialTiles, "evaluate", counting)
        if part == "rows":
            found, expected = rows_matmul(operator, block, rhs), operator.to_dense()[block] @ rhs
        else:
            found, expected = columns_matmul(operator, block, rhs[block]), operator.to_dense()[:, block] @ rhs[block]
    torch.testing.assert_close(found, expected)
    touched = [(i, j) for i in range(6) for j in range(i, 6) if {i, j} & tiles]
    assert sorted(visited) == ([] if cache_memory else touched)


def test_principal_block_is_the_callers_to_overwrite() -> None:
    operator = radial()
    with torch.no_grad():
        expected = operator.to_dense()
        principal_block(operator, slice(0, 8)).zero_()
        torch.testing.assert_close(operator._matmul(torch.eye(N).double()), expected)


@pytest.mark.parametrize("name", ["radial", "several outputs", "sum", "constant", "noisy"])
@pytest.mark.parametrize("size", [N - 1, N + 1, N + 3])
def test_right_hand_sides_have_a_row_for_every_column(name: str, size: int) -> None:
    operator, rhs = OPERATORS[name](), torch.zeros(size, 2).double()
    with torch.no_grad():
        for rows in (slice(0, 8), slice(3, 6), torch.tensor([7, 0])):
            with pytest.raises((ValueError, RuntimeError), match=str(size)):
                rows_matmul(operator, rows, rhs)
        with pytest.raises((ValueError, RuntimeError), match=str(size)):
            columns_matmul(operator, slice(2, None), rhs)


def test_rows_of_a_matrix_without_columns() -> None:
    x = inputs(N, 3).double()
    operator = RadialKernelLinearOperator(x, torch.tensor(1.7).double(), x2=x[:0], function=MATERN32)
    with torch.no_grad():
        assert dense_rows(operator, torch.tensor([7, 0])).shape == (2, 0)

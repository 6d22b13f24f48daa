"""Kernel matrices that two and three processes share, against the same matrices in one."""

import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor

from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    RadialKernelLinearOperator,
    operator_of_kernel,
)
from gpy_iterative.linear_operators.extensions import (
    columns_matmul,
    dense_rows,
    matrix_derivative,
    principal_block,
    rows_matmul,
)
from gpy_iterative.linear_operators.radial.functions import MATERN32, RATIONAL_QUADRATIC
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TiledLinearOperator
from gpy_iterative.linear_operators.tiles.ranks import Ranks
from tests.processes import Processes, Raised

N, M = 45, 21
Make = Callable[[KernelProducts, torch.dtype], TiledLinearOperator]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return random(*shape, seed=seed, dtype=dtype).requires_grad_()


def radial(products: KernelProducts, dtype: torch.dtype) -> TiledLinearOperator:
    return RadialKernelLinearOperator(
        leaf(N, 2, dtype=dtype),
        torch.tensor(1.3, dtype=dtype, requires_grad=True),
        function=MATERN32,
        products=products,
    )


def radial_batch_of_rectangles(products: KernelProducts, dtype: torch.dtype) -> TiledLinearOperator:
    return RadialKernelLinearOperator(
        leaf(2, N, 2, dtype=dtype),
        torch.tensor([1.3, 0.7], dtype=dtype, requires_grad=True),
        x2=leaf(M, 2, seed=1, dtype=dtype),
        alpha=torch.tensor([1.5], dtype=dtype, requires_grad=True),
        function=RATIONAL_QUADRATIC,
        products=products,
    )


def generic(products: KernelProducts, dtype: torch.dtype) -> TiledLinearOperator:
    kernel = gpytorch.kernels.PeriodicKernel().to(dtype)
    return GenericKernelLinearOperator.of_kernel(kernel, leaf(N, 2, dtype=dtype), products=products)


def with_derivatives(products: KernelProducts, dtype: torch.dtype) -> TiledLinearOperator:
    kernel = gpytorch.kernels.RBFKernelGrad().to(dtype)
    return GenericKernelLinearOperator.of_kernel(kernel, leaf(7, 2, dtype=dtype), products=products)


def one_row(products: KernelProducts, dtype: torch.dtype) -> TiledLinearOperator:
    return RadialKernelLinearOperator(
        leaf(1, 2, dtype=dtype), torch.tensor(1.3, dtype=dtype), function=MATERN32, products=products
    )


def product_on_a_grid(products: KernelProducts, dtype: torch.dtype) -> TiledLinearOperator:
    kernels = gpytorch.kernels
    kernel = kernels.MaternKernel(active_dims=(0,)) * kernels.RQKernel(active_dims=(1,))
    cells = torch.cartesian_prod(torch.arange(7.0), torch.arange(9.0)).to(dtype)
    x = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(0))[:N]]
    operator = operator_of_kernel(kernel.to(dtype), x, None, products)
    assert isinstance(operator, RadialProductLinearOperator)
    assert operator.has_fast_products()
    return operator


MAKERS = [radial, radial_batch_of_rectangles, generic, with_derivatives, one_row, product_on_a_grid]


def everything(group: Any, make: Make, dtype: torch.dtype, cache_memory: int | None) -> dict[str, Tensor]:
    """All that tiles are asked for, by name; in one process where the group is None."""
    products = KernelProducts(tile_size=4, cache_memory=cache_memory, process_group=group)
    operator = make(products, dtype)
    rows, columns = operator.matrix_shape
    left, right = random(rows, 3, seed=2, dtype=dtype), random(columns, 3, seed=3, dtype=dtype)
    weights = random(rows, columns, seed=4, dtype=dtype)
    with torch.no_grad():
        found = {"product": operator._matmul(right), "again": operator._matmul(right)}
        assert operator._matmul(right[:, :0]).shape == (*operator.batch_shape, rows, 0)
        if not operator.batch_shape:
            some = slice(rows // 3, rows - rows // 4)
            picked = torch.tensor([rows - 1, 0, rows // 2])
            found["rows"] = rows_matmul(operator, some, right)
            found["picked rows"] = rows_matmul(operator, picked, right)
            found["columns"] = columns_matmul(operator, some, right[some])
            found["block"] = principal_block(operator, some)
            found["dense rows"] = dense_rows(operator, picked)
    for name, derivatives in (
        ("bilinear", torch.no_grad()(operator._bilinear_derivative)(left, right)),
        ("matrix", matrix_derivative(operator, weights)),
    ):
        found |= {f"{name} {i}": value for i, value in enumerate(derivatives) if value is not None}
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), [(make, 3) for make in MAKERS] + [(MAKERS[0], 2)])
def test_all_products_are_those_of_one_process(processes: Processes, make: Make, size: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        for cache_memory in (0, 4 * 16 * 8, None):  # nothing kept, a few tiles, all
            found = processes.run(everything, make, dtype, cache_memory, size=size)
            expected = everything(None, make, dtype, cache_memory)
            assert found[0].keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    found[0][name], value, rtol=tolerance, atol=tolerance * float(value.abs().max())
                )
                for other in found[1:]:
                    assert torch.equal(other[name], found[0][name]), f"{name} differs between ranks"


def evaluated_tiles(group: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The tiles that a product, and a derivative after it, evaluate on this rank: 30 rows of them."""
    seen: list[tuple[int, int]] = []
    with torch.no_grad():
        operator = RadialKernelLinearOperator(
            random(117, 2),
            torch.tensor(1.0),
            function=MATERN32,
            products=KernelProducts(tile_size=4, process_group=group),
        )
    tiles: Any = operator.tiles()
    distances = tiles.distances.block

    def spied(rows: slice, columns: slice, *memory: Tensor) -> Tensor:
        seen.append((rows.start // 4, columns.start // 4))
        return distances(rows, columns, *memory)

    tiles.distances.block = spied
    vectors = random(117, 2)
    tiles.product(slice(None), slice(None), vectors)
    of_product, seen = seen, []
    tiles.product(slice(None), slice(None), vectors)
    assert not seen  # kept
    weights = BilinearWeights(vectors, vectors, operator.batch_shape, tiles)
    tiles.derivative(weights, value=True, alpha=False)
    return of_product, seen


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_each_tile_is_evaluated_on_one_rank_and_all_have_their_share(processes: Processes, size: int) -> None:
    every = {(i, j) for i in range(30) for j in range(i, 30)}
    found = processes.run(evaluated_tiles, size=size)
    for tiles in ([product for product, _ in found], [derivative for _, derivative in found]):
        assert Counter(tile for rank in tiles for tile in rank) == Counter(every)
        assert max(map(len, tiles)) <= 1.05 * len(every) / size
        # Also of what a solver asks for block by block: the tiles in one row and its column.
        for block in range(30):
            shares = [sum(block in tile for tile in rank) for rank in tiles]
            assert max(shares) <= 30 / size + 3


def nearly_same(group: Any, which: str) -> Any:
    """A product where the last rank has something else."""
    world = Ranks(group)
    is_other = float(world.rank == world.size - 1)
    x, rhs = random(N, 2), random(N, 2)
    rows, tile_size = N, 8
    if which == "one input":
        x[7, 1] += 1e-14 * is_other
    elif which == "order of the rows":
        x = x.flip(0) if is_other else x
    elif which == "number of rows":
        rows -= int(is_other)
    elif which == "tile size":
        tile_size += int(is_other)
    elif which == "sign of a vector":
        rhs[3, 1] *= 1 - 2 * is_other
    elif which == "order of signs":
        rhs = rhs.sign().roll(int(is_other), 0)
    products = KernelProducts(tile_size=tile_size, process_group=group)
    operator = RadialKernelLinearOperator(x[:rows], torch.tensor(1.0), function=MATERN32, products=products)
    return operator._matmul(rhs[:rows])


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("one input", "other inputs or hyperparameters"),
        ("order of the rows", "other inputs or hyperparameters"),
        ("number of rows", r"something else to compute \(here: a kernel matrix of shape \(4[54], 4[54]\)"),
        ("tile size", r"something else to compute \(here: .* rows in tiles of [89]\)"),
        ("sign of a vector", "other vectors"),
        ("order of signs", "other vectors"),
    ],
)
def test_ranks_with_other_numbers_are_all_told(processes: Processes, which: str, message: str) -> None:
    found = processes.run_and_catch(nearly_same, which)
    for rank, answer in enumerate(found):
        assert isinstance(answer, Raised)
        assert answer.kind == "RanksDisagreeError"
        assert re.search(message, answer.message)
        assert f"than rank {rank}." in answer.message
        assert ("Rank(s) 2 of" if rank < 2 else "Rank(s) 0, 1 of") in answer.message
        assert "generator=0" in answer.message
    processes.run(nearly_same, "nothing")  # and they are in step afterwards


def far_fields_by_rank(group: Any, tolerances: list[float | None]) -> Tensor:
    """A product with a far field of this rank's tolerance."""
    tolerance = tolerances[Ranks(group).rank]
    products = KernelProducts(far_field=tolerance, process_group=group)
    x, rhs = random(1500, 2), random(1500, 2)
    return RadialKernelLinearOperator(x, torch.tensor(0.3), function=MATERN32, products=products)._matmul(rhs)


@pytest.mark.parametrize("tolerances", [(1e-4, None), (1e-2, 1e-5)])
def test_ranks_with_another_far_field_are_told(processes: Processes, tolerances: tuple[float, float | None]) -> None:
    for answer in processes.run_and_catch(far_fields_by_rank, tolerances, size=2):
        assert isinstance(answer, Raised)
        assert answer.kind == "RanksDisagreeError"
    first, second = processes.run(far_fields_by_rank, (1e-4, 1e-4), size=2)  # and they are in step afterwards
    assert torch.equal(first, second)


def refused_groups(group: Any) -> dict[str, str]:
    """What KernelProducts says to groups that it cannot use."""
    outside = torch.distributed.new_group([0])
    found = {}
    for name, options in {
        "keops": {"process_group": group, "backend": "keops"},
        "kind": {"process_group": "all"},
        "member": {"process_group": outside},
    }.items():
        try:
            KernelProducts(**options)
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_process_groups_that_cannot_be_used_are_refused(processes: Processes) -> None:
    first, *others = processes.run(refused_groups)
    for found in (first, *others):
        assert found["keops"].startswith("ValueError: backend='keops' does not work with a process_group")
        assert found["kind"].startswith("TypeError: process_group must be None, 'world' or a torch")
    assert "member" not in first
    for rank, found in enumerate(others, start=1):
        assert found["member"].startswith(f"ValueError: This process, rank {rank}, is not in process_group")
    with pytest.raises(ValueError, match=r"start the script with torchrun, and call torch\.distributed"):
        KernelProducts(process_group="world")


def test_ranks_of_one_machine_share_the_automatic_cache(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", _three_hundred_gigabytes)
    alone = KernelProducts().cache_budget(torch.device("cpu"))
    for size in (2, 3):
        assert processes.run(_automatic_budget, size=size) == [alone // size] * size


def _three_hundred_gigabytes() -> SimpleNamespace:
    return SimpleNamespace(available=300 * 1024**3)


def _automatic_budget(group: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psutil.virtual_memory", _three_hundred_gigabytes)
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        return KernelProducts(process_group=group).cache_budget(torch.device("cpu"))


def copied(group: Any) -> bool:
    products = KernelProducts(process_group=group)
    return deepcopy({"products": products})["products"] == products


def test_options_with_a_process_group_are_copied_with_a_model(processes: Processes) -> None:
    for size in (2, 3):
        assert all(processes.run(copied, size=size))


def held_groups(group: Any) -> list[str]:
    """Attributes of a model's ranks, after a product, that hold the default process group."""
    operator = radial(KernelProducts(process_group="world"), torch.float64)
    operator._matmul(random(N, 2))
    world = torch.distributed.group.WORLD
    return [name for name, value in vars(operator.tiles().ranks).items() if value is world]


def test_the_default_group_is_not_held(processes: Processes) -> None:
    """Gloo ends the process with SIGABRT, one time in five, where something outlives `destroy_process_group()`."""
    assert not any(processes.run(held_groups))

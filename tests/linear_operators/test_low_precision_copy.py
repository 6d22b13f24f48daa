"""Copies in float32: their products against rounded matrices, their memory, and where they are refused."""

import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator import LinearOperator
from linear_operator.operators import (
    BlockInterleavedLinearOperator,
    DenseLinearOperator,
    IdentityLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor

from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
    kernel_operator,
)
from gpy_iterative.linear_operators.extensions import (
    all_parts,
    columns_matmul,
    low_precision_copy,
    principal_block,
    rows_matmul,
    with_products,
)
from gpy_iterative.linear_operators.latent import latent_operator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator

N = 45


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def radial(precision: str, **options: object) -> RadialKernelLinearOperator:
    products = KernelProducts(**{"tile_size": 8, "precision": precision} | options)
    return RadialKernelLinearOperator(
        random(N, 2).requires_grad_(), torch.tensor(1.3).double(), function=MATERN32, products=products
    )


def periodic(precision: str) -> GenericKernelLinearOperator:
    products = KernelProducts(tile_size=8, precision=precision)
    return GenericKernelLinearOperator.of_kernel(
        gpytorch.kernels.PeriodicKernel().double(), random(N, 2), products=products
    )


def native_precision(operator: LinearOperator) -> LinearOperator:
    return with_products(operator, lambda products: replace(products, precision="native"))


def twin(operator: LinearOperator) -> LinearOperator:
    copy = low_precision_copy(operator)
    assert copy is not None
    return copy


def test_products_are_those_of_the_rounded_matrix() -> None:
    lowered, rhs = twin(radial("float32")), random(N, 3, seed=1).float()
    assert lowered.dtype == torch.float32
    # What is rounded is the function's value; the outputscale multiplies the product.
    rounded = (radial("float32").detach().to_dense().float() / 1.3).double() * 1.3
    for _ in range(2):  # the second time from kept tiles
        product = lowered._matmul(rhs)
        assert product.dtype == torch.float32
        torch.testing.assert_close(product.double(), rounded @ rhs.double(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("cache_memory", [0, 8 * 8 * 8 * 4, None])
def test_parts_of_a_product_agree_with_the_product(cache_memory: int | None) -> None:
    lowered, rhs = twin(radial("float32", cache_memory=cache_memory)), random(N, 3, seed=1).float()
    whole, eye = lowered._matmul(rhs), torch.eye(N)
    matrix = lowered._matmul(eye)
    assert torch.equal(matrix[:8, 8:], matrix[8:, :8].mT)  # one rounding for (i, j) and (j, i)
    some = slice(5, 30)
    torch.testing.assert_close(rows_matmul(lowered, some, rhs), whole[some], atol=1e-5, rtol=0)
    torch.testing.assert_close(columns_matmul(lowered, some, rhs[some]), matrix[:, some] @ rhs[some], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        principal_block(lowered, some), radial("native").detach().to_dense().float()[some, some], atol=1e-5, rtol=0
    )


class Rotated(gpytorch.kernels.Kernel):
    """With a tensor that is no parameter, as a buffer or as it is."""

    has_lengthscale = True

    def __init__(self, is_buffer: bool = True) -> None:
        super().__init__()
        rotation = torch.tensor([[0.6, -0.8], [0.8, 0.6]]).double()
        if is_buffer:
            self.register_buffer("rotation", rotation)
        else:
            self.rotation = rotation

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params) -> Tensor:
        weights = torch.tensor([1.0, 0.1], dtype=x1.dtype) / self.lengthscale
        distances = self.covar_dist(x1 @ self.rotation * weights, x2 @ self.rotation * weights, diag=diag)
        return torch.exp(-distances)


def test_a_kernel_that_float32_cannot_compute_is_refused() -> None:
    operator = kernel_operator(
        Rotated(is_buffer=False).double()(random(12, 2)), KernelProducts(tile_size=4, precision="float32")
    )
    with pytest.raises(ValueError, match=r"Rotated cannot be computed in float32[\s\S]*'native'[\s\S]*register_buffer"):
        low_precision_copy(operator)
    assert low_precision_copy(native_precision(operator)) is None


def test_a_kernel_that_takes_its_dtype_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles are float64, and are converted where they are kept or picked."""
    operator = periodic("float32").detach()
    forward = gpytorch.kernels.PeriodicKernel.forward
    monkeypatch.setattr(
        gpytorch.kernels.PeriodicKernel,
        "forward",
        lambda self, *args, **options: forward(self, *args, **options).double(),
    )
    lowered, rhs = twin(operator), random(N, 2, seed=1)
    exact = operator._matmul(rhs)
    torch.testing.assert_close(lowered._matmul(rhs.float()).double(), exact, atol=1e-4, rtol=0)
    rows = torch.tensor([3, 40, 1])
    torch.testing.assert_close(rows_matmul(lowered, rows, rhs.float()).double(), exact[rows], atol=1e-4, rtol=0)
    assert lowered._diagonal().dtype == torch.float32


def compositions() -> dict[str, Callable[[KernelProducts], LinearOperator]]:
    x = random(12, 2)
    kernels = gpytorch.kernels
    of = lambda kernel: lambda products: kernel_operator(kernel.double()(x), products)
    index = kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2)
    return {
        "generic": of(kernels.PeriodicKernel()),
        "sum": of(kernels.ScaleKernel(kernels.RBFKernel()) + kernels.PeriodicKernel()),
        "with a structured term": of(kernels.RBFKernel() + kernels.LinearKernel()),
        "multitask": of(index),
        "batch": of(kernels.ScaleKernel(kernels.RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2]))),
        "noisy": lambda products: NoisyLinearOperator(of(kernels.RQKernel())(products), torch.ones(12).double()),
        "repeated": lambda products: latent_operator(of(kernels.RBFKernel())(products), 2, shared=True),
        "with an identity": lambda products: (
            of(kernels.RBFKernel())(products) + IdentityLinearOperator(12, dtype=torch.float64)
        ),
        "with zeros": lambda products: SumLinearOperator(
            of(kernels.RBFKernel())(products), ZeroLinearOperator(12, 12, dtype=torch.float64)
        ),
        "with a prior": of(kernels.PeriodicKernel(period_length_prior=gpytorch.priors.LogNormalPrior(0.0, 1.0))),
        "buffers": of(Rotated()),
        "interleaved": lambda products: BlockInterleavedLinearOperator(
            of(kernels.RBFKernel(batch_shape=torch.Size([2])))(products)
        ),
    }


@pytest.mark.parametrize("name", compositions())
def test_whatever_a_kernel_is_part_of(name: str) -> None:
    operator = compositions()[name](KernelProducts(tile_size=4, precision="float32"))
    lowered = twin(operator)
    assert (lowered.shape, lowered.dtype) == (operator.shape, torch.float32)
    rhs = random(*operator.batch_shape, operator.shape[-1], 2, seed=1)
    with torch.no_grad():
        exact, found = operator._matmul(rhs), lowered._matmul(rhs.float())
    assert not found.requires_grad
    assert (found - exact).norm() < 1e-6 * exact.norm()
    index = (0,) * len(operator.batch_shape)
    assert low_precision_copy(operator[index] if index else operator) is not None


@pytest.mark.parametrize("name", ["with an identity", "with zeros"])
def test_parts_that_have_no_tensors_are_float32_too(name: str) -> None:
    operator = compositions()[name](KernelProducts(tile_size=4, precision="float32"))
    lowered, part = twin(operator), slice(2, 9)
    block = principal_block(lowered, part)
    assert block.dtype == torch.float32
    torch.testing.assert_close(block.double(), operator.to_dense().detach()[part, part], atol=1e-6, rtol=0)
    rows, rhs = torch.tensor([3, 0]), random(12, 2, seed=1).float()
    product = rows_matmul(lowered, rows, rhs)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, lowered._matmul(rhs)[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", compositions())
def test_native_products_of_whatever_a_kernel_is_part_of(name: str) -> None:
    operator = compositions()[name](KernelProducts(tile_size=4, precision="float32"))
    native = native_precision(operator)
    assert low_precision_copy(native) is None
    again = native_precision(native)
    kernels_of = lambda operator: [part for part in all_parts(operator) if hasattr(part, "products")]
    assert all(one is other for one, other in zip(kernels_of(again), kernels_of(native), strict=True))
    rhs = random(*operator.batch_shape, operator.shape[-1], 2, seed=1)
    with torch.no_grad():
        assert torch.equal(native._matmul(rhs), operator._matmul(rhs))


def test_native_products_share_the_kept_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = radial("float32").detach()
    operator._matmul(torch.ones(N, 1).double())
    monkeypatch.setattr(RadialTiles, "evaluate", lambda *arguments: pytest.fail("evaluated again"))
    native = native_precision(operator)
    assert isinstance(native, RadialKernelLinearOperator)
    assert native.x1 is operator.x1
    native._matmul(torch.ones(N, 1).double())


def test_only_kernels_that_ask_for_it_have_twins() -> None:
    assert low_precision_copy(radial("native")) is None
    assert low_precision_copy(DenseLinearOperator(torch.eye(3)) + DenseLinearOperator(torch.eye(3))) is None
    assert low_precision_copy(twin(radial("float32"))) is None


def test_one_twin_serves_until_its_tensors_change() -> None:
    operator = radial("float32").detach()
    first = twin(operator)
    assert twin(operator).x1 is first.x1
    operator.x1.mul_(1.1)
    assert twin(operator).x1 is not first.x1
    torch.testing.assert_close(twin(operator).x1.double(), operator.x1, atol=1e-6, rtol=0)
    assert twin(pickle.loads(pickle.dumps(operator))).cache.pool.num_bytes() == 0


def kept(precision: str, cache_memory: int) -> int:
    operator = radial(precision, cache_memory=cache_memory)
    lowered = operator if precision == "native" else twin(operator)
    assert isinstance(lowered, TiledLinearOperator)
    with torch.no_grad():
        lowered._matmul(torch.ones(N, 1, dtype=lowered.dtype))
    tiles = lowered.tiles()
    assert 0 < operator.cache.pool.num_bytes() <= cache_memory  # the twin's memory is counted where the budget is
    return sum(tile.shape.numel() for tile in tiles.visits() if tile.key in lowered.cache.tiles)


def test_the_cache_holds_twice_as_much() -> None:
    memory = 3 * 8 * 8 * 8
    assert kept("float32", memory) >= 2 * kept("native", memory) - 8 * 8


ENTRIES = 15 * 8 * 8 + 5 * 8 * 5 + 5 * 5  # upper triangle of N = 45 in tiles of 8


def held(operator: RadialKernelLinearOperator) -> tuple[int, int]:
    """Bytes of native tiles, and of the twin's."""
    return operator.cache.own_bytes, operator.cache.low_precision.own_bytes


@pytest.mark.parametrize("room", [8 * ENTRIES, 8 * 64, 0])
def test_native_tiles_get_what_the_twin_leaves(room: int) -> None:
    torch.set_num_threads(1)  # which tile takes the last room is chance between several
    native, lowered = torch.ones(N, 1).double(), torch.ones(N, 1)
    operator = radial("float32", cache_memory=4 * ENTRIES + room).detach()
    for _ in range(2):
        twin(operator)._matmul(lowered)
        operator._matmul(native)
        assert held(operator) == (room, 4 * ENTRIES)
        operator.x1.mul_(1.1)
    operator.cache.clear()
    assert held(operator) == (0, 0)


def test_a_twin_displaces_native_tiles() -> None:
    native, lowered = torch.ones(N, 1).double(), torch.ones(N, 1)
    operator = radial("float32", cache_memory=8 * ENTRIES).detach()
    product = operator._matmul(native)
    assert held(operator) == (8 * ENTRIES, 0)  # all of the budget, as long as there is no twin
    twin(operator)._matmul(lowered)
    assert held(operator)[1] == 4 * ENTRIES
    assert 0 < held(operator)[0] <= 4 * ENTRIES
    assert torch.equal(operator._matmul(native), product)
    assert sum(held(operator)) <= 8 * ENTRIES


def test_twins_of_several_kernels_displace_each_others_native_tiles() -> None:
    cache, products = TileCache(), KernelProducts(tile_size=8, precision="float32", cache_memory=12 * ENTRIES)
    first, second = (
        RadialKernelLinearOperator(
            random(N, 2, seed=seed),
            torch.tensor(1.0).double(),
            function=MATERN32,
            products=products,
            cache=cache.part(str(seed)),
        )
        for seed in (0, 1)
    )
    first._matmul(torch.ones(N, 1).double())
    for operator in (first, second):
        twin(operator)._matmul(torch.ones(N, 1))
        assert cache.pool.num_bytes() <= 12 * ENTRIES
    assert held(first)[1] == held(second)[1] == 4 * ENTRIES


def test_a_twin_that_does_not_fit_anyway_displaces_nothing() -> None:
    operator = radial("float32", cache_memory=8 * 64 - 1, tile_size=64).detach()
    small = radial("native", tile_size=8, cache_memory=8 * 64)
    small = RadialKernelLinearOperator(
        small.x1.detach()[:8], small.outputscale, function=MATERN32, products=small.products, cache=operator.cache
    )
    small._matmul(torch.ones(8, 1).double())
    assert held(operator) == (8 * 64, 0)
    twin(operator)._matmul(torch.ones(N, 1))
    assert held(operator) == (8 * 64, 0)


@pytest.mark.parametrize("precision", ["native", "float32"])
@pytest.mark.parametrize("make", [radial, periodic])
def test_memory_is_free_as_soon_as_nobody_holds_the_operator(
    precision: str, make: Callable[[str], TiledLinearOperator]
) -> None:
    gc.collect()
    gc.disable()
    try:
        operator = make(precision).detach()
        operator._matmul(torch.ones(N, 1).double())
        if precision != "native":
            twin(operator)._matmul(torch.ones(N, 1))
        cache = weakref.ref(operator.cache)
        del operator
        assert cache() is None
    finally:
        gc.enable()


def test_operators_that_share_a_cache_share_their_twins_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = radial("float32").detach()
    double, rhs = operator * 2.0, torch.ones(N, 1)
    assert isinstance(double, RadialKernelLinearOperator)
    product = twin(operator)._matmul(rhs)
    monkeypatch.setattr(RadialTiles, "evaluate", lambda *arguments: pytest.fail("evaluated again"))
    torch.testing.assert_close(twin(double)._matmul(rhs), 2 * product)
    assert torch.equal(twin(operator * 1.0)._matmul(rhs), product)


def test_float32_inputs_are_refused_with_a_remedy() -> None:
    products, x = KernelProducts(precision="float32"), torch.ones(3, 1)
    operator = RadialKernelLinearOperator(x, torch.ones(()), function=MATERN32, products=products)
    refused = "precision='float32'.*float64.*use precision='native'"
    with pytest.raises(ValueError, match=refused):
        low_precision_copy(operator)
    for kernel in (gpytorch.kernels.RBFKernel(), gpytorch.kernels.PeriodicKernel()):
        with pytest.raises(ValueError, match=refused):
            kernel_operator(kernel(x), products)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [kernels.RBFKernel, kernels.PeriodicKernel, kernels.LinearKernel])
def test_half_precision_models_are_refused(dtype: torch.dtype, kernel: type) -> None:
    x = torch.ones(3, 1, dtype=dtype)
    with pytest.raises(ValueError, match=r"need float32 or float64, .*model\.float\(\)"):
        kernel_operator(kernel().to(dtype)(x), KernelProducts())


@pytest.mark.parametrize("precision", ["tf32", "bfloat16", "float16"])
def test_other_formats_are_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="precision must be one of native, float32"):
        KernelProducts(precision=precision)

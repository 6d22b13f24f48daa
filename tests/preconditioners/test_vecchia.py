"""Vecchia's sparse inverse Cholesky factor against its naive dense twin, and as a preconditioner."""

import math

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import SumLinearOperator, ToeplitzLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    NoisyLinearOperator,
    RadialKernelLinearOperator,
)
from gpy_iterative.linear_operators.radial.functions import MATERN12, MATERN32, RBF, RadialFunction
from gpy_iterative.preconditioners import RandomlyPivotedCholesky, SparseInverseCholesky, Vecchia, vecchia
from gpy_iterative.preconditioners.neighbours import maximin_order
from gpy_iterative.random_numbers import permutation
from gpy_iterative.solvers import ConjugateGradients, SolveStatus, russian_roulette_solve
from gpy_iterative.truncation import ExponentialTruncation
from gpy_iterative.worker_threads import ByDevice, divided
from tests.linear_operators.test_generic_kernel import UserKernel
from tests.oracles import problem

N = 60


def plane(n: int, d: int = 2, seed: int = 0) -> Tensor:
    """Uniform points in [-2, 2]^d."""
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4 - 2


def field(
    x: Tensor,
    lengthscale: float = 0.5,
    noise: float | Tensor = 0.01,
    function: RadialFunction = MATERN32,
    dtype: torch.dtype = torch.float64,
) -> NoisyLinearOperator:
    kernel = RadialKernelLinearOperator(
        (x / lengthscale).to(dtype), torch.tensor(1.3, dtype=dtype), function=function, products=KernelProducts()
    )
    return NoisyLinearOperator(kernel, torch.as_tensor(noise, dtype=dtype).expand(len(x)).contiguous())


def generic(x: Tensor, kernel: gpytorch.kernels.Kernel) -> NoisyLinearOperator:
    operator = GenericKernelLinearOperator.of_kernel(kernel.to(x.dtype), x)
    return NoisyLinearOperator(operator, torch.full(operator.shape[:1], 0.1, dtype=x.dtype))


def one_kernel_and_another(x: Tensor) -> NoisyLinearOperator:
    second = RadialKernelLinearOperator(x[:, :1] / 2, torch.tensor(0.4).to(x), function=RBF)
    return NoisyLinearOperator(SumLinearOperator(field(x).kernel, second * 0.5), torch.full((len(x),), 0.02).to(x))


SYSTEMS = {
    "Matern-3/2": lambda: field(plane(N)),
    "Matern-1/2": lambda: field(plane(N), function=MATERN12),
    "noise of every datum": lambda: field(plane(N), noise=torch.linspace(0.01, 0.5, N)),
    "sum": lambda: one_kernel_and_another(plane(N)),
    "generic": lambda: generic(
        plane(N), gpytorch.kernels.RBFKernel() * gpytorch.kernels.MaternKernel(active_dims=(0,))
    ),
    "no batch": lambda: generic(plane(N), UserKernel()),
    "several outputs": lambda: generic(plane(N // 3), gpytorch.kernels.RBFKernelGrad()),
}


def naive(matrix: Tensor, inputs: Tensor, order: Tensor, count: int) -> Tensor:
    """B [n, n] in the order of elimination, row by row."""
    matrix, inputs = matrix[order][:, order], inputs[order]
    result = torch.zeros_like(matrix)
    for row in range(len(matrix)):
        near = (inputs[:row] - inputs[row]).square().sum(-1).argsort()[:count]
        weights = torch.linalg.solve(matrix[near][:, near], matrix[near, row])
        deviation = (matrix[row, row] - matrix[row, near] @ weights).sqrt()
        result[row, near] = -weights / deviation
        result[row, row] = 1 / deviation
    return result


def dense(factor: SparseInverseCholesky) -> Tensor:
    """B [n, n] in the order of elimination."""
    identity = torch.eye(len(factor.order), dtype=factor.diagonal.dtype)
    return factor.whiten(identity)[:, factor.order]


@pytest.mark.parametrize("name", ["Matern-3/2", "Matern-1/2", "noise of every datum"])
@pytest.mark.parametrize("is_given", [False, True], ids=["own order", "given order"])
def test_the_factor_is_the_naive_one(name: str, is_given: bool) -> None:
    operator = SYSTEMS[name]()
    order = permutation(N, torch.Generator().manual_seed(2))
    factor = Vecchia(7).build(operator, choices={"order": order} if is_given else None)
    expected = naive(operator.to_dense(), operator.kernel.x1, factor.order, 7)
    torch.testing.assert_close(dense(factor), expected, rtol=1e-7, atol=1e-7)
    assert int((dense(factor) != 0).sum(-1).max()) == 8


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_neighbours_give_the_inverse(name: str) -> None:
    operator = SYSTEMS[name]()
    inverse = torch.linalg.inv(operator.to_dense().detach())
    for count in (N - 1, N + 40):
        factor = Vecchia(count).build(operator)
        found = factor.solve(torch.eye(N, dtype=torch.float64))
        torch.testing.assert_close(found, inverse, rtol=0, atol=1e-9 * float(inverse.abs().max()))
        torch.testing.assert_close(factor.logdet(), -torch.logdet(inverse))


@pytest.mark.parametrize("name", SYSTEMS)
def test_few_neighbours_give_most_of_it(name: str) -> None:
    """tr(H P^-1) is n, and the divergence log det P - log det H is small: both whatever the kernel."""
    operator = SYSTEMS[name]()
    matrix = operator.to_dense().detach()
    factor = Vecchia(20).build(operator)
    torch.testing.assert_close(factor.solve(matrix).trace(), torch.tensor(float(N)).double())
    excess = factor.logdet() - torch.logdet(matrix)
    assert 0 < excess < 0.2 * (matrix.diagonal().log().sum() - torch.logdet(matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_covariance_and_their_duals_are_its_solves(dtype: torch.dtype) -> None:
    factor = Vecchia(5).build(field(plane(N), dtype=dtype))
    identity = torch.eye(N, dtype=dtype)
    samples, duals = factor.sample(identity)
    tolerance = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 1e-11}
    # Both are linear in base vectors of identity covariance.
    torch.testing.assert_close(samples @ duals.mT, identity, **tolerance)
    torch.testing.assert_close(factor.whiten(samples), identity, **tolerance)
    covariance = torch.linalg.inv(factor.solve(identity).double())
    torch.testing.assert_close((samples @ samples.mT).double(), covariance, rtol=0, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("d", [2, 4])
def test_one_seed_one_factor(d: int, threads: int) -> None:
    operator, recipe = field(plane(300, d)), Vecchia(9)
    state = torch.random.get_rng_state()
    torch.set_num_threads(threads)
    with divided():
        built = [recipe.build(operator, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    rhs = torch.cos(torch.arange(600.0).double()).view(300, 2)
    assert torch.equal(built[0].solve(rhs), built[1].solve(rhs))
    assert not torch.equal(built[0].order, built[2].order)
    torch.testing.assert_close(recipe.build(operator).solve(rhs), recipe.build(operator).solve(rhs), rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_early_points_are_far_apart_on_maps_and_random_beyond() -> None:
    for d, order in ((3, maximin_order), (4, lambda x, generator: permutation(len(x), generator))):
        x = plane(200, d)
        found = Vecchia(5).choices(field(x, lengthscale=1.0), torch.Generator().manual_seed(1))["order"]
        assert torch.equal(found, order(x, torch.Generator().manual_seed(1)))


def test_a_given_order_stays() -> None:
    first = Vecchia(9).build(field(plane(200)), generator=torch.Generator().manual_seed(3))
    moved = Vecchia(9).build(field(plane(200), lengthscale=0.5001), choices={"order": first.order})
    assert torch.equal(moved.order, first.order)
    rhs = torch.cos(torch.arange(200.0).double()).unsqueeze(-1)
    samples = [factor.sample(rhs)[0] for factor in (moved, first)]
    assert (samples[0] - samples[1]).norm() < 1e-2 * samples[1].norm()


def test_a_long_lengthscale_does_not_count_as_a_dimension() -> None:
    """Neighbours are found in scaled inputs: of two, one with a long lengthscale, those along the other."""
    x = plane(400) / torch.tensor([0.2, 50.0]).double()
    factor = Vecchia(10).build(field(x, lengthscale=1.0))
    near = x[factor.order][factor.neighbours[200:].long()] - x[factor.order][200:, None]
    assert near[..., 0].abs().mean() < 0.1 * x[:, 0].std()


@pytest.mark.slow
@pytest.mark.parametrize(("d", "lengthscale", "noise"), [(2, 0.2, 0.01), (2, 0.5, 0.001), (3, 0.5, 0.01)])
def test_conjugate_gradients_take_far_fewer_iterations(d: int, lengthscale: float, noise: float) -> None:
    operator = field(plane(2000, d), lengthscale, noise, dtype=torch.float32)
    rhs = torch.randn(2000, 1, generator=torch.Generator().manual_seed(1))
    iterations = {
        name: ConjugateGradients(preconditioner=recipe, max_epochs=80).solve(operator, rhs).stats.iterations
        for name, recipe in (("none", None), ("low rank", RandomlyPivotedCholesky(300)), ("Vecchia", Vecchia(20)))
    }
    assert iterations["Vecchia"] <= 12
    assert 4 * iterations["Vecchia"] < min(iterations["none"], iterations["low rank"])


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duplicates_and_little_noise(dtype: torch.dtype, d: int) -> None:
    x = plane(300, d).repeat(2, 1)
    x[:100] = x[0]
    operator = field(x, noise=1e-4, dtype=dtype)
    factor = Vecchia(15).build(operator)
    assert torch.equal(factor.order.sort().values, torch.arange(600))
    # No row of B says more than its noise allows.
    assert 0 < factor.diagonal.max() < 1e2 * (1 + 1e-2)
    rhs = torch.randn(600, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    solver = ConjugateGradients(tolerance=0.05, max_epochs=100)
    solution = solver.solve(operator, rhs, preconditioner=factor)
    assert solution.status is SolveStatus.CONVERGED
    assert solution.stats.iterations < 20


def test_blocks_without_a_cholesky_factor_take_a_jitter() -> None:
    x = plane(100).repeat(2, 1)
    operator = field(x, lengthscale=3.0, noise=0.0, function=RBF)
    factor = Vecchia(20).build(operator)
    assert torch.isfinite(factor.diagonal).all()
    assert torch.isfinite(factor.weights).all()
    assert factor.diagonal.max() > 1e3  # of copies, whose variance given the first is the jitter


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_systems(n: int) -> None:
    operator = field(plane(n))
    for recipe in (Vecchia(), Vecchia(1)):
        factor = recipe.build(operator)
        rhs = torch.ones(n, 2).double()
        if n < 3 or recipe.num_neighbours > 1:
            torch.testing.assert_close(factor.solve(rhs), torch.linalg.solve(operator.to_dense(), rhs))
        torch.testing.assert_close(factor.whiten(factor.sample(rhs)[0]), rhs)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are factored a few at a time, with the same result."""
    operator, shapes, whole = field(plane(200)), [], vecchia.principal_blocks
    expected = dense(Vecchia(9).build(operator))

    def watched(operator: LinearOperator, rows: Tensor) -> Tensor:
        shapes.append(rows.shape)
        return whole(operator, rows)

    monkeypatch.setattr(vecchia, "ENTRIES", ByDevice(cpu=1000, accelerator=1000))
    monkeypatch.setattr(vecchia, "principal_blocks", watched)
    torch.testing.assert_close(dense(Vecchia(9).build(operator)), expected)
    assert max(math.prod(shape) * shape[-1] for shape in shapes) <= 1000
    assert len(shapes) == 1 + -(-191 // 10)


def test_to_another_dtype() -> None:
    factor = Vecchia(9).build(field(plane(100)))
    rhs = torch.cos(torch.arange(100.0).double()).unsqueeze(-1)
    single = factor.to(torch.float32)
    assert single.solve(rhs.float()).dtype == torch.float32
    torch.testing.assert_close(single.solve(rhs.float()).double(), factor.solve(rhs), rtol=1e-4, atol=1e-3)
    assert factor.diagonal.dtype == torch.float64


def test_a_series_takes_it() -> None:
    operator, rhs = field(plane(N)), problem(N)[2]
    truncation = ExponentialTruncation(min_steps=30, rate=0.05)
    solution = russian_roulette_solve(operator, rhs, truncation, preconditioner=Vecchia(8))
    torch.testing.assert_close(solution.value, torch.linalg.solve(operator.to_dense(), rhs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_neighbours": 0}, "num_neighbours must be at least 1, got 0"),
        ({"num_neighbours": 2.5}, "num_neighbours must be a whole number"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vecchia(**options)


def test_systems_that_it_cannot_serve() -> None:
    toeplitz = ToeplitzLinearOperator(torch.exp(-0.5 * torch.arange(36).double())).add_jitter(0.5)
    for operator in (to_linear_operator(problem(30)[1]), toeplitz):
        with pytest.raises(ValueError, match=r"needs the inputs of a kernel.*RandomlyPivotedCholesky"):
            Vecchia().build(operator)
    with pytest.raises(ValueError, match=r"one system at a time, got a batch \(2,\)"):
        Vecchia().build(field(plane(30)).expand(2, 30, 30))


def test_what_is_not_finite() -> None:
    x = plane(40)
    x[3, 1] = torch.nan
    with pytest.raises(NonFiniteError, match="inputs"):
        Vecchia(5).build(field(x))
    operator = field(plane(40), noise=torch.full((40,), torch.inf))
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        Vecchia(5).build(operator)

"""A low rank plus Vecchia's approximation of the rest: against its dense twin, alone and as a preconditioner."""

from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel
from linear_operator import to_linear_operator
from linear_operator.operators import SumLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, operator_of_kernel
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.preconditioners import (
    LowRankPlusVecchia,
    LowRankPlusVecchiaFactor,
    PivotedCholeskyFactor,
    Preconditioner,
    RandomlyPivotedCholesky,
    SparseInverseCholesky,
    Vecchia,
)
from gpy_iterative.solvers import ConjugateGradients, SolveStatus
from tests.preconditioners.test_vecchia import SYSTEMS, field, naive, plane

#: Systems with radial kernels, whose points are the inputs.
NAMES = ["Matern-3/2", "noise of every datum", "sum"]


def system(
    lengthscale: float,
    inputs: int = 2,
    batch: tuple[int, ...] = (),
    rows: int = 500,
    far_field: float | None = None,
    kernel: gpytorch.kernels.Kernel | None = None,
) -> NoisyLinearOperator:
    x = torch.rand(*batch, rows, inputs, generator=torch.Generator().manual_seed(0)).double()
    kernel = (kernel or gpytorch.kernels.MaternKernel(nu=1.5)).double()
    kernel.lengthscale = lengthscale
    covariance = operator_of_kernel(kernel, x, None, KernelProducts(far_field=far_field)).detach()
    return NoisyLinearOperator(covariance, torch.full((*batch, rows), 0.01).double())


def always_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.LARGEST_LEFT", 0.0)


def covariance(operator: NoisyLinearOperator, factor: LowRankPlusVecchiaFactor, neighbours: int) -> Tensor:
    """S [n, n] of given pivots and order, densely."""
    kernel, order = operator.kernel.to_dense().double(), factor.local.order
    pivots = factor.pivots[: len(factor.pivots) // 2]
    block, noise = kernel[pivots][:, pivots], operator.noise.double()
    low_rank = kernel[:, pivots] @ torch.linalg.solve(block, kernel[pivots])
    b = naive(kernel - low_rank + noise.diag(), _inputs(operator), order, neighbours)
    local = torch.empty_like(kernel)
    local[order.unsqueeze(-1), order] = torch.linalg.inv(b.mT @ b)
    return low_rank + local


def _inputs(operator: NoisyLinearOperator) -> Tensor:
    kernel = operator.kernel
    terms = kernel.linear_ops if isinstance(kernel, SumLinearOperator) else [kernel]
    parts = [getattr(term, "base_linear_op", term) for term in terms]
    return torch.cat([part.x1 for part in parts], dim=-1).double()


@pytest.mark.parametrize("name", NAMES)
def test_solve_log_determinant_and_samples_are_those_of_the_dense_twin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_local(monkeypatch)
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.NEIGHBOURS", (8, 8))
    operator = SYSTEMS[name]()
    factor = LowRankPlusVecchia(12).build(operator)
    assert isinstance(factor, LowRankPlusVecchiaFactor)
    expected, size = covariance(operator, factor, 8), operator.shape[-1]
    identity = torch.eye(size).double()
    torch.testing.assert_close(factor.solve(expected), identity, rtol=0, atol=1e-6)
    torch.testing.assert_close(factor.logdet(), torch.logdet(expected))
    # Linear in base vectors whose covariance is the identity.
    vectors, duals = factor.sample(torch.eye(factor.num_signs).double())
    torch.testing.assert_close(vectors @ vectors.mT, expected)
    torch.testing.assert_close(vectors @ duals.mT, identity, rtol=0, atol=1e-8)
    torch.testing.assert_close(factor.solve(vectors), duals, rtol=1e-6, atol=1e-6)


def test_with_all_points_as_neighbours_it_is_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    always_local(monkeypatch)
    operator = field(plane(31))
    factor = LowRankPlusVecchia(5).build(operator)
    torch.testing.assert_close(factor.solve(operator.to_dense()), torch.eye(31).double())


@pytest.mark.parametrize("lengthscale", [0.02, 2.0])
def test_float32_with_little_noise(lengthscale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """I + W^T W has then eigenvalues that float32 cannot tell."""
    always_local(monkeypatch)
    operator = field(plane(400), lengthscale, noise=1e-4, dtype=torch.float32)
    factor = LowRankPlusVecchia(40).build(operator)
    base = torch.randn(factor.num_signs, 3, generator=torch.Generator().manual_seed(0))
    vectors, duals = factor.sample(base)
    again = factor.solve(vectors)
    assert (again - duals).norm() < 0.05 * duals.norm()


def test_members_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    always_local(monkeypatch)
    factor = LowRankPlusVecchia(10).build(field(plane(100)))
    rhs = torch.cos(torch.arange(100.0).double()).unsqueeze(-1)
    single = factor.to(torch.float32)
    assert single.solve(rhs.float()).dtype == torch.float32
    torch.testing.assert_close(single.solve(rhs.float()).double(), factor.solve(rhs), rtol=1e-4, atol=1e-3)
    assert factor.solve(rhs).dtype == torch.float64
    assert torch.equal(factor[()].solve(rhs), factor.solve(rhs))
    with pytest.raises(IndexError, match="of one system"):
        factor[0]


def test_given_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    always_local(monkeypatch)
    recipe, first = LowRankPlusVecchia(10), field(plane(200))
    choices = recipe.choices(first, torch.Generator().manual_seed(3))
    assert {name: len(rows) for name, rows in choices.items()} == {"pivots": 10, "order": 200}
    factors = [recipe.build(operator, choices=choices) for operator in (first, field(plane(200), lengthscale=0.50001))]
    for factor in factors:
        assert torch.equal(factor.pivots, choices["pivots"])
        assert torch.equal(factor.local.order, choices["order"])
    base = torch.randn(factors[0].num_signs, 3, generator=torch.Generator().manual_seed(0)).double()
    one, other = (factor.sample(base)[0] for factor in factors)
    assert 0 < (one - other).norm() < 1e-3 * one.norm()


def iterations(operator: NoisyLinearOperator, preconditioner: Preconditioner) -> int:
    rhs = torch.randn(operator.shape[-1], 4, generator=torch.Generator().manual_seed(0)).to(operator.dtype)
    solution = ConjugateGradients(tolerance=1e-3).solve(operator, rhs, preconditioner=preconditioner)
    assert solution.status is SolveStatus.CONVERGED
    return solution.stats.iterations


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        lambda: field(plane(1500), 1.5),
        lambda: field(plane(1500, 5), 4.0, noise=1e-3),
        lambda: field(plane(1500), 0.3, function=RBF),
        lambda: one_trend_and_a_rough_part(plane(1500)),
    ],
    ids=["field", "five inputs", "smooth", "trend and field"],
)
def test_it_takes_fewer_iterations_than_each_part(case: Callable[[], NoisyLinearOperator]) -> None:
    operator = case()
    both = LowRankPlusVecchia().build(operator)
    assert isinstance(both, LowRankPlusVecchiaFactor)
    parts = [RandomlyPivotedCholesky(1500 // 16).build(operator), Vecchia().build(operator)]
    assert iterations(operator, both) < min(iterations(operator, part) for part in parts)


def one_trend_and_a_rough_part(x: Tensor) -> NoisyLinearOperator:
    rough, trend = field(x, 0.1).kernel, field(x, 5.0, function=RBF).kernel
    return NoisyLinearOperator(SumLinearOperator(rough, trend), torch.full((len(x),), 0.01).to(x))


def test_a_low_rank_that_leaves_little_is_enough() -> None:
    recipe = LowRankPlusVecchia(40)
    assert isinstance(recipe.build(system(2.0)), PivotedCholeskyFactor)
    assert isinstance(recipe.build(system(0.1)), LowRankPlusVecchiaFactor)


def test_a_low_rank_is_not_enough_where_some_rows_have_little_noise() -> None:
    """The mean noise hid them: 168 iterations for 7 on 2,000 rows."""
    operator = system(0.5)
    noise = torch.ones(500).double()
    assert isinstance(LowRankPlusVecchia(40).build(NoisyLinearOperator(operator.kernel, noise)), PivotedCholeskyFactor)
    noise[::2] = 1e-4
    few = LowRankPlusVecchia(40).build(NoisyLinearOperator(operator.kernel, noise))
    assert isinstance(few, LowRankPlusVecchiaFactor)


def test_a_far_field_takes_neighbours_alone() -> None:
    tiles, far_field = (system(0.3, rows=3000, far_field=tolerance) for tolerance in (None, 1e-2))
    assert far_field_error(far_field) is not None
    recipe = LowRankPlusVecchia(300)
    assert isinstance(recipe.build(tiles), PivotedCholeskyFactor)
    alone = recipe.choices(far_field)
    assert {name: len(rows) for name, rows in alone.items()} == {"pivots": 0, "order": 3000}
    assert isinstance(recipe.build(far_field), SparseInverseCholesky)
    # Choices stay where hyperparameters move to tiles, or to a far field.
    factor = recipe.build(tiles, choices=alone)
    assert isinstance(factor, SparseInverseCholesky)
    assert torch.equal(factor.order, alone["order"])
    assert isinstance(recipe.build(far_field, choices=recipe.choices(tiles)), PivotedCholeskyFactor)


@pytest.mark.parametrize(
    ("most", "lengthscale", "is_low"), [(2000, 0.3, True), (2000, 0.15, False), (1999, 0.3, False)]
)
def test_a_far_field_on_a_line_takes_a_low_rank_that_is_enough(
    most: int, lengthscale: float, is_low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.MOST_ON_LINE", most)
    operator = system(lengthscale, inputs=1, rows=2000, far_field=1e-5)
    assert far_field_error(operator) is not None
    choices = LowRankPlusVecchia(60).choices(operator)
    expected = PivotedCholeskyFactor if is_low else SparseInverseCholesky
    for factor in (LowRankPlusVecchia(60).build(operator), LowRankPlusVecchia(60).build(operator, choices=choices)):
        assert isinstance(factor, expected)


def test_a_far_field_of_rbf_kernels_takes_a_low_rank() -> None:
    smooth, rough = (system(length, rows=3000, far_field=1e-2, kernel=RBFKernel()) for length in (0.3, 0.02))
    assert all(far_field_error(operator) is not None for operator in (smooth, rough))
    assert isinstance(LowRankPlusVecchia(300).build(smooth), PivotedCholeskyFactor)
    assert isinstance(LowRankPlusVecchia(300).build(rough), LowRankPlusVecchiaFactor)


def test_a_far_field_beside_a_periodic_kernel_takes_a_low_rank() -> None:
    """Neighbours do not tell what a point a period away does: 139 epochs for 7 on 6,000 rows."""
    far_field = system(0.3, rows=3000, far_field=1e-2)
    x = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0)).double()
    periodic = operator_of_kernel(PeriodicKernel().double(), x, None, KernelProducts()).detach()
    both = NoisyLinearOperator(SumLinearOperator(far_field.kernel, periodic), far_field.noise)
    assert far_field_error(both) is not None
    assert isinstance(LowRankPlusVecchia(300).build(both), PivotedCholeskyFactor)


def test_rounding_noise_is_no_pivot() -> None:
    """GPyTorch's periodic entries in float32 are wrong by more than its epsilon: columns of that were as large as .1."""
    x = 1000 * torch.rand(1000, 1, generator=torch.Generator().manual_seed(0))
    kernel = GenericKernelLinearOperator.of_kernel(PeriodicKernel(), x).detach()
    factor = RandomlyPivotedCholesky(300).build(NoisyLinearOperator(kernel, torch.full((1000,), 0.01))).factor
    assert factor.shape[-1] < 20
    torch.testing.assert_close(factor @ factor.mT, kernel.to_dense(), rtol=0.0, atol=0.01)


def test_batches_and_matrices_without_inputs_take_a_low_rank() -> None:
    operator, batch = system(0.1), system(0.1, batch=(2,))
    without_inputs = NoisyLinearOperator(to_linear_operator(operator.kernel.to_dense()), operator.noise)
    for each in (batch, without_inputs, operator.kernel):
        assert isinstance(LowRankPlusVecchia(40).build(each), PivotedCholeskyFactor)


def test_the_generator_decides() -> None:
    operator, recipe = system(0.1), LowRankPlusVecchia(40)
    first, again, other = (recipe.build(operator, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    for name in ("pivots", "order"):
        of_first, of_again, of_other = (
            getattr(each if name == "pivots" else each.local, name) for each in (first, again, other)
        )
        assert torch.equal(of_first, of_again)
        assert not torch.equal(of_first, of_other)


@pytest.mark.parametrize("name", ["rank", "num_neighbours"])
def test_bad_options(name: str) -> None:
    for value in (0, 2.5):
        with pytest.raises(ValueError, match=name):
            LowRankPlusVecchia(**{name: value})


def test_the_number_of_neighbours_follows_the_rows_or_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    always_local(monkeypatch)
    operator, far_field = system(0.1), system(0.3, rows=3000, far_field=1e-2)

    def width(operator: NoisyLinearOperator, num_neighbours: int | None = None) -> int:
        factor = LowRankPlusVecchia(20, num_neighbours).build(operator)
        return (factor if isinstance(factor, SparseInverseCholesky) else factor.local).neighbours.shape[-1]

    assert width(operator) == width(far_field) == 30
    assert width(operator, 7) == width(far_field, 7) == 7
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.ROWS_PER_NEIGHBOUR", 10)
    assert width(operator) == 50


def test_the_rank_follows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = system(0.1)
    assert len(LowRankPlusVecchia().build(operator).pivots) == 100
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.ROWS_PER_COLUMN", 4)
    assert len(LowRankPlusVecchia().build(operator).pivots) == 500 // 4
    monkeypatch.setattr("gpy_iterative.preconditioners.low_rank_plus_vecchia.MAX_RANK", 20)
    assert len(LowRankPlusVecchia().build(operator).pivots) == 20

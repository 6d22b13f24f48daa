"""The choice between low rank and neighbours."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import PeriodicKernel, RBFKernel
from linear_operator import to_linear_operator
from linear_operator.operators import SumLinearOperator

from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, operator_of_kernel
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.preconditioners import (
    LowRankOrVecchia,
    PivotedCholeskyFactor,
    RandomlyPivotedCholesky,
    SparseInverseCholesky,
)


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


def test_long_lengthscales_take_low_rank_and_short_ones_neighbours() -> None:
    recipe = LowRankOrVecchia(40)
    assert isinstance(recipe.build(system(1.0)), PivotedCholeskyFactor)
    assert isinstance(recipe.build(system(0.1)), SparseInverseCholesky)


def test_a_far_field_takes_neighbours() -> None:
    tiles, far_field = (system(0.3, rows=3000, far_field=tolerance) for tolerance in (None, 1e-2))
    assert far_field_error(far_field) is not None
    assert isinstance(LowRankOrVecchia(300).build(tiles), PivotedCholeskyFactor)
    assert isinstance(LowRankOrVecchia(300).build(far_field), SparseInverseCholesky)


def test_a_far_field_of_rbf_kernels_takes_low_rank_where_that_is_enough() -> None:
    smooth, rough = (system(length, rows=3000, far_field=1e-2, kernel=RBFKernel()) for length in (0.3, 0.02))
    assert all(far_field_error(operator) is not None for operator in (smooth, rough))
    for operator in (smooth, copy.deepcopy(smooth)):
        assert isinstance(LowRankOrVecchia(300).build(operator), PivotedCholeskyFactor)
    assert isinstance(LowRankOrVecchia(300).build(rough), SparseInverseCholesky)


def test_a_far_field_beside_a_periodic_kernel_takes_low_rank_where_that_is_enough() -> None:
    """Neighbours do not tell what a point a period away does: 139 epochs for 7 on 6,000 rows."""
    field = system(0.3, rows=3000, far_field=1e-2)
    x = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0)).double()
    periodic = operator_of_kernel(PeriodicKernel().double(), x, None, KernelProducts()).detach()
    both = NoisyLinearOperator(SumLinearOperator(field.kernel, periodic), field.noise)
    assert far_field_error(both) is not None
    assert LowRankOrVecchia(300).for_far_field(field) is not None
    assert LowRankOrVecchia(300).for_far_field(both) is None
    assert isinstance(LowRankOrVecchia(300).build(both), PivotedCholeskyFactor)


def test_rounding_noise_is_no_pivot() -> None:
    """GPyTorch's periodic entries in float32 are wrong by more than its epsilon: columns of that were as large as .1."""
    x = 1000 * torch.rand(1000, 1, generator=torch.Generator().manual_seed(0))
    kernel = GenericKernelLinearOperator.of_kernel(PeriodicKernel(), x).detach()
    factor = RandomlyPivotedCholesky(300).build(NoisyLinearOperator(kernel, torch.full((1000,), 0.01))).factor
    assert factor.shape[-1] < 20
    torch.testing.assert_close(factor @ factor.mT, kernel.to_dense(), rtol=0.0, atol=0.01)


@pytest.mark.parametrize("case", [{"inputs": 9}, {"batch": (2,)}])
def test_many_inputs_and_batches_take_low_rank(case: dict[str, int]) -> None:
    assert isinstance(LowRankOrVecchia(40).build(system(0.1, **case)), PivotedCholeskyFactor)


def test_a_matrix_without_inputs_takes_low_rank() -> None:
    operator = system(0.1)
    dense = NoisyLinearOperator(to_linear_operator(operator.kernel.to_dense()), operator.noise)
    assert isinstance(LowRankOrVecchia(40).build(dense), PivotedCholeskyFactor)


def test_the_generator_decides() -> None:
    operator, recipe = system(0.1), LowRankOrVecchia(40)
    first, again, other = (recipe.build(operator, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert all(isinstance(each, SparseInverseCholesky) for each in (first, again, other))
    assert torch.equal(first.order, again.order)
    assert not torch.equal(first.order, other.order)


def test_a_rank_below_one() -> None:
    with pytest.raises(ValueError, match="rank"):
        LowRankOrVecchia(0)


def test_the_rank_follows_the_rows_the_memory_and_the_cost_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, far_field = (system(0.3, rows=3000, far_field=tolerance, kernel=RBFKernel()) for tolerance in (None, 1e-2))

    def ranks(*operators: NoisyLinearOperator) -> list[int]:
        return [LowRankOrVecchia().build(operator).rank for operator in operators]

    assert ranks(system(1.0, rows=500)) == [500 // 16]  # 500 columns would cost as much as six products of 4,000 rows
    monkeypatch.setattr("gpy_iterative.preconditioners.suited.MAX_RANK", 20)
    assert ranks(tiles, far_field) == [3000 // 128, 20]
    monkeypatch.setattr("gpy_iterative.preconditioners.suited.MAX_NUMBERS", 22 * 3000)
    assert ranks(tiles) == [22]

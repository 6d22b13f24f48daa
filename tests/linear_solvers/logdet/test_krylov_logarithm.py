"""The logarithm's series against eigenvalues of every leading block."""

import pytest
import torch

from gpy_iterative.linear_solvers.logdet.krylov_logarithm import krylov_logarithm_terms
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.randomized.solver_series import Series
from gpy_iterative.solvers import conjugate_gradient_series
from tests import oracles
from tests.linear_solvers.contract import right_hand_sides, system


def run(noise: float, rank: int | None, steps: int) -> Series:
    """A series of `steps` steps for the six columns of the contract."""
    operator, rhs = system(noise), right_hand_sides()
    return conjugate_gradient_series(
        operator,
        rhs,
        torch.arange(6),
        torch.full((6,), steps),
        torch.zeros(steps),
        preconditioner=None if rank is None else PivotedCholesky(rank=rank).build(operator),
    )


@pytest.mark.parametrize("noise", [10.0, 0.04, 1e-6])
@pytest.mark.parametrize("rank", [None, 20])
def test_terms_are_the_differences_of_dense_logarithms(noise: float, rank: int | None) -> None:
    series = run(noise, rank, 40)
    terms = krylov_logarithm_terms(series.lengths, series.products)
    for column in range(6):
        steps = int(series.steps[column])
        expected = oracles.krylov_logarithms(series.lengths[:steps, column], series.products[:steps, column])
        torch.testing.assert_close(terms[:steps, column].cumsum(0), expected, rtol=1e-11, atol=1e-11)
        assert (terms[1:steps, column] < 0).all()
        assert (terms[steps:, column] == 0).all()


def test_small_terms_keep_their_digits() -> None:
    """Of a diagonal matrix with two eigenvalues that almost coincide, the second term is known by a series."""
    gap = 1e-7
    lengths = torch.tensor([[1 / (1 + gap / 2)], [1.0]], dtype=torch.float64)
    # T_2 of eigenvalues 1 and 1 + gap with equal weights: off-diagonal gap / 2.
    beta = (gap / 2 * lengths[0]) ** 2
    lengths[1] = 1 / (1 + gap / 2 - beta / lengths[0])
    terms = krylov_logarithm_terms(lengths, torch.stack([torch.ones(1, dtype=torch.float64), beta]))
    assert float(terms[1]) == pytest.approx(-(gap**2) / 8, rel=1e-6)


def test_ended_columns() -> None:
    assert krylov_logarithm_terms(torch.zeros(3, 2), torch.zeros(3, 2)).abs().max() == 0
    assert krylov_logarithm_terms(torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)
    one = krylov_logarithm_terms(torch.tensor([[0.5], [0.0]]), torch.tensor([[3.0], [0.0]]))
    torch.testing.assert_close(one[:, 0], torch.tensor([2.0, 1.0]).double().log())

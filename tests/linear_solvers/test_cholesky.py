"""The dense way, against dense algebra."""

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.warnings import NumericalWarning

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.linear_solvers import cholesky
from gpy_iterative.solvers import Cholesky, SolveStatus
from tests import oracles
from tests.linear_solvers.contract import GROUPS, N, right_hand_sides, system, true_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_factor(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    matrix = system().to_dense().expand(*batch, N, N) * torch.linspace(1, 2, 2).double()[: len(batch) + 1, None, None]
    matrix = matrix if batch else matrix[0]
    rhs = right_hand_sides().expand(*batch, N, 6)
    factor = Cholesky().factorize(DenseLinearOperator(matrix.to(dtype)))
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
    assert factor.solve(rhs.to(dtype)).dtype == dtype
    torch.testing.assert_close(factor.solve(rhs.to(dtype)).double(), torch.linalg.solve(matrix, rhs), **tolerance)
    torch.testing.assert_close(factor.inverse().double(), torch.linalg.inv(matrix), **tolerance)
    torch.testing.assert_close(factor.logdet().double(), torch.logdet(matrix), **tolerance)
    white = factor.whiten(rhs.to(dtype))
    torch.testing.assert_close(white.mT @ white, rhs.mT @ torch.linalg.solve(matrix, rhs), **tolerance)


def test_an_inverse_in_float32_errs_less_than_the_rounding_of_the_matrix() -> None:
    exact = oracles.problem(200, noise=1e-4)[1]
    factor = Cholesky().factorize(DenseLinearOperator(exact.float()))
    of_rounded = torch.cholesky_inverse(factor.lower)
    caused_by_rounding = torch.linalg.norm(of_rounded - torch.linalg.inv(exact))
    assert torch.linalg.norm(factor.inverse() - of_rounded) < 0.5 * caused_by_rounding


def test_solution() -> None:
    operator, rhs = system(), right_hand_sides()
    rhs[:, 2] = 0
    solution = Cholesky().solve(operator, rhs, groups=GROUPS)
    assert solution.status is SolveStatus.CONVERGED
    assert set(solution.stats.residual_norms) == {"targets", "probes"}
    assert max(solution.stats.residual_norms.values()) < 1e-12
    assert (solution.value[:, 2] == 0).all()
    assert true_norms(operator, rhs[:, :2], solution.value[:, :2]).max() < 1e-12
    assert Cholesky().solve(operator, rhs[:, 0]).value.shape == (N,)


def test_jitter_warns() -> None:
    matrix = oracles.problem(30, noise=0.0)[1]
    matrix[1], matrix[:, 1] = matrix[0].clone(), matrix[:, 0].clone()
    matrix[1, 1] = matrix[0, 0] * (1 - 1e-7)
    with pytest.warns(NumericalWarning, match="noise"):
        factor = Cholesky().factorize(DenseLinearOperator(matrix))
    torch.testing.assert_close(factor.lower @ factor.lower.mT, matrix, atol=1e-5, rtol=1e-5)


def test_what_has_no_factor() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="noise"):
        Cholesky().factorize(DenseLinearOperator(-torch.eye(3).double()))
    with pytest.raises(NonFiniteError):
        Cholesky().factorize(DenseLinearOperator(torch.full((3, 3), torch.nan).double()))
    with pytest.raises(NonFiniteError):
        Cholesky().solve(DenseLinearOperator(torch.eye(3).double()), torch.tensor([1.0, torch.nan, 2.0]).double())


def test_what_rounding_or_jitter_left_is_told() -> None:
    points = torch.linspace(0, 1, 200).double()
    smooth = torch.exp(-(points.unsqueeze(-1) - points).square() / 2)
    matrix = DenseLinearOperator((smooth + 1e-5 * torch.eye(200)).float())
    solution = Cholesky().solve(matrix, torch.sin(40 * points).float())
    assert solution.stats.residual_norms["targets"] > Cholesky.tolerance
    assert solution.status is SolveStatus.STAGNATED
    with pytest.warns(NumericalWarning, match="noise"):
        solution = Cholesky().solve(DenseLinearOperator(smooth), torch.sin(40 * points))
    assert solution.status is SolveStatus.STAGNATED


@pytest.mark.parametrize("most_copied", [0, 2**24])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_an_inverse_by_blocks_of_columns(
    batch: tuple[int, ...], most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cholesky, "MOST_COPIED", most_copied)
    matrix = oracles.problem(600, noise=0.1)[1]
    inverse = Cholesky().factorize(DenseLinearOperator(matrix.expand(*batch, 600, 600))).inverse()
    torch.testing.assert_close(inverse, inverse.mT, rtol=0, atol=0)
    # One matrix: after torch.set_num_threads(2), inverses of a batch fail in MKL (torch 2.13).
    torch.testing.assert_close(inverse, torch.linalg.inv(matrix).expand_as(inverse))

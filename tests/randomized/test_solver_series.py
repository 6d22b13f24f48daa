"""Russian-roulette conjugate gradients: exact expectations by enumeration, and the two known mistakes."""

import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.linear_solvers.logdet.krylov_logarithm import krylov_logarithm_terms
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky
from gpy_iterative.solvers import (
    Series,
    SolveStatus,
    conjugate_gradient_series,
    russian_roulette_solve,
)
from gpy_iterative.truncation import AutomaticTruncation, ExponentialTruncation, FixedTruncation
from tests import oracles
from tests.linear_solvers.contract import right_hand_sides, system, true_norms
from tests.monte_carlo import assert_mean_within

N = 60
TRUNCATION = ExponentialTruncation(6, 0.15, N)
STOPS = torch.arange(6, N + 1)
PROBABILITIES = -TRUNCATION.log_survival(torch.arange(6, N + 2)).exp().diff()
LOG_SURVIVAL = TRUNCATION.log_survival(torch.arange(1, N + 1))


def built(operator: NoisyLinearOperator, rank: int | None) -> LowRankPlusDiagonal | None:
    return None if rank is None else PivotedCholesky(rank=rank).build(operator)


def smooth_system() -> tuple[NoisyLinearOperator, Tensor]:
    """A squared exponential kernel in two dimensions, whose condition number is 400, and targets [n, 1]."""
    x, _, y = oracles.problem(N, 2)
    kernel = RadialKernelLinearOperator(x, torch.tensor(1.3, dtype=torch.float64), function=RBF)
    return NoisyLinearOperator(kernel, torch.full((N,), 0.05, dtype=torch.float64)), y.unsqueeze(-1)


def every_truncation(operator: NoisyLinearOperator, rhs: Tensor, rank: int | None, **options) -> tuple[Tensor, Series]:
    """Sums for all values of J from one run, [n, t, J]."""
    columns = torch.arange(rhs.shape[-1]).repeat_interleave(len(STOPS))
    stops = STOPS.repeat(rhs.shape[-1])
    series = conjugate_gradient_series(
        operator, rhs, columns, stops, LOG_SURVIVAL, preconditioner=built(operator, rank), **options
    )
    return series.sums.reshape(len(rhs), rhs.shape[-1], len(STOPS)), series


@pytest.mark.parametrize("rank", [None, 15])
def test_the_expected_sum_is_the_solution(rank: int | None) -> None:
    operator, rhs = system(0.1, size=N), right_hand_sides(N)
    sums, series = every_truncation(operator, rhs, rank)
    torch.testing.assert_close(sums @ PROBABILITIES, torch.linalg.solve(operator.to_dense(), rhs), rtol=0, atol=1e-8)
    # The quadratic forms, and the estimator's variance in the H-norm, come from the same scalars.
    quadratic = (rhs * torch.linalg.solve(operator.to_dense(), rhs)).sum(0)
    torch.testing.assert_close(series.energies.sum(0), quadratic, rtol=1e-8, atol=1e-8)
    error = sums - torch.linalg.solve(operator.to_dense(), rhs).unsqueeze(-1)
    image = torch.einsum("ij,jtk->itk", operator.to_dense(), error)
    variance = (error * image).sum(0) @ PROBABILITIES
    closed = (-LOG_SURVIVAL[: len(series.energies)]).expm1() @ series.energies
    torch.testing.assert_close(closed, variance, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("rank", [None, 15])
def test_the_expected_log_determinant_is_exact(rank: int | None) -> None:
    operator = system(0.1, size=N)
    factor = built(operator, rank)
    base = torch.eye(N, dtype=torch.float64)
    covariance = base if factor is None else oracles.low_rank_plus_diagonal(factor, base)
    probes = math.sqrt(N) * torch.linalg.cholesky(covariance)
    _, series = every_truncation(operator, probes, rank)
    terms = krylov_logarithm_terms(series.lengths, series.products)
    weighted = terms * (-LOG_SURVIVAL[: len(terms)]).exp().unsqueeze(-1)
    values = torch.zeros(N, N, dtype=torch.float64)  # J, probe
    values[: len(terms)] = weighted.cumsum(0)
    values[len(terms) :] = values[len(terms) - 1]
    squared = (probes * torch.linalg.solve(covariance, probes)).sum(0)
    mean = (PROBABILITIES @ values[STOPS - 1]) @ squared / N
    expected = torch.linalg.slogdet(operator.to_dense())[1] - torch.linalg.slogdet(covariance)[1]
    assert float(mean) == pytest.approx(float(expected), rel=1e-8)


def test_products_of_two_truncations_are_unbiased_and_of_one_are_not() -> None:
    operator, rhs = smooth_system()
    dense = operator.to_dense()
    derivative = torch.eye(N, dtype=torch.float64)  # with respect to the noise
    sums, _ = every_truncation(operator, rhs, None)
    sums, mean = sums[:, 0], sums[:, 0] @ PROBABILITIES
    solution = torch.linalg.solve(dense, rhs[:, 0])
    exact = float(solution @ derivative @ solution)
    assert float(mean @ derivative @ mean) == pytest.approx(exact, rel=1e-8)
    same_twice = float(PROBABILITIES @ (sums * (derivative @ sums)).sum(0))
    assert same_twice > 1.1 * exact

    # The same by Monte Carlo, with the check that all stochastic claims go through: it refuses the mistake.
    generator = torch.Generator().manual_seed(0)
    first, second = (TRUNCATION.sample((20_000,), generator) - 6 for _ in range(2))
    table = sums.T @ derivative @ sums
    assert_mean_within(table[first, second], exact, max_sem=0.025 * exact)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean_within(table[first, first], exact, max_sem=math.inf)


def test_a_converged_column_keeps_its_weights_and_the_plain_solution_would_be_biased() -> None:
    operator, rhs = smooth_system()
    sums, series = every_truncation(operator, rhs, None, tolerance=1e-2)
    steps = int(series.steps[0])
    assert series.converged.all()
    assert 6 < steps < N
    # The textbook's iterate, in the same arithmetic: rounding grows along a run.
    run = conjugate_gradient_series(
        operator, rhs, torch.tensor([0]), torch.tensor([steps]), torch.zeros(steps), preconditioner=None
    )
    plain = run.sums[:, 0]
    torch.testing.assert_close(sums[:, 0] @ PROBABILITIES, plain, rtol=0, atol=1e-8)

    substituted = torch.where(steps <= STOPS, plain.unsqueeze(-1), sums[:, 0])
    exact, draws = float(rhs[:, 0] @ plain), TRUNCATION.sample((20_000,), torch.Generator().manual_seed(0)) - 6
    assert_mean_within((rhs[:, 0] @ sums[:, 0])[draws], exact, max_sem=0.025 * exact)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean_within((rhs[:, 0] @ substituted)[draws], exact, max_sem=math.inf)
    assert abs(float(rhs[:, 0] @ substituted @ PROBABILITIES) / exact - 1) > 1e-2


@pytest.mark.parametrize("rank", [None, 20])
def test_without_weights_sums_are_the_textbook_iterates(rank: int | None) -> None:
    operator, rhs = system(), right_hand_sides()
    series = conjugate_gradient_series(
        operator,
        rhs,
        torch.arange(6),
        torch.tensor([3, 3, 3, 3, 5, 1]),
        torch.zeros(5),
        preconditioner=built(operator, rank),
    )
    assert series.steps.tolist() == [3, 3, 3, 3, 5, 1]
    assert series.iterations == 5
    factor = built(operator, rank)
    inverse = None if factor is None else factor.solve(torch.eye(120, dtype=torch.float64))
    for column, steps in enumerate(series.steps.tolist()):
        expected = oracles.conjugate_gradients(operator.to_dense(), rhs[:, column], steps, inverse)
        torch.testing.assert_close(series.sums[:, column], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(series.norms, true_norms(operator, rhs, series.sums), rtol=1e-8, atol=0)


def test_bounds_of_truncated_values() -> None:
    """For each probe: the quadratic form rises to its limit, and the logarithm falls to it."""
    operator, rhs = system(0.1, size=N), right_hand_sides(N)
    _, series = every_truncation(operator, rhs, None)
    dense = operator.to_dense()
    assert (series.energies >= 0).all()
    assert (series.energies.cumsum(0) <= (rhs * torch.linalg.solve(dense, rhs)).sum(0) * (1 + 1e-12)).all()
    values, vectors = torch.linalg.eigh(dense)
    exact = (vectors.T @ rhs).square().T @ values.log() / rhs.square().sum(0)
    found = krylov_logarithm_terms(series.lengths, series.products).cumsum(0)
    assert (found >= exact - 1e-10).all()


def test_degenerate_systems() -> None:
    generator = torch.Generator().manual_seed(0)
    truncation = ExponentialTruncation(1, 2.0, 5)
    rhs = right_hand_sides(N)
    operator = system(0.1, size=N)
    # P = H: one step, whatever J.
    exact = PivotedCholesky(rank=N).build(operator)
    solution = russian_roulette_solve(operator, rhs, truncation, preconditioner=exact, generator=generator)
    torch.testing.assert_close(solution.value, torch.linalg.solve(operator.to_dense(), rhs), rtol=1e-6, atol=1e-7)
    # Noise that dwarfs the kernel: likewise, up to the kernel.
    loud = system(1e9, size=N)
    solution = russian_roulette_solve(loud, rhs, truncation, preconditioner=None, generator=generator)
    torch.testing.assert_close(solution.value * 1e9, rhs, rtol=1e-4, atol=1e-4)
    # Zero columns, a single datum.
    rhs = rhs.clone()
    rhs[:, 2] = 0
    solution = russian_roulette_solve(operator, rhs, TRUNCATION, generator=generator)
    assert (solution.value[:, 2] == 0).all()
    one = DenseLinearOperator(torch.tensor([[4.0]], dtype=torch.float64))
    solution = russian_roulette_solve(one, torch.tensor([2.0], dtype=torch.float64), truncation, preconditioner=None)
    assert solution.value.tolist() == [0.5]
    assert solution.status is SolveStatus.CONVERGED
    # No columns.
    solution = russian_roulette_solve(operator, rhs[:, :0], TRUNCATION)
    assert solution.value.shape == (N, 0)


def test_a_full_run_is_conjugate_gradients() -> None:
    operator, rhs = system(0.1, size=N), right_hand_sides(N)
    expected = torch.linalg.solve(operator.to_dense(), rhs)
    for truncation in (ExponentialTruncation(200, 0.05), ExponentialTruncation(N, 0.0, N), FixedTruncation(2 * N)):
        solution = russian_roulette_solve(operator, rhs, truncation)
        torch.testing.assert_close(solution.value, expected, rtol=0, atol=1e-7)


def test_the_solution_says_what_was_done() -> None:
    operator, rhs = system(0.01), right_hand_sides()
    truncation = ExponentialTruncation(4, 0.3)
    solution = russian_roulette_solve(operator, rhs, truncation, generator=torch.Generator().manual_seed(1))
    stops = truncation.within(120, torch.float64).sample((6,), torch.Generator().manual_seed(1))
    assert solution.status is SolveStatus.TRUNCATED
    assert "rate" in solution.status.advice
    assert solution.stats.iterations == int(stops.max())
    assert solution.stats.overhead == 1 + 5 / 120
    torch.testing.assert_close(solution.residual, rhs - operator.to_dense() @ solution.value)
    single = russian_roulette_solve(operator, rhs[:, 0], truncation)
    assert single.value.shape == single.residual.shape == (120,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_of_very_different_scale(dtype: torch.dtype) -> None:
    operator = system(0.1, size=N, dtype=dtype)
    scales = torch.tensor([1e-15, 1e-9, 1.0, 1e9, 1e15, 1.0], dtype=dtype)
    rhs = right_hand_sides(N).to(dtype)
    plain = russian_roulette_solve(operator, rhs, TRUNCATION)
    scaled = russian_roulette_solve(operator, rhs * scales, TRUNCATION)
    assert scaled.value.dtype == dtype
    torch.testing.assert_close(scaled.value / scales, plain.value, rtol=1e-2, atol=1e-3)


def test_input_is_left_alone() -> None:
    operator, rhs = system(), right_hand_sides()
    before = rhs.clone()
    russian_roulette_solve(operator, rhs, TRUNCATION)
    assert torch.equal(rhs, before)


def test_series_ends_at_negative_curvature() -> None:
    y = oracles.problem(N)[2]
    for diagonal in (torch.linspace(-1, 1, N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)):
        solution = russian_roulette_solve(DenseLinearOperator(diagonal.diag()), y, TRUNCATION, preconditioner=None)
        assert solution.status is SolveStatus.INDEFINITE
        assert torch.isfinite(solution.value).all()


def test_non_finite_systems_raise() -> None:
    y = oracles.problem(N)[2]
    bad = y.clone()
    bad[3] = torch.nan
    with pytest.raises(NonFiniteError, match="0 steps"):
        russian_roulette_solve(system(size=N), bad, TRUNCATION)
    matrix = system(size=N).to_dense()
    matrix[2, 3] = matrix[3, 2] = torch.inf
    with pytest.raises(NonFiniteError, match="after 1 steps"):
        russian_roulette_solve(DenseLinearOperator(matrix), y, TRUNCATION, preconditioner=None)


class Halves:
    """A user's own distribution: P(J >= j) = 2^-(j - 1)."""

    def log_survival(self, steps: Tensor) -> Tensor:
        return -math.log(2) * (steps.double() - 1)

    def sample(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return 1 + (-torch.rand(size, generator=generator, dtype=torch.float64).clamp_min(1e-300).log2()).floor().long()


def test_any_distribution_and_its_contradictions() -> None:
    operator, rhs = system(0.1, size=N), right_hand_sides(N)
    assert russian_roulette_solve(operator, rhs, Halves()).stats.iterations >= 1

    class NotOne(Halves):
        def log_survival(self, steps: Tensor) -> Tensor:
            return super().log_survival(steps) - 1

    class Short(Halves):
        def log_survival(self, steps: Tensor) -> Tensor:
            return torch.where(steps > 1, -torch.inf, 0.0)

    class Zero(Halves):
        def sample(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
            return torch.zeros(size, dtype=torch.int64)

    class OneForAll(Halves):
        def sample(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
            return super().sample((1,), generator)

    contradictions = (
        (NotOne(), "NotOne.log_survival.*j = 1"),
        (Short(), "j = 2"),
        (Zero(), "Zero.sample"),
        (OneForAll(), r"OneForAll.sample.*\(6,\).*\(1,\)"),
    )
    for bad, said in contradictions:
        with pytest.raises(ValueError, match=said):
            russian_roulette_solve(operator, rhs, bad)
    with pytest.raises(ValueError, match="batch"):
        russian_roulette_solve(operator.expand(2, N, N), rhs.expand(2, N, 6), TRUNCATION)
    with pytest.raises(ValueError, match="does not fit"):
        russian_roulette_solve(operator, rhs[:-1], TRUNCATION)
    for bad in (80, ExponentialTruncation, AutomaticTruncation()):
        with pytest.raises(TypeError, match=r"log_survival and sample"):
            russian_roulette_solve(operator, rhs, bad)
    for bad in (0.0, 2.0, math.nan):
        with pytest.raises(ValueError, match=f"tolerance.*{bad}"):
            every_truncation(operator, rhs, None, tolerance=bad)

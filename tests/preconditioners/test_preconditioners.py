"""Low rank plus diagonal, and the pivoted Cholesky factor, against dense algebra."""

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky, RandomlyPivotedCholesky
from gpy_iterative.preconditioners.low_rank_plus_diagonal import CHUNK, COLUMNS
from gpy_iterative.preconditioners.pivoted_cholesky import PartialCholesky
from tests.monte_carlo import assert_mean_within
from tests.oracles import low_rank_plus_diagonal, pivoted_cholesky, problem
from tests.preconditioners.watching import watched

NOISE = 0.04


def system(n: int = 120) -> NoisyLinearOperator:
    _, matrix, _ = problem(n, noise=0.0)
    return NoisyLinearOperator(DenseLinearOperator(matrix), torch.linspace(0.5, 1.5, n).double() * NOISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_woodbury(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(*batch, 30, 4, generator=generator, dtype=torch.float64)
    diagonal = 0.1 + torch.rand(*batch, 30, generator=generator, dtype=torch.float64)
    rhs = torch.randn(*batch, 30, 3, generator=generator, dtype=torch.float64)
    covariance = LowRankPlusDiagonal(factor.to(dtype), diagonal.to(dtype))
    dense = factor @ factor.mT + torch.diag_embed(diagonal)
    tolerance = {"atol": 1e-3, "rtol": 1e-3} if dtype == torch.float32 else {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(low_rank_plus_diagonal(covariance, rhs.to(dtype)).double(), dense @ rhs, **tolerance)
    torch.testing.assert_close(covariance.solve(rhs.to(dtype)).double(), torch.linalg.solve(dense, rhs), **tolerance)
    torch.testing.assert_close(covariance.logdet().double(), torch.logdet(dense), **tolerance)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_float32_solves_are_rounded_once_where_one_eigenvalue_is_large(batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = CHUNK + 100
    columns = torch.full((*batch, rows, 1), 8.0), torch.rand(*batch, rows, 40, generator=generator)
    covariance = LowRankPlusDiagonal(torch.cat(columns, dim=-1), torch.full((*batch, rows), 0.05))
    rhs = torch.randn(*batch, rows, 17, generator=generator)
    found, exact = covariance.solve(rhs), covariance.to(torch.float64).solve(rhs.double())
    assert found.dtype == torch.float32
    assert (found - exact).norm() < 1e-7 * exact.norm()  # ten times that by products in float32


def test_float32_solves_fit_vectors_along_a_large_eigenvector() -> None:
    """By products in float32, S S^-1 v differed from v by four times its norm, so conjugate gradients did not converge."""
    rows, generator = 50_000, torch.Generator().manual_seed(0)
    x = torch.rand(rows, generator=generator)
    factor, noise = torch.stack([x**power for power in range(8)], dim=-1), 0.1
    rhs = x.cos().unsqueeze(-1)
    found = LowRankPlusDiagonal(factor, torch.full((rows,), noise)).solve(rhs).double()
    product = factor.double() @ (factor.mT.double() @ found) + noise * found
    assert (product - rhs).norm() < 0.1 * rhs.norm()


def test_samples_have_the_covariance() -> None:
    generator = torch.Generator().manual_seed(1)
    covariance = LowRankPlusDiagonal(
        torch.randn(5, 2, generator=generator).double(), torch.linspace(0.1, 1.0, 5).double()
    )
    draws = 20_000
    samples, _ = covariance.sample(torch.randn(7, draws, generator=generator).double())
    samples = samples.mT
    products = samples.unsqueeze(-1) * samples.unsqueeze(-2)
    assert_mean_within(products, low_rank_plus_diagonal(covariance, torch.eye(5).double()), max_sem=0.1)


@pytest.mark.parametrize("noise", [1.0, 1e-6])  # the inner matrix in float32 and, for lack of digits, in float64
def test_duals_are_solves_of_samples(noise: float) -> None:
    generator = torch.Generator().manual_seed(2)
    factor = torch.randn(700, COLUMNS + 30, generator=generator, dtype=torch.float64)
    diagonal = noise * (0.1 + torch.rand(700, generator=generator, dtype=torch.float64))
    covariance = LowRankPlusDiagonal(factor.float(), diagonal.float())
    factor, diagonal = covariance.factor.double(), covariance.diagonal.double()
    base = [torch.randn(rows, 3, generator=generator, dtype=torch.float64) for rows in (COLUMNS + 30, 700)]
    dense = factor @ factor.mT + torch.diag_embed(diagonal)
    exact = torch.linalg.solve(dense, factor @ base[0] + diagonal.sqrt().unsqueeze(-1) * base[1])
    _, dual = covariance.sample(torch.cat(base).float())
    assert (dual.double() - exact).norm() < 1e-4 * exact.norm()


def test_an_inner_matrix_that_is_off_leaves_the_duals_unbiased() -> None:
    generator = torch.Generator().manual_seed(3)
    covariance = LowRankPlusDiagonal(
        torch.randn(6, 3, generator=generator).double(), torch.linspace(0.1, 1.0, 6).double()
    )
    covariance._cholesky *= 1.3
    # Both are linear in the base vectors, whose covariance is the identity.
    samples, duals = covariance.sample(torch.eye(9).double())
    mean = samples @ duals.mT
    torch.testing.assert_close(mean, torch.eye(6).double())
    assert not torch.allclose(covariance.solve(low_rank_plus_diagonal(covariance, mean)), mean, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_and_pivots_are_the_greedy_ones(dtype: torch.dtype) -> None:
    operator = system()
    factor, pivots = pivoted_cholesky(operator.kernel.to_dense(), 20)
    single = NoisyLinearOperator(DenseLinearOperator(operator.kernel.to_dense().to(dtype)), operator.noise.to(dtype))
    built = PivotedCholesky(rank=20).build(single)
    assert built.pivots[0] == 0
    if dtype == torch.float64:
        assert built.pivots.tolist() == pivots
        torch.testing.assert_close(built.factor, factor)
    rest = operator.kernel.to_dense() - built.factor.double() @ built.factor.double().mT
    assert torch.linalg.eigvalsh(rest).min() > -1e-5
    assert rest[built.pivots].abs().max() < 1e-5


def test_given_pivots_make_the_same_factor() -> None:
    operator = system()
    greedy = PivotedCholesky(rank=20).build(operator)
    again = PivotedCholesky(rank=20).build(operator, choices={"pivots": greedy.pivots})
    torch.testing.assert_close(again.factor @ again.factor.mT, greedy.factor @ greedy.factor.mT, atol=1e-8, rtol=1e-8)


def test_corrected_diagonal_is_that_of_the_system() -> None:
    operator = system()
    built = PivotedCholesky(rank=10).build(operator, correct_diagonal=True)
    torch.testing.assert_close(
        low_rank_plus_diagonal(built, torch.eye(120).double()).diagonal(), operator.diagonal(dim1=-1, dim2=-2)
    )


def test_rank_n_is_the_system_itself() -> None:
    operator = system(30)
    built = PivotedCholesky(rank=50).build(operator)
    assert built.rank <= 30
    torch.testing.assert_close(built.logdet(), torch.logdet(operator.to_dense()))


def test_duplicate_rows_stop_the_factor_early() -> None:
    x = torch.linspace(-1, 1, 5).double().repeat(8)
    kernel = torch.exp(-(x[:, None] - x[None]).square())
    built = PivotedCholesky(rank=20).build(NoisyLinearOperator(DenseLinearOperator(kernel), torch.ones(40).double()))
    assert built.rank == 5
    assert torch.isfinite(built.factor).all()


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_kernel_that_is_zero_has_a_factor_without_columns(batch: tuple[int, ...]) -> None:
    operator = NoisyLinearOperator(DenseLinearOperator(torch.zeros(*batch, 6, 6)), torch.full((*batch, 6), NOISE))
    factor = PivotedCholesky(rank=3).build(operator)
    assert factor.rank == 0
    again = PivotedCholesky(rank=3).build(operator, choices={"pivots": factor.pivots})
    rhs = torch.ones(*batch, 6, 2)
    for each in (factor, again):
        torch.testing.assert_close(each.solve(rhs), rhs / NOISE)


def test_members_of_a_batch() -> None:
    single = system(40)
    operator = NoisyLinearOperator(
        DenseLinearOperator(torch.stack([single.kernel.to_dense(), 2 * single.kernel.to_dense()])),
        single.noise.expand(2, -1),
    )
    built = PivotedCholesky(rank=10).build(operator)
    assert built.factor.shape == (2, 40, 10)
    torch.testing.assert_close(built.factor[0], PivotedCholesky(rank=10).build(single).factor)


def test_any_positive_definite_operator() -> None:
    _, matrix, _ = problem(60)
    built = PivotedCholesky(rank=20).build(DenseLinearOperator(matrix))
    rhs = torch.ones(60, 1).double()
    torch.testing.assert_close(low_rank_plus_diagonal(built, built.solve(rhs)), rhs)


def test_ties_go_to_the_first_row() -> None:
    # A stationary kernel on a regular grid: all of the diagonal is equal, and then mirror images are.
    x = torch.arange(16).double()
    kernel = torch.exp(-(x[:, None] - x[None]).abs())
    built = PivotedCholesky(rank=3).build(NoisyLinearOperator(DenseLinearOperator(kernel), torch.ones(16).double()))
    assert built.pivots.tolist() == pivoted_cholesky(kernel, 3)[1]
    assert built.pivots[0] == 0


def test_kernel_is_never_formed() -> None:
    operator, formed = watched(problem(60, noise=0.0)[1])
    PivotedCholesky(rank=7).build(operator)
    assert formed == [(1, 60)] * 7


def test_float32_holds_where_the_noise_is_small() -> None:
    # Formed in float32, the inner matrix of noise 1e-5 has no Cholesky factor.
    matrix = 100 * problem(300, noise=0.0)[1]
    noise = torch.full((300,), 1e-5).double()
    exact = PivotedCholesky(rank=60).build(NoisyLinearOperator(DenseLinearOperator(matrix), noise))
    single = LowRankPlusDiagonal(exact.factor.float(), exact.diagonal.float())
    torch.testing.assert_close(single.logdet().double(), exact.logdet(), rtol=1e-5, atol=1e-2)
    rhs = torch.cos(torch.arange(300).double()).unsqueeze(-1)
    error = single.solve(rhs.float()).double() - exact.solve(rhs)
    assert error.norm() < 1e-3 * exact.solve(rhs).norm()


def test_noise_that_has_vanished() -> None:
    matrix = problem(40, noise=0.0)[1]
    built = PivotedCholesky(rank=10).build(NoisyLinearOperator(DenseLinearOperator(matrix), torch.zeros(40).double()))
    assert (built.diagonal > 0).all()
    assert torch.isfinite(built.solve(torch.ones(40, 1).double())).all()


def test_batch_with_duplicate_rows_in_one_member_stops_together() -> None:
    x = torch.linspace(-1, 1, 5).double().repeat(8)
    single = torch.exp(-(x[:, None] - x[None]).square())
    matrices = torch.stack([problem(40, noise=0.0)[1], single])
    operator = NoisyLinearOperator(DenseLinearOperator(matrices), torch.full((2, 40), 0.1).double())
    built = PivotedCholesky(rank=20).build(operator, correct_diagonal=True)
    assert built.factor.shape == (2, 40, 5)
    dense = low_rank_plus_diagonal(built, torch.eye(40).double())
    torch.testing.assert_close(dense.diagonal(dim1=-2, dim2=-1), operator.diagonal(dim1=-2, dim2=-1))


def test_member_of_a_batch_is_the_same_covariance() -> None:
    operator = system(40).expand(2, 3, 40, 40)
    built = PivotedCholesky(rank=10).build(operator)
    rhs = torch.ones(40, 2).double()
    member = built[1, 2]
    assert member.pivots.shape == (10,)
    torch.testing.assert_close(member.solve(rhs), PivotedCholesky(rank=10).build(system(40)).solve(rhs))
    torch.testing.assert_close(member.logdet(), built.logdet()[1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [12, 120])
def test_random_pivots_of_a_singular_matrix_come_to_an_end(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What rounding leaves of the diagonal must not be proposed for ever.
    rounds, propose = [], PartialCholesky.propose

    def counted(self: PartialCholesky, size: int, generator: torch.Generator) -> torch.Tensor:
        rounds.append(size)
        assert len(rounds) < 1000
        return propose(self, size, generator)

    monkeypatch.setattr(PartialCholesky, "propose", counted)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = 2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
        matrix = torch.exp(-(x - x.mT).square() / 2)
        operator = NoisyLinearOperator(DenseLinearOperator(matrix.to(dtype)), torch.full((rows,), 0.1, dtype=dtype))
        built = RandomlyPivotedCholesky(rank=100).build(operator, generator=generator)
        left = matrix - built.factor.double() @ built.factor.double().mT
        assert left.abs().max() < 1000 * torch.finfo(dtype).eps


def test_what_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match="diagonal"):
        LowRankPlusDiagonal(torch.ones(3, 1), torch.tensor([1.0, torch.nan, 1.0]))
    with pytest.raises(NonFiniteError, match="diagonal"):
        LowRankPlusDiagonal(torch.ones(3, 1), torch.tensor([1.0, -1.0, 1.0]))


def test_rank_below_one() -> None:
    with pytest.raises(ValueError, match="rank"):
        PivotedCholesky(rank=0)


def rounded(lengthscale: float, size: float, dtype: torch.dtype) -> NoisyLinearOperator:
    """A smooth kernel, of numerical rank 12 or so, with symmetric errors of one size in its entries."""
    x = torch.linspace(0, 10, 80).double()
    errors = torch.randn(80, 80, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    kernel = torch.exp(-(x[:, None] - x[None]).square() / (2 * lengthscale**2)) + size * (errors + errors.mT)
    return NoisyLinearOperator(DenseLinearOperator(kernel.to(dtype)), torch.full((80,), 1e-3, dtype=dtype))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-4), (torch.float64, 1e-6), (torch.float64, 1e-4)])
@pytest.mark.parametrize("recipe", [PivotedCholesky(rank=40), RandomlyPivotedCholesky(rank=40)])
def test_pivots_that_carry_only_rounding_fade_out(dtype: torch.dtype, size: float, recipe: PivotedCholesky) -> None:
    # Drawn where forty pivots carry something, used where a dozen do.
    pivots = recipe.build(rounded(0.2, 0.0, torch.float64)).pivots
    operator = rounded(2.0, size, dtype)
    built = recipe.build(operator, choices={"pivots": pivots}, correct_diagonal=True)
    assert built.rank == 40
    block = operator.kernel.to_dense()[pivots][:, pivots]
    assert torch.linalg.eigvalsh(block.double())[0] < 0
    exact = rounded(2.0, 0.0, torch.float64).kernel.to_dense()
    left = torch.linalg.eigvalsh(exact - built.factor.double() @ built.factor.double().mT)
    # Nowhere far above the kernel, and where it carries something not far below.
    assert left[0] > -50 * size
    assert left[-1] < 100 * size + 1e-6
    values = [
        recipe.build(rounded(2 + move, size, dtype), choices={"pivots": pivots}).factor.double()
        for move in (0, 1e-5, 1e-3)
    ]
    assert (values[1] - values[0]).norm() < 0.1 * (values[2] - values[0]).norm() or dtype == torch.float32


def test_pivots_of_a_kernel_that_has_become_zero() -> None:
    pivots = PivotedCholesky(rank=10).build(system(20)).pivots
    zero = NoisyLinearOperator(DenseLinearOperator(torch.zeros(20, 20).double()), system(20).noise)
    built = PivotedCholesky(rank=10).build(zero, choices={"pivots": pivots})
    assert not built.factor.any()
    torch.testing.assert_close(built.diagonal, zero.noise)


def test_jitter_is_raised_where_it_has_to_be_only() -> None:
    operator = system()
    chosen = PivotedCholesky(rank=20).build(operator)
    again = PivotedCholesky(rank=20).build(operator, choices={"pivots": chosen.pivots})
    torch.testing.assert_close(again.factor, chosen.factor)

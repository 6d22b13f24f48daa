"""Random pivots and random subspaces against dense algebra."""

import itertools

import gpytorch
import pytest
import torch
from linear_operator.operators import DenseLinearOperator, ToeplitzLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators import GenericKernelLinearOperator, KernelProducts, NoisyLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.preconditioners import (
    Nystrom,
    PivotedCholesky,
    PreconditionerRecipe,
    RandomlyPivotedCholesky,
)
from gpy_iterative.solvers import ConjugateGradients, SolveStatus, russian_roulette_solve
from gpy_iterative.truncation import ExponentialTruncation
from tests.monte_carlo import assert_mean_within
from tests.oracles import low_rank_plus_diagonal, problem
from tests.preconditioners.test_preconditioners import system
from tests.preconditioners.watching import watched

RECIPES: dict[str, PreconditionerRecipe] = {
    "random pivots": RandomlyPivotedCholesky(rank=20),
    "random pivots, one proposal": RandomlyPivotedCholesky(rank=20, block_size=1),
    "Nystrom": Nystrom(rank=20),
}
KERNEL_SMALL = torch.tensor(
    [[1.0, 0.9, 0.2, 0.1], [0.9, 2.0, 0.3, 0.0], [0.2, 0.3, 0.5, 0.2], [0.1, 0.0, 0.2, 1.5]], dtype=torch.float64
)


def radial(n: int, dtype: torch.dtype = torch.float64, stretch: float = 1.0) -> NoisyLinearOperator:
    x, _, _ = problem(n)
    kernel = RadialKernelLinearOperator(
        (x / stretch).to(dtype),
        torch.tensor(1.44, dtype=dtype),
        function=MATERN32,
        products=KernelProducts(tile_size=32),
    )
    return NoisyLinearOperator(kernel, torch.full((n,), 0.04, dtype=dtype))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factor_is_below_the_kernel_and_near_it(name: str, dtype: torch.dtype) -> None:
    operator = radial(120, dtype)
    built = RECIPES[name].build(operator)
    assert built.factor.dtype == built.diagonal.dtype == dtype
    factor, kernel = built.factor.double(), operator.kernel.to_dense().double()
    values = torch.linalg.eigvalsh(kernel - factor @ factor.mT)
    assert values[0] > (-1e-4 if dtype == torch.float32 else -1e-8)
    assert torch.equal(built.diagonal, operator.noise)
    # Not far from the best factor of this rank.
    best = torch.linalg.eigvalsh(kernel)[: -built.rank].sum()
    assert (kernel - factor @ factor.mT).trace() < 3 * best


@pytest.mark.parametrize("name", RECIPES)
def test_same_generator_same_factor(name: str) -> None:
    recipe, operator = RECIPES[name], radial(120)
    first, again, other = (
        recipe.build(operator, generator=torch.Generator().manual_seed(seed)).factor for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(recipe.build(operator).factor, recipe.build(operator).factor)  # seed 0 where there is none


@pytest.mark.parametrize("name", RECIPES)
def test_any_positive_definite_operator(name: str) -> None:
    recipe = RECIPES[name]
    x = problem(36)[0]
    operators = {
        "dense": DenseLinearOperator(problem(36)[1]),
        "Toeplitz": ToeplitzLinearOperator(torch.exp(-0.5 * torch.arange(36).double())).add_jitter(0.5),
        "batch": system(36).expand(2, 3, 36, 36),
        "generic": NoisyLinearOperator(_generic(x), torch.full((36,), 0.1).double()),
    }
    for kind, operator in operators.items():
        rhs = torch.cos(torch.arange(36).double()).expand(operator.shape[:-1]).unsqueeze(-1).contiguous()
        built = recipe.build(operator)
        torch.testing.assert_close(low_rank_plus_diagonal(built, built.solve(rhs)), rhs)
        solution = ConjugateGradients(preconditioner=recipe, tolerance=1e-8).solve(operator, rhs)
        assert solution.status is SolveStatus.CONVERGED, kind
        torch.testing.assert_close(solution.value, torch.linalg.solve(operator.to_dense(), rhs), atol=1e-5, rtol=1e-5)


def _generic(x: Tensor) -> GenericKernelLinearOperator:
    kernel = gpytorch.kernels.MaternKernel(nu=1.5).double()
    named = dict(kernel.named_parameters())
    return GenericKernelLinearOperator(x, *named.values(), kernel=kernel, names=tuple(named))


def _sequence_probability(kernel: Tensor, pivots: tuple[int, ...]) -> float:
    """Of drawing these pivots one after the other, each in proportion to the diagonal that is left."""
    rest, probability = kernel.clone(), 1.0
    for pivot in pivots:
        probability *= float(rest[pivot, pivot] / rest.trace())
        column = rest[:, pivot] / rest[pivot, pivot].sqrt()
        rest = rest - torch.outer(column, column)
    return probability


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [3, 8])
def test_blocks_draw_pivots_as_one_by_one(block_size: int) -> None:
    operator = NoisyLinearOperator(DenseLinearOperator(KERNEL_SMALL), torch.ones(4).double())
    recipe, generator = RandomlyPivotedCholesky(rank=2, block_size=block_size), torch.Generator().manual_seed(7)
    pairs = list(itertools.permutations(range(4), 2))
    truth = torch.tensor([_sequence_probability(KERNEL_SMALL, pair) for pair in pairs])
    assert truth.sum() == pytest.approx(1.0)
    drawn = [tuple(recipe.build(operator, generator=generator).pivots.tolist()) for _ in range(1500)]
    hits = torch.tensor([[float(pair == other) for other in pairs] for pair in drawn])
    assert_mean_within(hits, truth, max_sem=0.0135, floor=0.002)


def test_given_pivots_make_the_same_factor_and_a_smooth_one() -> None:
    operator = radial(120)
    recipe = RandomlyPivotedCholesky(rank=20)
    drawn = recipe.build(operator)
    again = recipe.build(operator, choices={"pivots": drawn.pivots})
    torch.testing.assert_close(again.factor @ again.factor.mT, drawn.factor @ drawn.factor.mT, atol=1e-7, rtol=1e-7)
    assert torch.equal(PivotedCholesky(rank=20).build(operator, choices={"pivots": drawn.pivots}).factor, again.factor)
    _assert_smooth(lambda stretch: recipe.build(radial(120, stretch=stretch), choices={"pivots": drawn.pivots}).factor)


def _assert_smooth(factor_at) -> None:
    """Central differences of two widths agree: no jump lies between them."""
    wide, narrow = ((factor_at(1 + h) - factor_at(1 - h)) / (2 * h) for h in (1e-3, 5e-4))
    assert (wide - narrow).norm() < 1e-3 * narrow.norm()


def test_nystrom_is_the_dense_formula() -> None:
    operator = radial(60)
    built = Nystrom(rank=12).build(operator)
    drawn = torch.randn(60, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel, test = operator.kernel.to_dense(), torch.linalg.qr(drawn).Q
    expected = kernel @ test @ torch.linalg.solve(test.mT @ kernel @ test, test.mT @ kernel)
    torch.testing.assert_close(built.factor @ built.factor.mT, expected, atol=1e-7, rtol=1e-7)
    assert built.build_epochs == 1


def test_ranks_above_n_are_clamped() -> None:
    operator = radial(30)
    for recipe in (RandomlyPivotedCholesky(rank=50), Nystrom(rank=50)):
        built = recipe.build(operator)
        assert built.rank == 30
        torch.testing.assert_close(built.logdet(), torch.logdet(operator.to_dense()), rtol=1e-6, atol=1e-6)


def test_duplicate_rows_stop_the_random_factor_early() -> None:
    x = torch.linspace(-1, 1, 5).double().repeat(8)
    kernel = torch.exp(-(x[:, None] - x[None]).square())
    operator = NoisyLinearOperator(DenseLinearOperator(kernel), torch.ones(40).double())
    built = RandomlyPivotedCholesky(rank=20).build(operator)
    assert built.rank == 5
    assert x[built.pivots].unique().shape == (5,)


def test_whole_kernel_is_never_formed() -> None:
    operator, formed = watched(problem(60, noise=0.0)[1])
    built = RandomlyPivotedCholesky(rank=7).build(operator)
    assert sum(rows for rows, _ in formed) == built.rank == 7
    assert all(columns == 60 for _, columns in formed)


@pytest.mark.parametrize("name", RECIPES)
def test_series_take_every_recipe(name: str) -> None:
    operator, rhs = radial(60), problem(60)[2]
    recipe = RECIPES[name]
    solution = russian_roulette_solve(
        operator, rhs, ExponentialTruncation(min_steps=40, rate=0.05), preconditioner=recipe
    )
    torch.testing.assert_close(solution.value, torch.linalg.solve(operator.to_dense(), rhs), atol=1e-4, rtol=1e-4)
    generator = torch.Generator().manual_seed(0)
    assert solution.stats.overhead == pytest.approx(1 + recipe.build(operator, generator=generator).build_epochs)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_not_finite(name: str) -> None:
    matrix = problem(40, noise=0.0)[1]
    matrix[5, 7] = matrix[7, 5] = matrix[3, 3] = torch.nan
    operator = NoisyLinearOperator(DenseLinearOperator(matrix), torch.ones(40).double())
    with pytest.raises(NonFiniteError):
        RECIPES[name].build(operator)


def test_bad_options() -> None:
    for recipe in (RandomlyPivotedCholesky, Nystrom):
        with pytest.raises(ValueError, match="rank"):
            recipe(rank=0)
    with pytest.raises(ValueError, match="block_size"):
        RandomlyPivotedCholesky(block_size=0)
    with pytest.raises(TypeError, match="preconditioner"):
        ConjugateGradients(preconditioner=Nystrom)

"""Kernels with few features: their exact factors against dense algebra."""

import pytest
import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.cholesky import CholeskyFactor
from gpy_iterative.linear_solvers.low_rank import LowRankFactor, low_rank_parts
from gpy_iterative.solvers import Cholesky, SolveStatus, default_solver

N = 40


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def system(batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> NoisyLinearOperator:
    """A sum of multiples of roots, and a diagonal."""
    first, second, constant = drawn(*batch, N, 5), drawn(N, 7), 0.5 + drawn(*batch, 1).square().squeeze(-1)
    terms = (
        ConstantMulLinearOperator(RootLinearOperator(first), constant),
        RootLinearOperator(second),
        ConstantMulLinearOperator(DiagLinearOperator(drawn(*batch, N).square()), 2 * constant),
    )
    noise = 0.1 + drawn(*batch, N).square()
    tensors = lambda operator: operator.representation_tree()(*(t.to(dtype) for t in operator.representation()))
    return NoisyLinearOperator(SumLinearOperator(*map(tensors, terms)), noise.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_factor(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    operator = system(batch, dtype)
    factor, rhs = Cholesky().factorize(operator), drawn(*batch, N, 4).to(dtype)
    assert isinstance(factor, LowRankFactor)
    dense = operator.to_dense().double()
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    assert factor.solve(rhs).dtype == factor.logdet().dtype == dtype
    torch.testing.assert_close(factor.solve(rhs).double(), torch.linalg.solve(dense, rhs.double()), **tolerance)
    torch.testing.assert_close(factor.logdet().double(), torch.logdet(dense), **tolerance)
    explained = factor.factor @ drawn(*batch, 12, 4)
    white = factor.basis().mT @ explained
    expected = explained.mT @ torch.linalg.solve(dense, explained)
    torch.testing.assert_close(white.mT @ white, expected, **tolerance)
    assert Cholesky().solve(operator, rhs).status is SolveStatus.CONVERGED


def test_what_features_explain_cancels_nowhere() -> None:
    """Prior variances 1e12 times the noise, whose posterior variance a difference of two of that size would lose."""
    root, noise = 1e6 * drawn(N, 3), torch.ones(N, dtype=torch.float64)
    factor = LowRankFactor(root, noise)
    white = factor.basis().mT @ (root @ drawn(3, 3))
    gram = torch.eye(3, dtype=torch.float64) + root.mT @ root
    explained = drawn(3, 3).mT @ (root.mT @ root) @ torch.linalg.solve(gram, drawn(3, 3))
    torch.testing.assert_close(white.mT @ white, explained, rtol=1e-10, atol=0)


def test_a_trend_in_years_is_solved_for() -> None:
    """Features are 1e12 times the noise, together: without refinement a residual of .08 was left."""
    years = torch.linspace(2000, 2020, 2000, dtype=torch.float64)
    root = torch.stack([torch.ones_like(years), years, years.flip(0)], dim=-1)
    operator = NoisyLinearOperator(RootLinearOperator(root), torch.full_like(years, 1e-2))
    solution = Cholesky().solve(operator, years.sin().unsqueeze(-1))
    assert solution.status is SolveStatus.CONVERGED


def test_score() -> None:
    operator, y = system(), drawn(N)
    parts = low_rank_parts(operator)
    assert parts is not None
    root, noise = (part.detach().requires_grad_() for part in parts)
    covariance = root @ root.mT + noise.diag()
    density = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(y)
    expected = torch.autograd.grad(density, [root, noise])
    factor = LowRankFactor(root, noise)
    torch.testing.assert_close(factor.score(factor.solve(y.unsqueeze(-1))), expected)


def test_a_system_of_few_features_is_solved_exactly_at_any_size() -> None:
    operator = NoisyLinearOperator(RootLinearOperator(torch.ones(5000, 2)), torch.ones(5000))
    assert isinstance(default_solver(operator), Cholesky)


@pytest.mark.parametrize(
    "kernel",
    [
        RootLinearOperator(drawn(N, N // 2 + 1)),  # dense algebra is as fast
        DenseLinearOperator(drawn(N, 3) @ drawn(N, 3).mT),
        SumLinearOperator(RootLinearOperator(drawn(N, 3)), DenseLinearOperator(torch.eye(N, dtype=torch.float64))),
        DiagLinearOperator(torch.ones(N, dtype=torch.float64)),
    ],
)
def test_other_systems_have_a_dense_factor(kernel: LinearOperator) -> None:
    operator = NoisyLinearOperator(kernel, torch.ones(N, dtype=torch.float64))
    assert low_rank_parts(operator) is None
    assert isinstance(Cholesky().factorize(operator), CholeskyFactor)


@pytest.mark.parametrize(("root", "noise"), [(torch.nan, 1.0), (torch.inf, 1.0), (1.0, torch.nan), (1.0, 0.0)])
def test_what_has_no_factor(root: float, noise: float) -> None:
    operator = NoisyLinearOperator(RootLinearOperator(torch.full((N, 2), root)), torch.full((N,), noise))
    with pytest.raises(NonFiniteError, match="check data, hyperparameters and noise"):
        Cholesky().factorize(operator)

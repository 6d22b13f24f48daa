"""Preconditioners where the noise of tasks is correlated."""

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.preconditioners import LowRankPlusVecchia, Nystrom, PivotedCholesky, RandomlyPivotedCholesky
from gpy_iterative.preconditioners.task_noise import WhitenedTasks, build_whitened, of_independent_noise
from gpy_iterative.solvers import ConjugateGradients
from tests.exact.gaussian_models import MultitaskRegression

POINTS, TASKS = 40, 3


def kernel(scale: float) -> Tensor:
    x = torch.rand(POINTS, 2, generator=torch.Generator().manual_seed(0)).double()
    return torch.exp(-torch.cdist(x, x).square() / (2 * scale**2))


def of_tasks(seed: int, least: float) -> Tensor:
    root = torch.randn(TASKS, TASKS, generator=torch.Generator().manual_seed(seed)).double()
    return root @ root.mT + least * torch.eye(TASKS).double()


def system(noise: Tensor | None = None, num_kernels: int = 1, variance: float = 1.0) -> LinearOperator:
    noise = of_tasks(9, 0.05) / 50 if noise is None else noise
    terms = [
        KroneckerLinearOperator(
            DenseLinearOperator(kernel(0.3 + 0.4 * number)), DenseLinearOperator(of_tasks(number, 0.1))
        )
        for number in range(num_kernels)
    ]
    identity = ConstantDiagLinearOperator(torch.tensor([variance]).double(), diag_shape=POINTS)
    total = terms[0] if num_kernels == 1 else SumLinearOperator(*terms)
    return SumLinearOperator(total, KroneckerLinearOperator(identity, DenseLinearOperator(noise)))


def built(rank: int = 30, **options: int) -> WhitenedTasks:
    found = build_whitened(PivotedCholesky(rank=rank).build, system(**options))
    assert isinstance(found, WhitenedTasks)
    return found


@pytest.mark.parametrize("options", [{}, {"num_kernels": 2}, {"variance": 3.0}])
def test_the_whitened_system_has_noise_of_one(options: dict[str, float]) -> None:
    operator = system(**options)
    noisy = of_independent_noise(operator)
    assert noisy is not None
    assert torch.equal(noisy.noise, torch.ones(POINTS * TASKS).double())
    root = torch.block_diag(*[built(**options).root] * POINTS)
    torch.testing.assert_close(root @ noisy.to_dense() @ root.mT, operator.to_dense())


def test_multiples() -> None:
    kernel, noise = system().linear_ops
    scaled = of_independent_noise(
        SumLinearOperator(ConstantMulLinearOperator(kernel, torch.tensor(3.0).double()), noise)
    )
    plain = of_independent_noise(system())
    assert scaled is not None
    assert plain is not None
    torch.testing.assert_close(scaled.kernel.to_dense(), 3 * plain.kernel.to_dense())


def test_it_is_a_low_rank_plus_the_noise() -> None:
    found, noise = built(), of_tasks(9, 0.05) / 50
    root = torch.block_diag(*[found.root] * POINTS)
    factor = root @ found.inner.factor
    matrix = factor @ factor.mT + torch.block_diag(*[noise] * POINTS)
    rhs = torch.cos(torch.arange(2.0 * POINTS * TASKS)).double().view(-1, 2)
    torch.testing.assert_close(found.solve(rhs), torch.linalg.solve(matrix, rhs))
    torch.testing.assert_close(found.logdet(), torch.linalg.slogdet(matrix).logabsdet)
    vectors, dual = found.sample(torch.eye(found.num_signs).double())
    torch.testing.assert_close(vectors @ vectors.mT, matrix)
    torch.testing.assert_close(dual, torch.linalg.solve(matrix, vectors))


def test_conversions_and_members() -> None:
    found, rhs = built(), torch.ones(POINTS * TASKS, 1).double()
    torch.testing.assert_close(
        found.to(torch.float32).solve(rhs.float()).double(), found.solve(rhs), rtol=1e-3, atol=1e-3
    )
    batch = build_whitened(PivotedCholesky(rank=30).build, system().expand(2, POINTS * TASKS, POINTS * TASKS))
    assert batch.solve(rhs.expand(2, -1, 1)).shape == (2, POINTS * TASKS, 1)
    torch.testing.assert_close(batch[1].solve(rhs), found.solve(rhs))


@pytest.mark.parametrize(
    "recipe", [PivotedCholesky(30), RandomlyPivotedCholesky(30), Nystrom(30), LowRankPlusVecchia(rank=30)]
)
def test_conjugate_gradients_take_few_iterations(recipe: gpi.preconditioners.PreconditionerRecipe) -> None:
    operator, rhs = system(), torch.cos(torch.arange(1.0 * POINTS * TASKS)).double()
    solution = ConjugateGradients(preconditioner=recipe, tolerance=1e-8).solve(operator, rhs)
    torch.testing.assert_close(solution.value, torch.linalg.solve(operator.to_dense(), rhs), rtol=1e-5, atol=1e-5)
    without = ConjugateGradients(preconditioner=recipe, tolerance=1e-8).solve(
        DenseLinearOperator(operator.to_dense()), rhs
    )
    assert solution.stats.iterations < 0.6 * without.stats.iterations


@pytest.mark.parametrize(
    "operator",
    [
        DenseLinearOperator(kernel(0.3)),
        SumLinearOperator(DenseLinearOperator(kernel(0.3)), DenseLinearOperator(kernel(0.7))),
        system(noise=torch.ones(TASKS, TASKS).double()),
        SumLinearOperator(*system(num_kernels=2).linear_ops[0].linear_ops),
        NoisyLinearOperator(DenseLinearOperator(kernel(0.3)), torch.ones(POINTS).double()),
        SumLinearOperator(
            KroneckerLinearOperator(
                DenseLinearOperator(torch.eye(20).double()), DenseLinearOperator(torch.eye(2 * TASKS).double())
            ),
            system().linear_ops[1],
        ),
    ],
    ids=["a matrix", "a sum", "singular noise", "no noise", "independent noise", "other factors"],
)
def test_other_systems(operator: LinearOperator) -> None:
    assert of_independent_noise(operator) is (operator if isinstance(operator, NoisyLinearOperator) else None)
    recipe = PivotedCholesky(rank=5)
    assert not isinstance(build_whitened(recipe.build, operator), WhitenedTasks)


@pytest.mark.parametrize("solver", [ConjugateGradients(), gpi.solvers.AlternatingProjections(block_size=101)])
def test_values_of_a_multitask_model_are_precise(solver: gpi.solvers.Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported standard error was twenty times as large."""
    monkeypatch.setattr(torch, "sparse_coo_tensor", None)  # torch would warn of it
    g = torch.Generator().manual_seed(0)
    x = torch.rand(300, 1, generator=g).double()
    noise = torch.randn(300, 2, generator=g).double() @ torch.tensor([[0.3, 0.25], [0.0, 0.1]]).double()
    y = torch.cat([torch.sin(6 * x), torch.cos(5 * x)], dim=-1) + noise
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, rank=1)
    model = MultitaskRegression(x, y, likelihood).double()
    likelihood.task_noise_covar_factor.data = torch.tensor([[0.3], [0.25]]).double()
    likelihood.noise = 0.01
    exact = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=gpi.solvers.Cholesky())(model(x), y)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver, generator=0)
    value = mll(model(x), y)
    assert mll.report is not None
    assert (value - exact).abs() <= 4 * mll.report.value_sem
    assert mll.report.value_sem < 0.003

"""The inverse as columns: exact on its subspace, unbiased on the rest, never a negative variance."""

import pytest
import torch
from linear_operator import to_linear_operator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.prediction.inverse_factor import InverseFactor, InverseFactorRecipe, exact_inverse_factor
from gpy_iterative.solvers import Cholesky
from tests.monte_carlo import assert_mean_within
from tests.oracles import problem

N, T = 60, 8
NOISE = 0.04


def system() -> tuple[NoisyLinearOperator, Tensor, Tensor]:
    """H [n, n], and k_x of T further points, with their prior covariance."""
    _, joint, _ = problem(N + T, noise=NOISE)
    kernel = joint - NOISE * torch.eye(N + T, dtype=torch.float64)
    operator = NoisyLinearOperator(to_linear_operator(kernel[:N, :N]), torch.full((N,), NOISE, dtype=torch.float64))
    return operator, kernel[N:, :N], kernel[N:, N:]


def exact_covariance(operator: NoisyLinearOperator, cross: Tensor, prior: Tensor) -> Tensor:
    return prior - cross @ torch.linalg.solve(operator.to_dense(), cross.mT)


def build(rank: int, num_samples: int, seed: int = 0, tolerance: float = 1e-8) -> InverseFactor:
    recipe = InverseFactorRecipe(rank=rank, num_samples=num_samples, tolerance=tolerance)
    return recipe.build(system()[0], torch.Generator().manual_seed(seed))[0]


def test_cholesky_is_exact() -> None:
    operator, cross, prior = system()
    factor = exact_inverse_factor(Cholesky().factorize(operator))
    inverse = factor.columns @ factor.columns.mT
    torch.testing.assert_close(inverse, torch.linalg.inv(operator.to_dense()))
    projections = cross @ factor.columns
    wanted = exact_covariance(operator, cross, prior)
    torch.testing.assert_close(factor.covariance(prior, projections), wanted)
    torch.testing.assert_close(factor.variance(prior.diagonal(), projections), wanted.diagonal())


@pytest.mark.parametrize("rank", [1, 10, 40])
def test_basis_is_the_inverse_on_its_subspace(rank: int) -> None:
    operator, _, _ = system()
    basis = build(rank, 1).columns[:, :rank]
    dense = operator.to_dense()
    torch.testing.assert_close(basis.mT @ dense @ basis, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rank", [1, 10, 40])
def test_rest_is_unbiased(rank: int) -> None:
    operator, cross, _ = system()
    samples = 4000
    columns = build(rank, samples).columns
    basis, left, right = columns.split([rank, samples, samples], dim=-1)
    rest = (cross @ torch.linalg.solve(operator.to_dense(), cross.mT)).diagonal() - (cross @ basis).square().sum(-1)
    draws = samples * ((cross @ left) * (cross @ right)).mT
    assert (draws.mean(0) - rest).abs().max() > 0
    # Signs have less noise than normal numbers, whose standard error would be sqrt(2 / s) of the rest at the least.
    assert_mean_within(draws, rest, max_sem=0.05 * float(rest.max()))


def test_complete_subspace_leaves_nothing() -> None:
    operator, cross, prior = system()
    factor = build(500, 3)
    projections = cross @ factor.columns
    wanted = exact_covariance(operator, cross, prior)
    torch.testing.assert_close(factor.covariance(prior, projections), wanted)
    torch.testing.assert_close(factor.variance(prior.diagonal(), projections), wanted.diagonal())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rank", [1, 20])
def test_covariance_is_semi_definite_however_noisy(rank: int, seed: int) -> None:
    """One probe: the estimate of the rest is as wild as it gets."""
    operator, cross, prior = system()
    factor = build(rank, 1, seed)
    projections = cross @ factor.columns
    covariance = factor.covariance(prior, projections)
    variance = factor.variance(prior.diagonal(), projections)
    assert torch.linalg.eigvalsh(covariance).min() > -1e-10
    torch.testing.assert_close(covariance.diagonal(), variance)
    subspace = prior.diagonal() - projections[:, :rank].square().sum(-1)
    assert (variance > 0).all()
    assert (variance <= subspace).all()
    assert (subspace >= exact_covariance(operator, cross, prior).diagonal() - 1e-12).all()


def test_tolerance_hardly_matters() -> None:
    """Solving to 0.1 moves variances by less than the probes' own noise."""
    operator, cross, prior = system()
    truth = exact_covariance(operator, cross, prior).diagonal()
    errors = []
    for tolerance in (0.1, 1e-8):
        factor = build(20, 128, tolerance=tolerance)
        errors.append((factor.variance(prior.diagonal(), cross @ factor.columns) / truth).log())
    noise = errors[1].abs().median()
    assert (errors[0] - errors[1]).abs().median() < 0.5 * noise


def test_batches_and_early_stops() -> None:
    """Members of different numerical rank share one list of columns."""
    operator, cross, prior = system()
    twins = operator.kernel.to_dense().clone()
    twins[1:] = twins[:1]
    twins[:, 1:] = twins[:, :1]  # one point, sixty times: rank one
    batch = NoisyLinearOperator(
        to_linear_operator(torch.stack([operator.kernel.to_dense(), twins])), operator.noise.expand(2, N)
    )
    factor, solutions = InverseFactorRecipe(rank=100, num_samples=2).build(batch, torch.Generator().manual_seed(0))
    assert len(solutions) == 2
    projections = cross @ factor.columns
    variance = factor.variance(prior.diagonal().expand(2, T), projections)
    torch.testing.assert_close(variance[0], exact_covariance(operator, cross, prior).diagonal())
    inverse = torch.linalg.inv(twins + NOISE * torch.eye(N, dtype=torch.float64))
    basis, left, right = factor.columns[1].split([factor.rank, 2, 2], dim=-1)
    ours = basis @ basis.mT + 0.5 * (left @ right.mT + right @ left.mT)
    constant = twins[:1]
    torch.testing.assert_close(constant @ ours @ constant.mT, constant @ inverse @ constant.mT)


def test_float32() -> None:
    operator, cross, prior = system()
    single = NoisyLinearOperator(to_linear_operator(operator.kernel.to_dense().float()), operator.noise.float())
    recipe = InverseFactorRecipe(rank=100, num_samples=2)
    factor, _ = recipe.build(single, torch.Generator().manual_seed(0))
    assert factor.columns.dtype == torch.float32
    variance = factor.variance(prior.diagonal().float(), cross.float() @ factor.columns)
    truth = exact_covariance(operator, cross, prior).diagonal().float()
    torch.testing.assert_close(variance, truth, rtol=1e-3, atol=1e-5)

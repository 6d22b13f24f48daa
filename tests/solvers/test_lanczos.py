"""The log-determinant's estimate is unbiased, and its standard error honest."""

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import RBF
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky
from gpy_iterative.solvers import QuadratureShares, stochastic_logdet
from tests import oracles
from tests.monte_carlo import assert_mean_within
from tests.solvers.contract import N, system


def draw(preconditioner: LowRankPlusDiagonal, count: int, generator: torch.Generator) -> Tensor:
    size, dtype = preconditioner.factor.shape[-2], preconditioner.factor.dtype
    base = torch.randint(0, 2, (preconditioner.rank + size, count), generator=generator).to(dtype) * 2 - 1
    return preconditioner.sample(base[:-size], base[-size:])


@pytest.mark.parametrize("rank", [1, 20])
@pytest.mark.parametrize("corrected", [False, True])
def test_mean_and_error(rank: int, corrected: bool) -> None:
    operator = system()
    preconditioner = PivotedCholesky(rank=rank).build(operator, correct_diagonal=corrected)
    generator = torch.Generator().manual_seed(0)
    estimates = [
        stochastic_logdet(
            operator, draw(preconditioner, 4, generator), preconditioner, max_iterations=60, tolerance=1e-9
        )
        for _ in range(200)
    ]
    means = torch.stack([estimate.mean for estimate in estimates])
    assert_mean_within(means, torch.logdet(operator.to_dense()), max_sem=1.0)
    ratio = torch.stack([estimate.sem for estimate in estimates]).square().mean().sqrt() / means.std()
    assert 0.75 < ratio < 1.3


def test_early_stop_stays_within_the_error() -> None:
    operator = system()
    preconditioner = PivotedCholesky(rank=20).build(operator, correct_diagonal=True)
    probes = draw(preconditioner, 4, torch.Generator().manual_seed(0))
    early = stochastic_logdet(operator, probes, preconditioner)
    full = stochastic_logdet(operator, probes, preconditioner, max_iterations=N, tolerance=1e-12)
    assert 0 < (early.mean - full.mean).abs() < 2 * early.sem


class Counting(NoisyLinearOperator):
    """Counts its products."""

    products = 0

    def _matmul(self, rhs: Tensor) -> Tensor:
        self.products += 1
        return super()._matmul(rhs)


def similar_systems() -> tuple[NoisyLinearOperator, NoisyLinearOperator, LowRankPlusDiagonal]:
    """A system, the same one some training steps later, and the later one's preconditioner."""
    x, _, _ = oracles.problem(300)
    systems = [
        NoisyLinearOperator(
            RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).double(), function=RBF),
            torch.full((300,), noise).double(),
        )
        for lengthscale, noise in ((0.3, 0.02), (0.31, 0.019))
    ]
    return systems[0], systems[1], PivotedCholesky(rank=20).build(systems[1])


def test_shares_of_an_earlier_step_save_products() -> None:
    before, after, preconditioner = similar_systems()
    old = PivotedCholesky(rank=20).build(before)
    generator = torch.Generator().manual_seed(0)
    learned = stochastic_logdet(before, draw(old, 32, generator), old)
    probes = draw(preconditioner, 32, generator)
    truth = stochastic_logdet(after, probes, preconditioner, max_iterations=40, tolerance=1e-12)
    counts = {}
    for name, shares in (("without", None), ("with", learned.shares)):
        operator = Counting(after.kernel, after.noise)
        estimate = stochastic_logdet(operator, probes, preconditioner, shares=shares)
        counts[name] = operator.products
        assert (estimate.mean - truth.mean).abs() < 2 * estimate.sem
    assert learned.shares.values.dim() == 1
    assert counts["with"] <= counts["without"] - 2


def test_worn_shares_are_learned_anew() -> None:
    before, after, preconditioner = similar_systems()
    old, generator = PivotedCholesky(rank=20).build(before), torch.Generator().manual_seed(0)
    options = {"tolerance": 3e-4, "max_iterations": 30}
    learned = stochastic_logdet(before, draw(old, 32, generator), old, **options).shares
    probes = draw(preconditioner, 32, generator)
    shares, surplus = learned, 0
    while not shares.are_worn:
        assert torch.equal(shares.values, learned.values)
        operator = Counting(after.kernel, after.noise)
        shares = stochastic_logdet(operator, probes, preconditioner, shares=shares, **options).shares
        assert 2 < operator.products < 10
        surplus += operator.products - 2
        assert int(shares.surplus) == surplus
    assert surplus >= len(learned.values) - 2
    anew = stochastic_logdet(after, probes, preconditioner, shares=shares, **options).shares
    fresh = stochastic_logdet(after, probes, preconditioner, **options).shares
    assert torch.equal(anew.values, fresh.values)
    assert not anew.are_worn


def test_the_first_product_may_be_given() -> None:
    _, after, preconditioner = similar_systems()
    probes = draw(preconditioner, 8, torch.Generator().manual_seed(0))
    plain, given = Counting(after.kernel, after.noise), Counting(after.kernel, after.noise)
    expected = stochastic_logdet(plain, probes, preconditioner)
    image = after.to_dense() @ preconditioner.solve(probes)
    found = stochastic_logdet(given, probes, preconditioner, first_image=image)
    assert given.products == plain.products - 1
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.sem, expected.sem)


@pytest.mark.parametrize("moved", [-0.2, 0.2])
def test_shares_that_no_longer_hold_are_found_out(moved: float) -> None:
    """Trusted to the end, they would make an error of about nine standard errors at the second iteration."""
    _, operator, preconditioner = similar_systems()
    probes = draw(preconditioner, 32, torch.Generator().manual_seed(0))
    truth = stochastic_logdet(operator, probes, preconditioner, max_iterations=40, tolerance=1e-12)
    shares = QuadratureShares(truth.shares.values + moved, torch.tensor(0))
    misled = stochastic_logdet(operator, probes, preconditioner, shares=shares)
    assert (misled.mean - truth.mean).abs() < 2 * misled.sem
    tight = stochastic_logdet(operator, probes, preconditioner, max_iterations=40, tolerance=1e-9, shares=shares)
    torch.testing.assert_close(tight.mean, truth.mean, rtol=1e-6, atol=1e-5)
    one = QuadratureShares(shares.values[:1], torch.tensor(0))
    anew = stochastic_logdet(operator, probes, preconditioner, shares=one).shares.values
    assert len(anew) > 2
    assert (anew - truth.shares.values[: len(anew)])[:2].abs().max() < 0.05


@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_an_operator_whose_floor_is_unknown(noise: float) -> None:
    operator = system(noise)
    preconditioner = PivotedCholesky(rank=20).build(operator)
    probes = draw(preconditioner, 4, torch.Generator().manual_seed(0))
    full = stochastic_logdet(operator, probes, preconditioner, max_iterations=N, tolerance=1e-12)
    dense = DenseLinearOperator(operator.to_dense())
    estimate = stochastic_logdet(dense, probes, preconditioner)
    assert (estimate.mean - full.mean).abs() < 2 * estimate.sem


def test_full_rank_preconditioner_leaves_nothing_to_estimate() -> None:
    operator = system()
    preconditioner = PivotedCholesky(rank=N).build(operator)
    probes = preconditioner.sample(torch.ones(preconditioner.rank, 2).double(), torch.ones(N, 2).double())
    estimate = stochastic_logdet(operator, probes, preconditioner)
    torch.testing.assert_close(estimate.mean, torch.logdet(operator.to_dense()), rtol=1e-6, atol=1e-6)
    assert estimate.sem < 1e-6


def test_members_of_a_batch() -> None:
    single = system()
    operator = single.expand(2, N, N)
    preconditioner = PivotedCholesky(rank=10).build(operator)
    probes = draw(preconditioner[0], 4, torch.Generator().manual_seed(0)).expand(2, N, 4)
    batched = stochastic_logdet(operator, probes, preconditioner)
    alone = stochastic_logdet(single, probes[0], preconditioner[0])
    torch.testing.assert_close(batched.mean, alone.mean.expand(2))
    torch.testing.assert_close(batched.sem, alone.sem.expand(2))


def test_rounding_in_float32_does_not_run_wild() -> None:
    # The largest eigenvalue times the rounding of float32 is above the noise: Ritz values come out negative.
    x, _, _ = oracles.problem(300)
    kernel = RadialKernelLinearOperator(x.float(), torch.tensor(100.0), function=RBF)
    operator = NoisyLinearOperator(kernel, torch.full((300,), 1e-3))
    dense = 100 * torch.exp(-0.5 * torch.cdist(x, x).square()) + 1e-3 * torch.eye(300).double()
    preconditioner = PivotedCholesky(rank=20).build(operator, correct_diagonal=True)
    probes = draw(preconditioner, 8, torch.Generator().manual_seed(0))
    estimate = stochastic_logdet(operator, probes, preconditioner)
    assert estimate.sem < 250  # of -264; logarithms of negative Ritz values, cut off at zero, give -4000
    assert (estimate.mean - torch.logdet(dense)).abs() < 2 * estimate.sem

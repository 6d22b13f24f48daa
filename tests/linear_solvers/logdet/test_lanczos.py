"""The log-determinant's estimate is unbiased, and its standard error honest."""

from dataclasses import replace
from typing import Any

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN12, RBF
from gpy_iterative.linear_solvers.logdet import lanczos
from gpy_iterative.linear_solvers.logdet.lanczos import (
    CHANGE_PARTS,
    FALL,
    FIRST_LIFE,
    Bounds,
    BracketPositions,
    LogDeterminant,
    LogDeterminantQuadrature,
)
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky, Vecchia
from gpy_iterative.solvers import ConjugateGradients
from tests import oracles
from tests.exact.gaussian_models import Regression
from tests.linear_solvers.contract import N, system
from tests.monte_carlo import assert_mean_within


def log_determinant(
    operator: LinearOperator,
    probes: Tensor,
    preconditioner: LowRankPlusDiagonal,
    *,
    tolerance: float | None = None,
    **options: Any,
) -> LogDeterminant:
    """With a quadrature to a tolerance per datum, if given."""
    with pytest.MonkeyPatch.context() as patch:
        if tolerance is not None:
            patch.setattr(lanczos, "WORTH_OF_ERROR", 0.0)
            patch.setattr(lanczos, "RESOLUTION", tolerance)
        return LogDeterminantQuadrature(operator, probes, preconditioner, **options).finished()


def draw(preconditioner: LowRankPlusDiagonal, count: int, generator: torch.Generator) -> Tensor:
    size, dtype = preconditioner.factor.shape[-2], preconditioner.factor.dtype
    base = torch.randint(0, 2, (preconditioner.rank + size, count), generator=generator).to(dtype) * 2 - 1
    return preconditioner.sample(base)[0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 20])
@pytest.mark.parametrize("corrected", [False, True])
def test_mean_and_error(rank: int, corrected: bool) -> None:
    operator = system()
    preconditioner = PivotedCholesky(rank=rank).build(operator, correct_diagonal=corrected)
    generator = torch.Generator().manual_seed(0)
    probes = torch.stack([draw(preconditioner, 4, generator) for _ in range(200)])
    estimates = log_determinant(operator, probes, preconditioner, max_iterations=60, tolerance=1e-9)
    assert_mean_within(estimates.mean, torch.logdet(operator.to_dense()), max_sem=1.0)
    true = estimates.mean.std()
    assert 0.75 < estimates.sem.square().mean().sqrt() / true < 1.3
    assert estimates.sem.min() > 0.6 * true  # not of the few samples, which may agree by chance


def test_early_stop_stays_within_the_error() -> None:
    operator = system()
    preconditioner = PivotedCholesky(rank=20).build(operator, correct_diagonal=True)
    probes = draw(preconditioner, 4, torch.Generator().manual_seed(0))
    early = log_determinant(operator, probes, preconditioner)
    full = log_determinant(operator, probes, preconditioner, max_iterations=N, tolerance=1e-12)
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


def test_positions_of_an_earlier_step_save_products() -> None:
    before, after, preconditioner = similar_systems()
    old = PivotedCholesky(rank=20).build(before)
    generator = torch.Generator().manual_seed(0)
    learned = log_determinant(before, draw(old, 32, generator), old)
    probes = draw(preconditioner, 32, generator)
    truth = log_determinant(after, probes, preconditioner, max_iterations=40, tolerance=1e-12)
    counts = {}
    for name, positions in (("without", None), ("with", learned.positions)):
        operator = Counting(after.kernel, after.noise)
        estimate = log_determinant(operator, probes, preconditioner, positions=positions)
        counts[name] = operator.products
        assert (estimate.mean - truth.mean).abs() < 2 * estimate.sem
    assert counts["with"] <= counts["without"] - 2


def test_worn_positions_are_learned_again() -> None:
    before, after, preconditioner = similar_systems()
    old, generator = PivotedCholesky(rank=20).build(before), torch.Generator().manual_seed(0)
    options = {"tolerance": 3e-4, "max_iterations": 30}
    learned = log_determinant(before, draw(old, 32, generator), old, **options).positions
    probes = draw(preconditioner, 32, generator)
    positions, surplus, age = learned, 0, 0
    while not positions.are_worn:
        operator = Counting(after.kernel, after.noise)
        positions = log_determinant(operator, probes, preconditioner, positions=positions, **options).positions
        assert torch.equal(positions.values, learned.values)
        assert 2 < operator.products <= 10
        surplus, age = surplus + operator.products - 2, age + 1
        assert (int(positions.surplus), int(positions.age)) == (surplus, age)
    assert surplus >= learned.values.shape[-1] - 2 or age == learned.life
    again = log_determinant(after, probes, preconditioner, positions=positions, **options).positions
    fresh = log_determinant(after, probes, preconditioner, **options).positions
    assert torch.equal(again.values, fresh.values)
    assert not again.are_worn


def made_up(truth: float) -> tuple[list[Bounds], Tensor]:
    """Rules of three iterations for two probes, and what they converge to."""
    gaps = torch.tensor([8.0, 4.0, 2.0]).double()
    limit = torch.tensor([truth, truth + 1]).double()
    return [(limit + 0.6 * gap, limit - 0.4 * gap) for gap in gaps], limit


def test_drift_is_measured_on_the_positions_before() -> None:
    zero = torch.zeros(()).double()
    bounds, limit = made_up(10.0)
    first = BracketPositions.learned(bounds, limit, zero, None)
    torch.testing.assert_close(first.values, torch.full((2, 3), 0.4).double())
    assert not first.drift.any()
    assert int(first.life) == FIRST_LIFE
    assert first.estimate(bounds[:1]) is None
    samples, error = first.estimate(bounds[:2])
    torch.testing.assert_close(samples, limit)
    assert error < 1e-12

    # Positions of .5: errors of a tenth of the gaps, .8, .4 and .2, whose successors a correction takes for .46 of them.
    moved = [(limit + 0.5 * (upper - lower), limit - 0.5 * (upper - lower)) for upper, lower in bounds]
    left = [abs(gap / 20 - gap / 20 * FALL / (1 - FALL)) for gap in (8.0, 4.0)]
    samples, error = first.estimate(moved[:2])
    assert float((samples - limit).abs().max()) == pytest.approx(left[0])
    assert float(error) == pytest.approx(0.4 * FALL / (1 - FALL) / 4)
    second = BracketPositions.learned(moved, limit, zero, first.used(2).used(3))
    assert (int(second.life), int(second.age), int(second.surplus)) == (2 * 3, 0, 0)
    torch.testing.assert_close(second.drift, torch.tensor([0.0, *left]).double() / 3)
    # Without a correction the error is the drift times the age.
    aged = second.used(2).used(2)
    assert float(aged.estimate(moved[:2])[1]) == pytest.approx(left[0])
    assert float(aged.estimate(moved[:3])[1]) == pytest.approx(left[1])
    # Half of a drift is remembered where the next one happens to be nothing.
    third = BracketPositions.learned(moved, limit, zero, aged)
    torch.testing.assert_close(third.drift, second.drift / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "lengthscales", "noises", "seed"),
    [(20, (0.3, 0.6), (0.02, 0.004), 1), (5, (0.3, 1.2), (0.02, 0.002), 0)],
)
def test_values_along_a_training_run_are_as_good_as_they_say(
    rank: int, lengthscales: tuple[float, float], noises: tuple[float, float], seed: int
) -> None:
    """Positions that move so that two iterations agree on a wrong value: unmeasured, three to seven reported errors."""
    x, _, _ = oracles.problem(300)
    bits = torch.randint(0, 2, (rank + 300, 4), generator=torch.Generator().manual_seed(seed)).double()
    positions, ratios, products = None, [], 0
    for way in torch.linspace(0, 1, 40).double():
        lengthscale, noise = (low * (high / low) ** way for low, high in (lengthscales, noises))
        kernel = RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).double(), function=RBF)
        operator = Counting(kernel, noise.expand(300))
        preconditioner = PivotedCholesky(rank=rank).build(operator)
        probes = preconditioner.sample(2 * bits - 1)[0]
        truth = log_determinant(operator, probes, preconditioner, max_iterations=60, tolerance=1e-9)
        operator.products = 0
        estimate = log_determinant(operator, probes, preconditioner, positions=positions)
        positions, products = estimate.positions, products + operator.products
        ratios.append((estimate.mean - truth.mean) / estimate.sem)
    assert torch.stack(ratios).abs().max() < 2
    assert torch.stack(ratios).square().mean().sqrt() < 1
    assert products < 4.2 * 40


@pytest.mark.parametrize(("factor", "change"), [(1.0, 0.0), (10.0, 9.0), (0.1, 0.1)])
def test_positions_of_other_bounds_are_doubted(factor: float, change: float) -> None:
    """After a long step of a fit the bounds were 12 times wider, and the value 160 nats off with an error of 40."""
    bounds, limit = made_up(5.0)
    positions = BracketPositions.learned(bounds, limit, torch.zeros(()).double(), None)
    wider = [(limit + factor * (upper - limit), limit - factor * (limit - lower)) for upper, lower in bounds]
    found = positions.estimate(wider[:2])
    assert found is not None
    torch.testing.assert_close(found[0], limit)
    assert float(found[1]) == pytest.approx(change * 4.0 / CHANGE_PARTS, abs=1e-12)  # the second gap is 4


def test_a_short_budget_takes_the_better_estimate_and_says_so() -> None:
    """Three iterations know of a thorough run all that it knew; and of a crude one, how crude it was."""
    _, operator, preconditioner = similar_systems()
    probes = draw(preconditioner, 32, torch.Generator().manual_seed(0))
    thorough = log_determinant(operator, probes, preconditioner, max_iterations=40, tolerance=1e-12)
    short = {"max_iterations": 3, "tolerance": 1e-6}
    crude = log_determinant(operator, probes, preconditioner, **short)
    # Worn ones are asked at the last iteration only.
    worn = [replace(found.positions, age=found.positions.life) for found in (crude, thorough)]
    again, last = (log_determinant(operator, probes, preconditioner, positions=each, **short) for each in worn)
    known = log_determinant(operator, probes, preconditioner, positions=thorough.positions, **short)
    assert (crude.mean - thorough.mean).abs() > 1
    torch.testing.assert_close(known.mean, thorough.mean)
    torch.testing.assert_close(last.mean, thorough.mean)
    torch.testing.assert_close(known.positions.error, thorough.positions.error)
    torch.testing.assert_close(again.sem, crude.sem)
    assert crude.sem > known.sem + 0.1
    assert (int(known.positions.age), int(known.positions.surplus)) == (1, 0)


@pytest.mark.parametrize("moved", [-0.2, 0.2])
def test_positions_that_no_longer_hold_are_found_out(moved: float) -> None:
    """Trusted to the end, they would make an error of about nine standard errors at the second iteration."""
    _, operator, preconditioner = similar_systems()
    probes = draw(preconditioner, 32, torch.Generator().manual_seed(0))
    truth = log_determinant(operator, probes, preconditioner, max_iterations=40, tolerance=1e-12)
    positions = replace(truth.positions, values=truth.positions.values + moved)
    misled = log_determinant(operator, probes, preconditioner, positions=positions)
    assert (misled.mean - truth.mean).abs() < 2 * misled.sem
    tight = log_determinant(operator, probes, preconditioner, max_iterations=40, tolerance=1e-9, positions=positions)
    torch.testing.assert_close(tight.mean, truth.mean, rtol=1e-6, atol=1e-5)
    one = replace(positions, values=positions.values[..., :1])
    again = log_determinant(operator, probes, preconditioner, positions=one).positions.values
    assert again.shape[-1] > 2
    assert (again - truth.positions.values[..., : again.shape[-1]]).mean(-2)[:2].abs().max() < 0.05


@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_an_operator_whose_floor_is_unknown(noise: float) -> None:
    operator = system(noise)
    preconditioner = PivotedCholesky(rank=20).build(operator)
    probes = draw(preconditioner, 4, torch.Generator().manual_seed(0))
    full = log_determinant(operator, probes, preconditioner, max_iterations=N, tolerance=1e-12)
    dense = DenseLinearOperator(operator.to_dense())
    estimate = log_determinant(dense, probes, preconditioner)
    assert (estimate.mean - full.mean).abs() < 2 * estimate.sem


def test_the_quadratures_error_without_a_floor() -> None:
    """Noise that is correlated over two tasks, as in `MultitaskGaussianLikelihood(2, rank=1)`."""
    x = 4 * torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = (-torch.cdist(x, x).square() / 2).exp()
    tasks = torch.tensor([[1.0, -0.5], [-0.5, 1.2]]).double()
    noise = torch.tensor([[0.85, 0.6], [0.6, 0.55]]).double()
    operator = DenseLinearOperator(torch.kron(kernel, tasks) + torch.kron(torch.eye(200).double(), noise))
    preconditioner = PivotedCholesky(rank=50).build(operator)
    probes = draw(preconditioner, 4, torch.Generator().manual_seed(0))
    full = log_determinant(operator, probes, preconditioner, max_iterations=400, tolerance=1e-12)
    for products in range(4, 21):
        short = log_determinant(operator, probes, preconditioner, max_iterations=products, tolerance=1e-12)
        assert (short.mean - full.mean).abs() < 1.7 * short.positions.error


def test_the_quadratures_error_with_a_floor_far_below_the_spectrum() -> None:
    """Rough functions in many dimensions with little noise: the lower rule was near, the upper one moved slowly."""
    x = torch.rand(500, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = RadialKernelLinearOperator(x / 2, torch.tensor(1.0).double(), function=MATERN12)
    operator = NoisyLinearOperator(kernel, torch.full((500,), 1e-4).double())
    preconditioner = PivotedCholesky(rank=50).build(operator, correct_diagonal=False)
    probes = draw(preconditioner, 4, torch.Generator().manual_seed(0))
    full = log_determinant(operator, probes, preconditioner, max_iterations=100, tolerance=1e-9)
    for products in range(2, 12):
        short = log_determinant(operator, probes, preconditioner, max_iterations=products, tolerance=1e-12)
        assert (short.mean - full.mean).abs() < 2 * short.positions.error


@pytest.mark.slow
def test_values_where_the_mean_of_the_rules_turns() -> None:
    """Neighbours know little of a periodic term: the first two means agreed, far above the limit."""
    x = 10 * torch.rand(1000, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y, likelihood = torch.sin(2 * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood().double()
    near, periodic = gpytorch.kernels.MaternKernel(nu=1.5), gpytorch.kernels.PeriodicKernel()
    near.lengthscale, periodic.lengthscale, periodic.period_length, likelihood.noise = 3.0, 0.7, 2.0, 0.1
    kernel = (gpytorch.kernels.ScaleKernel(near) + gpytorch.kernels.ScaleKernel(periodic)).double()
    model = Regression(x, y, likelihood, kernel).double()
    solver = ConjugateGradients(preconditioner=Vecchia(30))
    errors = []
    with torch.no_grad():
        exact = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
        for seed in range(4):
            mll = HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver, generator=seed)
            errors.append((mll(model(x), y) - exact) / mll.report.value_sem)
    assert torch.stack(errors).square().mean().sqrt() < 2


def test_full_rank_preconditioner_leaves_nothing_to_estimate() -> None:
    operator = system()
    preconditioner = PivotedCholesky(rank=N).build(operator)
    probes, _ = preconditioner.sample(torch.ones(preconditioner.num_signs, 2).double())
    estimate = log_determinant(operator, probes, preconditioner)
    torch.testing.assert_close(estimate.mean, torch.logdet(operator.to_dense()), rtol=1e-6, atol=1e-6)
    assert estimate.sem < 1e-6


def test_members_of_a_batch() -> None:
    single = system()
    operator = single.expand(2, N, N)
    preconditioner = PivotedCholesky(rank=10).build(operator)
    probes = draw(preconditioner[0], 4, torch.Generator().manual_seed(0)).expand(2, N, 4)
    batched = log_determinant(operator, probes, preconditioner)
    alone = log_determinant(single, probes[0], preconditioner[0])
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
    estimate = log_determinant(operator, probes, preconditioner)
    assert estimate.sem < 250  # of -264; logarithms of negative Ritz values, cut off at zero, give -4000
    assert (estimate.mean - torch.logdet(dense)).abs() < 2 * estimate.sem


def test_one_row_is_exact() -> None:
    operator = NoisyLinearOperator(DenseLinearOperator(torch.tensor([[2.0]]).double()), torch.tensor([0.5]).double())
    preconditioner = PivotedCholesky(rank=1).build(operator)
    probes, _ = preconditioner.sample(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double())
    estimate = log_determinant(operator, probes, preconditioner)
    torch.testing.assert_close(estimate.mean, torch.tensor(2.5).double().log())
    assert estimate.sem < 1e-6

"""Truncation distributions against sums in many digits, and the automatic choice against series of known decay."""

import math
from decimal import Decimal, getcontext

import pytest
import torch

from gpy_iterative.randomized.truncation import decay_rate
from gpy_iterative.truncation import AutomaticTruncation, ExponentialTruncation, FixedTruncation, Truncation

SETTINGS = [(80, 0.05, 1000), (4, 0.1, 60), (3, 2.0, 12), (5, 0.0, 9), (2, 1e-9, 40), (7, 0.3, 7), (1, 0.7, 1000)]


def probabilities(truncation: ExponentialTruncation) -> list[Decimal]:
    """P(J) for J = min_steps, ..., max_steps, with 60 digits."""
    getcontext().prec = 60
    weights = [(-Decimal(truncation.rate) * k).exp() for k in range(truncation.max_steps - truncation.min_steps + 1)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("setting", SETTINGS)
def test_survival_is_the_tail_sum(setting: tuple) -> None:
    truncation = ExponentialTruncation(*setting)
    p = probabilities(truncation)
    steps = torch.arange(1, truncation.max_steps + 1)
    survival = truncation.log_survival(steps)
    assert survival.dtype == torch.float64
    assert (survival[: truncation.min_steps] == 0).all()
    tail = Decimal(0)
    for j in range(truncation.max_steps, truncation.min_steps, -1):
        tail += p[j - truncation.min_steps]
        # In log space: the relative error of S itself, also where S is 1e-300.
        assert abs(float(survival[j - 1]) - float(tail.ln())) < 1e-12
    assert (truncation.log_survival(torch.arange(1, 4) + truncation.max_steps) == -math.inf).all()


def test_weights_keep_their_digits_in_float32() -> None:
    truncation = ExponentialTruncation(80, 0.05, 3000)
    steps = torch.arange(81, 1462)
    getcontext().prec = 60
    length, rate = truncation.max_steps - truncation.min_steps + 1, Decimal(truncation.rate)
    floor = (-rate * length).exp()
    exact = [1 / (((-rate * (j - 80)).exp() - floor) / (1 - floor)) for j in steps.tolist()]
    assert float(exact[-1]) > 9e29
    weights = (-truncation.log_survival(steps)).exp().float()
    relative = [abs(Decimal(float(w)) / value - 1) for w, value in zip(weights, exact, strict=True)]
    assert max(relative) < Decimal("1e-6")


@pytest.mark.parametrize("setting", SETTINGS)
def test_moments_and_expected_maximum(setting: tuple) -> None:
    truncation = ExponentialTruncation(*setting)
    p = torch.tensor([float(value) for value in probabilities(truncation)], dtype=torch.float64)
    steps = torch.arange(truncation.min_steps, truncation.max_steps + 1).double()
    mean = (p * steps).sum()
    assert truncation.mean() == pytest.approx(mean.item(), rel=1e-12)
    cdf = p.cumsum(0).clamp(max=1)
    for count in (1, 2, 8):
        expected = (steps * torch.diff(cdf**count, prepend=torch.zeros(1))).sum()
        assert truncation.expected_max(count) == pytest.approx(expected.item(), rel=1e-9)


def test_the_figures_of_the_paper() -> None:
    truncation = ExponentialTruncation(80, 0.05, 1000)
    assert truncation.mean() == pytest.approx(99.5, abs=0.01)
    assert truncation.expected_max(2) == pytest.approx(109.5, abs=0.01)
    assert truncation.expected_max(8) == pytest.approx(133.9, abs=0.05)
    assert truncation.expected_max(12) == pytest.approx(141.6, abs=0.05)
    endless = ExponentialTruncation(80, 0.05)
    assert endless.mean() == pytest.approx(truncation.mean(), abs=1e-6)
    assert endless.expected_max(2) == pytest.approx(truncation.expected_max(2), abs=1e-6)


@pytest.mark.parametrize("setting", [(4, 0.1, 40), (5, 0.0, 9), (3, 1.0, None), (2, 0.05, 8)])
def test_sampler_follows_the_distribution(setting: tuple) -> None:
    truncation, size = ExponentialTruncation(*setting), 20_000
    draws = truncation.sample((size // 2, 2), torch.Generator().manual_seed(0))
    assert draws.shape == (size // 2, 2)
    assert draws.dtype == torch.int64
    survival = truncation.log_survival(torch.arange(truncation.min_steps, int(draws.max()) + 2)).exp()
    expected = -size * survival.diff()
    counts = torch.bincount(draws.reshape(-1), minlength=int(draws.max()) + 1)[truncation.min_steps :].double()
    enough = expected > 10
    chi_square = ((counts - expected).square() / expected)[enough].sum()
    degrees = int(enough.sum())
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)
    assert draws.min() == truncation.min_steps
    assert abs(draws.double().mean() - truncation.mean()) < 4 * draws.double().std() / size**0.5


def test_the_largest_uniform_number_gives_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr("gpy_iterative.random_numbers.uniform", lambda *arguments: largest)
    for size in range(1, 60):  # rounding makes it the next for some of them
        truncation = ExponentialTruncation(3, 1e-9, 2 + size)
        assert truncation.sample((1,), torch.Generator()).item() in (2 + size, max(3, 1 + size))


def test_rates_at_the_ends_of_their_range() -> None:
    """One that is all but zero gives the uniform distribution, a huge one no steps beyond the minimum."""
    tiny, uniform = ExponentialTruncation(3, 1e-18, 12), ExponentialTruncation(3, 0.0, 12)
    draws = [t.sample((1000,), torch.Generator().manual_seed(0)) for t in (tiny, uniform)]
    assert torch.equal(*draws)
    assert tiny.mean() == pytest.approx(uniform.mean())
    for steep in (ExponentialTruncation(3, 2000.0), ExponentialTruncation(3, 2000.0, 12)):
        assert [steep.mean(), steep.expected_max(5)] == pytest.approx([3, 3])
        assert (steep.sample((10,), torch.Generator().manual_seed(0)) == 3).all()


def test_equal_generators_give_equal_draws_and_the_global_one_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = (ExponentialTruncation().sample((5,), torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_end_that_a_system_suggests() -> None:
    truncation = ExponentialTruncation(80, 0.05)
    assert truncation.within(100_000, torch.float32).max_steps == 80 + math.floor(math.log(0.1 / 2**-23) / 0.05)
    assert truncation.within(100_000, torch.float64).max_steps > 700
    assert truncation.within(60, torch.float64) == ExponentialTruncation(80, 0.05, 120)
    assert truncation.within(30, torch.float64) == ExponentialTruncation(60, 0.05, 60)
    with pytest.raises(ValueError, match=r"at most 13\.6 in torch\.float32, got 14.*min_steps = 80"):
        ExponentialTruncation(80, 14.0).within(100, torch.float32)
    assert ExponentialTruncation(80, 14.0).within(100, torch.float64).max_steps == 82
    assert ExponentialTruncation(80, 14.0).within(40, torch.float32).max_steps == 80  # nothing is cut
    given = ExponentialTruncation(80, 0.05, 90)
    assert given.within(10, torch.float32) is given
    assert truncation.within(100_000, torch.float32).mean() == pytest.approx(truncation.mean(), abs=1e-3)


def test_for_condition_number() -> None:
    truncation = ExponentialTruncation.for_condition_number(1600, budget=100)
    assert truncation.rate == pytest.approx(0.05, rel=1e-3)
    assert truncation.mean() == pytest.approx(100, abs=0.5)
    assert ExponentialTruncation.for_condition_number(1, budget=20).rate == 0.1
    with pytest.raises(ValueError, match=r"0\.5"):
        ExponentialTruncation.for_condition_number(0.5, budget=100)
    with pytest.raises(ValueError, match=r"budget of 30.*preconditioner"):
        ExponentialTruncation.for_condition_number(1e4, budget=30)
    for budget in (0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"budget must be.*{budget}"):
            ExponentialTruncation.for_condition_number(100, budget=budget)


def test_fixed_truncation() -> None:
    truncation = FixedTruncation(7)
    assert truncation.log_survival(torch.tensor([1, 7, 8])).tolist() == [0, 0, -math.inf]
    assert truncation.sample((2,), torch.Generator()).tolist() == [7, 7]
    assert isinstance(truncation, Truncation)
    assert isinstance(ExponentialTruncation(), Truncation)


@pytest.mark.parametrize("decay", [0.02, 0.08, 0.3])
def test_automatic_choice_follows_the_decay(decay: float) -> None:
    energies = torch.exp(-2 * decay * torch.arange(1, 201).double())
    assert decay_rate(energies) == pytest.approx(decay, rel=1e-6)
    chosen = AutomaticTruncation().choose(energies)
    assert chosen.rate == pytest.approx(min(decay, 0.1), rel=1e-6)
    # What is left of a geometric series after j terms is rho^-2j.
    assert chosen.min_steps == math.ceil(round(math.log(10) / (2 * decay), 6))
    variance = (-chosen.log_survival(torch.arange(1, 201))).expm1() @ energies
    assert variance < 0.35 * energies.sum()


def test_automatic_choice_before_the_tail_is_seen() -> None:
    energies = torch.exp(-0.02 * torch.arange(1, 101).double())
    assert AutomaticTruncation().choose(energies).min_steps == math.ceil(math.log(10) / 0.02)
    assert AutomaticTruncation().choose(energies[:20]) == ExponentialTruncation(40, 0.05)
    growing = torch.exp(0.1 * torch.arange(1, 21).double())
    assert AutomaticTruncation().choose(growing).mean() > 20
    assert AutomaticTruncation().choose(torch.ones(1)) == ExponentialTruncation(1, 0.1)
    assert AutomaticTruncation().choose(torch.ones(20)) == ExponentialTruncation(40, 0.05)
    assert AutomaticTruncation().choose(torch.tensor([1.0, 1e-3, 0.0, 0.0])).min_steps == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_steps": 0}, "0"),
        ({"min_steps": 2.5}, "2.5"),
        ({"min_steps": True}, "True"),
        ({"max_steps": 79}, "79"),
        ({"rate": -0.1}, "-0.1"),
        ({"rate": math.nan}, "nan"),
        ({"rate": math.inf}, "inf"),
        ({"rate": 0.0}, "max_steps"),
    ],
)
def test_options_outside_their_range(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ExponentialTruncation(**options)


def test_other_options_outside_their_range() -> None:
    with pytest.raises(ValueError, match="0"):
        FixedTruncation(0)
    with pytest.raises(ValueError, match="count"):
        ExponentialTruncation().expected_max(0)

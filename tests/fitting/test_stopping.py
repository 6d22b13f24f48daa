"""When a fit ends."""

import math

import pytest
import torch

from gpy_iterative.fitting import FitStatus
from gpy_iterative.fitting.stopping import LEFT, has_converged, has_stalled, is_drowned


def test_what_is_left_is_compared_with_its_noise() -> None:
    assert has_converged(0.9 * LEFT, 0.0)
    assert not has_converged(1.1 * LEFT, 0.0)
    assert has_converged(1.1 * LEFT, 1.0)


def test_blind_steps_have_to_halve_what_is_left() -> None:
    blind = [True, True, False, False]
    assert not is_drowned([100.0, 10.0, 6.0, 4.9], blind, limit=2.0, noise=2.0)
    assert is_drowned([100.0, 10.0, 6.0, 5.1], blind, limit=2.0, noise=2.0)
    assert not is_drowned([100.0, 10.0, 6.0, 5.1], blind, limit=2.0, noise=1.0)  # five times the noise
    # So far away there is something to gain:
    assert not is_drowned([100.0, 10.0, 6.0, 5.1], blind, limit=1.0, noise=2.0)
    assert is_drowned([100.0, 10.0, 11.0, 12.0], blind, limit=1.0, noise=0.3)  # but not by steps that lead away
    assert is_drowned([100.0, 10.0, 11.0, 12.0], blind, limit=1.0, noise=3.0)
    # Noise explains that more seems left, but not all of it: 1,500 rows of three tasks stagnated 68 nats too early.
    assert not is_drowned([100.0, 68.5, 77.3, 69.6], blind, limit=1.6, noise=3.0)
    assert not is_drowned([100.0, 10.0, 6.0, 5.1], [True, True, False, True], limit=2.0, noise=2.0)
    assert not is_drowned([5.0, 5.0], [False, False], limit=2.0, noise=2.0)


def test_what_clearly_exceeds_the_noise_is_worth_twice_as_many_blind_steps() -> None:
    """At a saddle of elevators two steps gained little, and a fit ended nine nats too early."""
    lefts, blind = [100.0, 10.0, 9.0, 8.0, 7.0, 6.0], [True, True, False, False, False, False]
    assert not is_drowned(lefts[:-1], blind[:-1], limit=2.0, noise=1.0)
    assert is_drowned(lefts, blind, limit=2.0, noise=1.0)
    assert is_drowned(lefts[:-1], blind[:-1], limit=2.0, noise=3.0)


def noisy(trend: float, noise: float, steps: int, seed: int = 0) -> list[float]:
    draws = torch.randn(steps, generator=torch.Generator().manual_seed(seed)).tolist()
    return [trend * step + noise * draw for step, draw in enumerate(draws)]


def test_adam_goes_on_while_it_gains() -> None:
    assert not any(has_stalled(noisy(0.1, 0.1, steps), 0.0) for steps in range(1, 100))
    assert not has_stalled([1 - math.exp(-step / 50) for step in range(100)], 0.01)
    assert any(has_stalled(noisy(0.0, 0.1, steps), 0.0) for steps in range(40, 60))


def test_values_without_noise_stop_where_twenty_steps_gain_little() -> None:
    values = [1e-6 * step for step in range(100)]
    assert not has_stalled(values, 19e-6)
    assert has_stalled(values, 21e-6)


def test_a_value_that_falls_and_rises_again_has_not_stalled() -> None:
    # The value of Adam from noise of .001 to one of .04: past the optimum of the noise, and back.
    values = [-110 - 170 * math.exp(-step / 4) - 40 * math.exp(-(((step - 28) / 9) ** 2)) for step in range(45)]
    assert not any(has_stalled(values[:steps], 1e-3) for steps in range(1, 46))
    assert has_stalled([*values, *[values[-1]] * 30], 1e-3)


def test_a_value_that_rises_from_a_shallow_dip_has_not_stalled() -> None:
    # So Adam ended a fit of inducing points as CONVERGED, .9 nats below an optimum.
    values = [0.012 * abs(step - 40) for step in range(55)]
    assert not has_stalled(values, 0.05)


@pytest.mark.parametrize("status", FitStatus)
def test_every_status_has_advice(status: FitStatus) -> None:
    assert status.advice.endswith(".")

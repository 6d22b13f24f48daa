import math
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

#: Nats: hyperparameters are within a third of their standard errors of the optimum.
LEFT = 0.05
#: Nats of noise per hyperparameter: .45 of its standard error.
NOISE = 0.1
#: Steps without visible gain, nats left near the end, standard errors of a clear difference.
DROWNED, NEAR, CLEAR = 2, 5.0, 3.0
#: Of Adam: steps without gain, steps that smooth the value, gains by which smoothed values differ.
PATIENCE, SMOOTHED, STEADY = 20, 10, 2.0


class FitStatus(Enum):
    """How a fit ended; `.advice` says what to do."""

    CONVERGED = (
        "Further steps gain nothing: the hyperparameters are at an optimum of the log marginal likelihood, to within the "
        "nats left."
    )
    NOISE = (
        "The noise of the probes (or of mini-batches), or rounding, hides what further steps gain. The hyperparameters are "
        "good to within the nats left. More probes (num_probes), larger batches or float64 go further."
    )
    BOUND = (
        "The optimum lies at or beyond a bound, and a parameter is held there. Noise at its least value means data without "
        "noise, or duplicates: lower the bound only if the solver still converges. Otherwise move the constraint."
    )
    BUDGET = (
        "The steps ran out, or the fit was interrupted. The same call goes on from here. With checkpoint=, max_steps "
        "counts the steps of all calls: raise it."
    )
    STAGNATED = (
        "No step gains anything, yet this is no optimum: value and gradient disagree, or solves fail (see mll.report). "
        "Use float64, lower the solver's tolerance, or keep the noise away from zero (a noise constraint)."
    )

    @property
    def advice(self) -> str:
        """What to do."""
        return self.value


def has_converged(left: float, noise: float) -> bool:
    return 0 <= left < LEFT + noise


def is_drowned(lefts: Sequence[float], seen: Sequence[bool], limit: float, noise: float) -> bool:
    """Whether unknown errors of solves and rounding hide the nats left to gain, given by point.

    True if steps without visible gain (`seen`) leave more than the best earlier point, far from the end clearly more; near
    the end, more than half of it. There, if the last point clearly leaves more than the noise, twice as many steps must
    do so. `limit` is the noise of a converged fit.
    """
    is_clear = CLEAR * noise < lefts[-1] < NEAR * limit
    steps = 2 * DROWNED if is_clear else DROWNED
    if len(lefts) <= steps or any(seen[-steps:]):
        return False
    recent, best = min(lefts[-steps:]), min(lefts[:-steps])
    is_far = recent - CLEAR * noise > NEAR * limit
    leads_away = recent > best + (CLEAR * noise if is_far else 0.0)
    return leads_away or NEAR * limit > recent > best / 2


def has_stalled(values: Sequence[float], least: float) -> bool:
    """Whether the smoothed value recently gained neither its standard error nor `least`, and was steady.

    Adam's momentum carries it past an optimum: the value falls, and rises again; gains count from the lowest.
    """
    recent = values[-PATIENCE - SMOOTHED :]
    if len(values) < PATIENCE + 2 * SMOOTHED:
        return False
    limit = max(scatter(values), least)
    smoothed = [_mean(recent[start : start + SMOOTHED]) for start in range(0, len(recent), SMOOTHED)]
    return smoothed[-1] - min(smoothed) < limit and max(smoothed) - min(smoothed) < STEADY * limit


def scatter(values: Sequence[float]) -> float:
    """Standard error of a difference of smoothed values, from recent neighbours: noise adds its variance twice to the
    squares of their differences, a trend little.
    """
    squares = [(b - a) ** 2 for a, b in pairwise(values[-PATIENCE - SMOOTHED :])]
    return math.sqrt(_mean(squares) / SMOOTHED)


def _mean(part: Sequence[float]) -> float:
    return sum(part) / len(part)

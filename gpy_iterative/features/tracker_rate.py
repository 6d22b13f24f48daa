"""How fast a moving average of batches forgets."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

#: Below this the average would hardly follow the hyperparameters any more.
SMALLEST_RATE = 1e-3


@dataclass(frozen=True)
class TrackerRate:
    """initial / sqrt(1 + initial * step / 4), half of it after 12 / initial steps, and no less than .001.

    Constant at first, for about as long as the average remembers, and falling with the square root of the steps then: the
    noise of the average falls as the optimiser's steps become smaller.
    """

    initial: float

    def __call__(self, step: int) -> float:
        return max(self.initial / math.sqrt(1 + self.initial * step / 4), min(self.initial, SMALLEST_RATE))


def resolved_rate(
    rate: float | Callable[[int], float] | None, batch_size: int, num_features: int
) -> Callable[[int], float]:
    """The rate of every step. Raises ValueError for numbers outside (0, 1].

    None starts at min(.05, .1 b / m): the average of batch precisions is inverted, and the inverse of an average over N =
    b (2 - rate) / rate data is too large by a factor of about 1 / (1 - m / N), here 1.05 and falling.
    """
    if rate is None:
        return TrackerRate(min(0.05, 0.1 * batch_size / num_features))
    if not callable(rate):
        _checked(rate)
    return GivenRate(rate)


@dataclass(frozen=True)
class GivenRate:
    """A constant, or a function of the step whose values are checked. Picklable where the function is."""

    rate: float | Callable[[int], float]

    def __call__(self, step: int) -> float:
        return _checked(self.rate(step) if callable(self.rate) else self.rate)


def _checked(rate: float) -> float:
    if not isinstance(rate, Real) or isinstance(rate, bool) or not 0 < rate <= 1:
        raise ValueError(f"tracker_rate must lie in (0, 1], got {rate!r}.")
    return float(rate)

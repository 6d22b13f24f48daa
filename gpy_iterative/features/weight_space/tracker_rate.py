"""How fast a moving average of batches forgets."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

#: Below this the average would hardly follow the hyperparameters any more.
SMALLEST_RATE = 1e-3


@dataclass(frozen=True)
class TrackerRate:
    """The step size of a moving average: a number in (0, 1], a function of the step, or None.

    None is initial / sqrt(1 + initial * step / 4), and no less than .001: constant at first, for about as long as the
    average remembers, and falling with the square root of the steps then, as the optimiser's steps become smaller.

    Attributes:
        given: the user's choice; functions are pickled where they can be.
        initial: of None.

    Raises:
        ValueError: a number outside (0, 1], also of a function, when it is called.
    """

    given: float | Callable[[int], float] | None
    initial: float

    @classmethod
    def of(cls, given: float | Callable[[int], float] | None, batch_size: int, num_features: int) -> "TrackerRate":
        """None starts at min(.05, .1 b / m).

        The average of batch precisions is inverted, and the inverse of an average over N = b (2 - rate) / rate data is too
        large by a factor of about 1 / (1 - m / N), here 1.05 and falling.
        """
        return cls(given, min(0.05, 0.1 * batch_size / num_features))

    def __post_init__(self) -> None:
        if self.given is not None and not callable(self.given):
            _check(self.given)

    def __call__(self, step: int) -> float:
        """The rate of a step, counted from 0."""
        if self.given is None:
            return max(self.initial / math.sqrt(1 + self.initial * step / 4), min(self.initial, SMALLEST_RATE))
        rate = self.given(step) if callable(self.given) else self.given
        _check(rate)
        return float(rate)


def _check(rate: float) -> None:
    if not isinstance(rate, Real) or isinstance(rate, bool) or not 0 < rate <= 1:
        raise ValueError(f"tracker_rate must lie in (0, 1], got {rate!r}.")

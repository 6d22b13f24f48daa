"""The one way in which stochastic claims are tested."""

from torch import Tensor


def assert_mean_within(samples: Tensor, truth: Tensor | float, *, max_sem: float, floor: float = 0.0) -> None:
    """|mean - truth| <= 4 standard errors in every entry, and no standard error above `max_sem`.

    Args:
        samples: [draws, ...], independent.
        truth: [...].
        max_sem: a bound, so that a wild estimator cannot pass by its own noise.
        floor: rounding error that is granted on top, for entries without randomness.
    """
    mean = samples.mean(0)
    sem = samples.std(0) / samples.shape[0] ** 0.5
    assert sem.max() <= max_sem, f"standard error {sem.max():.3g} above {max_sem:.3g}"
    excess = (mean - truth).abs() - (4 * sem + floor)
    assert excess.max() <= 0, f"mean {mean} is not within 4 standard errors {sem} of {truth}"

"""The one way in which stochastic claims are tested."""

import torch
from torch import Tensor

#: Rounding errors of a sample that are granted, of the largest number compared: sums in another order, a few products.
ROUNDINGS = 1000


def assert_mean_within(samples: Tensor, truth: Tensor | float, *, max_sem: float, floor: float = 0.0) -> None:
    """|mean - truth| <= 4 standard errors in every entry, and no standard error above `max_sem`.

    Args:
        samples: [draws, ...], independent.
        truth: [...].
        max_sem: a bound, so that a wild estimator cannot pass by its own noise.
        floor: as in `assert_within`.
    """
    sem = samples.std(0) / samples.shape[0] ** 0.5
    assert_within(samples.mean(0), truth, sem, max_sem=max_sem, floor=floor)


def assert_within(
    mean: Tensor | float | list[float],
    truth: Tensor | float,
    sem: Tensor | float | list[float],
    *,
    max_sem: float,
    floor: float = 0.0,
) -> None:
    """The same where mean and standard errors are known. An entry without randomness is right up to rounding.

    Args:
        mean, truth, sem: [...], or numbers.
        max_sem: a bound on the standard errors.
        floor: an error that is granted on top of rounding, of a solver's tolerance say.
    """
    mean, truth, sem = (
        part if isinstance(part, Tensor) else torch.tensor(part, dtype=torch.float64) for part in (mean, truth, sem)
    )
    assert sem.max() <= max_sem, f"standard error {sem.max():.3g} above {max_sem:.3g}"
    rounding = ROUNDINGS * torch.finfo(mean.dtype).eps * torch.maximum(mean.abs().max(), truth.abs().max())
    excess = (mean - truth).abs() - (4 * sem + rounding + floor)
    assert excess.max() <= 0, f"mean {mean} is not within 4 standard errors {sem} of {truth}"

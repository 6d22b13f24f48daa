"""What can go wrong, in words that say what to do about it.

The classes inherit from the errors and warnings that GPyTorch and BoTorch already know, so that
their code treats ours as it should: BoTorch's line search steps over a `NanError`, drops an
attempt on a `NotPSDError`, and lets a `NumericalWarning` pass.
"""

import sys
import warnings

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

#: Between a user's line and ours, with what wraps functions: a warning points at none of their lines.
_BETWEEN = {"gpy_iterative", "gpytorch", "torch", "linear_operator", "botorch", "scipy", "contextlib", "functools"}


def warn(message: str, category: type[Warning]) -> None:
    """As `warnings.warn`, pointing at the user's line, however far down it was called from."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)  # noqa: TID251


def float64_first(dtype: torch.dtype) -> str:
    """The first words of an advice: float64, unless the dtype is that already."""
    return "" if dtype == torch.float64 else "use float64, "


class NonFiniteError(NanError):
    """A NaN or an infinity appeared during a computation; nothing was changed by it."""


class NotPositiveDefiniteError(NotPSDError):
    """A matrix that must be positive definite is not, even after the jitter ladder."""


class SpectralDensityMissingError(RuntimeError):
    """Random features were asked for from a kernel that has no registered spectral density."""


class UnsupportedLikelihoodError(RuntimeError):
    """The marginal log likelihood cannot be formed with this likelihood; the text names what can."""


class RanksDisagreeError(RuntimeError):
    """The processes that share a kernel matrix were given different data, seeds or hyperparameters."""


class RankLostError(RuntimeError):
    """Another of the processes that share a kernel matrix ended, or does not answer in time."""


class ConvergenceWarning(NumericalWarning):
    """A linear solver stopped before it reached its tolerance; the text says which lever helps."""


class VarianceWarning(NumericalWarning):
    """A stochastic estimate is noisier than what it is used for."""


class BiasWarning(NumericalWarning):
    """An estimator was set up so that its optimum is not that of what it estimates; the text says which lever helps."""


class ApproximationWarning(NumericalWarning):
    """An approximation is too coarse, or is used in a way, for its numbers to mean what they seem to."""


class DataWarning(NumericalWarning):
    """Training data have a scale, copies or constant columns that a fit cannot do much with; the text says what to do."""

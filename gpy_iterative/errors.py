"""Errors and warnings, with advice in their messages.

BoTorch's line search steps over a `NanError`; its fit drops an attempt on a `NotPSDError`, and ignores a
`NumericalWarning`.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning

#: Packages whose lines a warning does not point at.
_BETWEEN = {"gpy_iterative", "gpytorch", "torch", "linear_operator", "botorch", "scipy", "contextlib", "functools"}

_Held = list[tuple[str, type[Warning]]]
_held: ContextVar[_Held | None] = ContextVar("held", default=None)


@contextmanager
def held_warnings() -> Iterator[_Held]:
    """Collects the warnings of a trial that may be undone."""
    held: _Held = []
    token = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(token)


def warn(message: str, category: type[Warning]) -> None:
    """`warnings.warn` that points at the user's line."""
    held = _held.get()
    if held is not None:
        held.append((message, category))
        return
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)  # noqa: TID251


def float64_first(dtype: torch.dtype) -> str:
    """Start of an advice, empty in float64."""
    return "" if dtype == torch.float64 else "use float64, "


class NonFiniteError(NanError):
    """A NaN or an infinity appeared; parameters are unchanged."""


class NotPositiveDefiniteError(NotPSDError):
    """A matrix is not positive definite, even with jitter."""


class CheckpointError(ValueError):
    """The file belongs to another fit, or is no checkpoint of this version."""


class SpectralDensityMissingError(RuntimeError):
    """A kernel has no registered spectral density."""


class UnsupportedLikelihoodError(RuntimeError):
    """Unsupported likelihood; the message names supported ones."""


class RanksDisagreeError(RuntimeError):
    """Processes that share a kernel matrix have different data, seeds or hyperparameters."""


class RankLostError(RuntimeError):
    """Another process that shares the kernel matrix ended, or timed out."""


class ConvergenceWarning(NumericalWarning):
    """A linear solver stopped before its tolerance."""


class VarianceWarning(NumericalWarning):
    """A stochastic estimate is too noisy for its use."""


class BiasWarning(NumericalWarning):
    """An estimator's settings bias its optimum."""


class ApproximationWarning(NumericalWarning):
    """An approximation is too coarse or misused."""


class DataWarning(NumericalWarning):
    """Unsuitable training data: scale, copies, constant columns."""

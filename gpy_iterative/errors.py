"""What can go wrong, in words that say what to do about it.

The classes inherit from the errors and warnings that GPyTorch and BoTorch already know, so that
their code treats ours as it should: BoTorch's line search steps over a `NanError`, drops an
attempt on a `NotPSDError`, and lets a `NumericalWarning` pass.
"""

from linear_operator.utils.errors import NanError, NotPSDError
from linear_operator.utils.warnings import NumericalWarning


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

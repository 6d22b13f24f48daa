"""What the posteriors of all methods can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpy_iterative.linear_solvers.solution import SolveStats, SolveStatus
from gpy_iterative.training.report import Report


@runtime_checkable
class Posterior(Protocol):
    """A posterior over functions, at the hyperparameters and data of now."""

    @property
    def report(self) -> Report:
        """How the posterior was computed, and at what cost."""
        ...

    def __call__(self, *inputs: Tensor) -> MultivariateNormal:
        """The latent posterior at test inputs [*b, t, d], one tensor for each of the model's inputs."""
        ...

    def sample_paths(self, num_paths: int) -> Callable[..., Tensor]:
        """Posterior samples as functions: `paths(x)` evaluates the same functions at any x, [num_paths, *b, t]."""
        ...


@dataclass(frozen=True)
class SolveReport(Report):
    """The linear solve for a posterior mean.

    Attributes:
        status: how it ended.
        iterations: of the solver.
        epochs: passes over the kernel matrix that the iterations took; 0 where it was factored.
        overhead: further passes: the residual of the start, the preconditioner.
        residual: relative residual norm, from a true residual; 0 where the matrix was factored.
        seconds: wall-clock time.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    overhead: float
    residual: float
    seconds: float

    @classmethod
    def of(cls, status: SolveStatus, stats: SolveStats) -> "SolveReport":
        """The report of a solve with these statistics."""
        residual = max(stats.residual_norms.values(), default=0.0)
        return cls(status, stats.iterations, stats.epochs, stats.overhead, residual, stats.seconds)

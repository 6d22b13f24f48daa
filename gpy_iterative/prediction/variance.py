"""Posterior covariances at test points: from a Cholesky factor, from pathwise samples, or from direct solves.

Each answers for the rows and columns it is asked for, so that the variances of a million points never need a
million by anything matrix. `at` is a `TestPoints`: the blocks of the joint prior that belong to the test points.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator, to_dense
from torch import Tensor

from gpy_iterative.linear_operators import KernelTerm
from gpy_iterative.prediction.training_system import TrainingSystem
from gpy_iterative.probes import RandomFeatures
from gpy_iterative.solvers import CholeskyFactor
from gpy_iterative.spectral import Draws


@dataclass(frozen=True)
class TestPoints:
    """Attributes:

    prior: k(x, x) [*b, t, t].
    cross: k(x, X) [*b, t, n].
    terms: the prior's kernels at the test points; None where only the blocks are known.
    """

    __test__ = False  # no test case, whatever its name

    prior: LinearOperator
    cross: LinearOperator
    terms: Sequence[KernelTerm] | None = None

    def rows(self, rows: slice) -> "TestPoints":
        """Some of the test points."""
        terms = self.terms
        if terms is not None:
            terms = [replace(term, inputs=term.inputs[..., rows, :]) for term in terms]
        return TestPoints(self.prior[..., rows, rows], self.cross[..., rows, :], terms)


class PosteriorVariance(ABC):
    """Latent posterior covariances."""

    @abstractmethod
    def diagonal(self, at: TestPoints) -> Tensor:
        """Variances [*b, t], never negative."""

    @abstractmethod
    def matrix(self, at: TestPoints) -> Tensor:
        """The covariance [*b, t, t], dense."""


class ExactVariance(PosteriorVariance):
    """K** - K*X H^-1 KX*, by a Cholesky factor: exact, n^2 multiply-adds a test point."""

    def __init__(self, factor: CholeskyFactor) -> None:
        self._factor = factor

    def diagonal(self, at: TestPoints) -> Tensor:
        prior = at.prior.diagonal(dim1=-1, dim2=-2)
        explained = self._whitened(at).square().sum(-2).to(prior.dtype)
        return (prior - explained).clamp_min(0)

    def matrix(self, at: TestPoints) -> Tensor:
        whitened = self._whitened(at)
        return to_dense(at.prior) - (whitened.mT @ whitened).to(at.prior.dtype)

    def _whitened(self, at: TestPoints) -> Tensor:
        return self._factor.whiten(to_dense(at.cross).mT)


class SolvedVariance(PosteriorVariance):
    """K** - K*X H^-1 KX*, by solving for every test point.

    The quadratic form is k^T v + v^T (k - H v) = k^T H^-1 k less a term of second order in the solver's error. Cost: one
    column of a block solve a test point.
    """

    #: Test points that are solved for at a time.
    CHUNK = 512

    def __init__(self, system: TrainingSystem) -> None:
        self._system = system

    def diagonal(self, at: TestPoints) -> Tensor:
        parts = []
        for start in range(0, at.cross.shape[-2], self.CHUNK):
            part = at.rows(slice(start, start + self.CHUNK))
            columns = to_dense(part.cross).mT
            solution = self._solve(columns)
            explained = ((columns + solution.residual) * solution.value).sum(-2)
            parts.append((part.prior.diagonal(dim1=-1, dim2=-2) - explained).clamp_min(0))
        return torch.cat(parts, dim=-1)

    def matrix(self, at: TestPoints) -> Tensor:
        columns = to_dense(at.cross).mT
        solution = self._solve(columns)
        explained = (columns + solution.residual).mT @ solution.value
        return to_dense(at.prior) - (explained + explained.mT) / 2

    def _solve(self, columns: Tensor):
        batch = self._system.operator.batch_shape
        extra = columns.shape[: columns.dim() - 2 - len(batch)]
        if not extra:
            return self._system.solve(columns)
        # Batches of test points are further columns of the same systems.
        flat = columns.movedim(tuple(range(len(extra))), tuple(range(-len(extra), 0))).flatten(-len(extra) - 1)
        solution = self._system.solve(flat)
        shape = (*columns.shape[len(extra) : -1], columns.shape[-1], *extra)
        back = lambda tensor: tensor.reshape(shape).movedim(tuple(range(-len(extra), 0)), tuple(range(len(extra))))
        return replace(solution, value=back(solution.value), residual=back(solution.residual))


class SampledVariance(PosteriorVariance):
    """From pathwise samples: f_j - mean = Phi(x) w_j - k(x, X) H^-1 (Phi(X) w_j + noise_j), whose covariance is wanted.

    Relative error of a variance: sqrt(2 / num_samples) from the samples, and one of the random features that falls with
    their number. Cost: one block solve for num_samples columns, once; n num_samples multiply-adds a test point.

    Args:
        system: the training system.
        num_samples, num_frequencies: of the samples.
        generator: draws them.
    """

    def __init__(
        self, system: TrainingSystem, *, num_samples: int, num_frequencies: int, generator: torch.Generator
    ) -> None:
        self.num_samples = num_samples
        self._distribution = RandomFeatures(num_probes=num_samples, num_frequencies=num_frequencies, corrected=False)
        terms = system.terms()
        self._draws: Draws = self._distribution.draw(system.operator, terms, generator)
        with torch.no_grad():
            probes = self._distribution.probes(system.operator, terms, self._draws)
        self._solutions = system.solve(probes.vectors).value

    def deviations(self, at: TestPoints) -> Tensor:
        """Samples less the mean, [*b, t, s]."""
        assert at.terms is not None
        return self._distribution.prior_sample(at.terms, self._draws) - at.cross @ self._solutions

    def diagonal(self, at: TestPoints) -> Tensor:
        return self.deviations(at).square().mean(-1)

    def matrix(self, at: TestPoints) -> Tensor:
        deviations = self.deviations(at) / self.num_samples**0.5
        return deviations @ deviations.mT

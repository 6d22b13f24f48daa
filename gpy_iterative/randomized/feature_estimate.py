"""What a step with random features has at hand, and the estimate that it makes of it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.exact.estimates import DensityEstimate, check_estimated, exact_estimate
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.solution import SolveStats, SolveStatus
from gpy_iterative.randomized.feature_density import FeatureDensity, FeatureDensityTerm
from gpy_iterative.randomized.report import FrequencyReport
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.training.surrogate import with_derivatives


@dataclass(frozen=True)
class FeatureEstimate:
    """A weighted sum of log densities of parts of one feature matrix, and perhaps of the exact one.

    Attributes:
        features: Phi [*b, n, F], with the graph to the hyperparameters.
        terms: densities and their weights in the sum.
        exact: the exact density and its weight.
        stats, truncation, probe_jitter: as in DensityEstimate; there are no probes.
    """

    features: Tensor
    terms: Sequence[tuple[float, FeatureDensityTerm]]
    exact: tuple[float, DensityEstimate] | None
    stats: SolveStats
    truncation: FrequencyReport
    probe_jitter: None = None

    def __post_init__(self) -> None:
        check_estimated("value", self.value)
        for _, term in self.terms:
            for derivative in (term.by_features, term.by_noise, term.by_residual):
                check_estimated("derivative", derivative)

    @property
    def status(self) -> SolveStatus:
        """Dense factors always converge; what is random is told in `truncation`."""
        return SolveStatus.CONVERGED

    @property
    def value_sem(self) -> Tensor:
        """One draw knows nothing of its own error: NaN."""
        return torch.full_like(self.value, math.nan)

    @property
    def value(self) -> Tensor:
        """The sum, [*b]."""
        total = sum(weight * term.value for weight, term in self.terms)
        if self.exact is not None:
            total = total + self.exact[0] * self.exact[1].value.double()
        return torch.as_tensor(total).to(self.features)

    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        """The value [*b], connected with the parameters behind features, noise and residual."""
        assert isinstance(operator, NoisyLinearOperator)
        by_features = torch.zeros_like(self.features.detach())
        by_noise, by_residual = torch.zeros_like(residual.detach()), torch.zeros_like(residual.detach())
        for weight, term in self.terms:
            by_features.index_add_(-1, term.columns, weight * term.by_features)
            by_noise += weight * term.by_noise
            by_residual += weight * term.by_residual
        pairs = [(self.features, by_features), (operator.noise, by_noise), (residual, by_residual)]
        value = with_derivatives(self.value, pairs)
        if self.exact is not None:
            weight, estimate = self.exact
            exact = estimate.with_gradient(operator, residual)
            value = value + weight * (exact - exact.detach())
        return value


@dataclass(frozen=True)
class FeatureStep:
    """Nested feature matrices of one step, each with its log density, and the exact density beside them.

    Attributes:
        operator: H.
        residual: targets less the mean, [*b, n], without graph.
        terms: the kernels of the prior's sum.
        features: the largest number of frequencies.
        matrix: their Phi [*b, n, F], with the graph to the hyperparameters.
        density: what their parts have in common.
        draws: of this step, frequencies included.
        start: when it began, as `time.perf_counter()` has it.
    """

    operator: NoisyLinearOperator
    residual: Tensor
    terms: list[KernelTerm]
    features: RandomFourierFeatures
    matrix: Tensor
    density: FeatureDensity
    draws: Draws
    start: float

    @property
    def num_data(self) -> int:
        """How many data there are, n."""
        return self.operator.shape[-1]

    def leading(self, num_frequencies: int) -> FeatureDensityTerm:
        """The density of the first frequencies of each kernel."""
        return self.density.term(*self.features.leading(self.terms, num_frequencies))

    def exact(self) -> DensityEstimate:
        """The density without features, by a dense Cholesky factor."""
        return exact_estimate(self.operator, self.residual, Cholesky())

    def combined(
        self,
        terms: Sequence[tuple[float, FeatureDensityTerm]],
        truncation: FrequencyReport,
        exact: tuple[float, DensityEstimate] | None = None,
    ) -> FeatureEstimate:
        """The weighted sum of some of these densities."""
        stats = SolveStats(0, 0.0, 0.0, {"targets": 0.0}, time.perf_counter() - self.start)
        return FeatureEstimate(self.matrix, terms, exact, stats, truncation)

"""Marginal log likelihoods of random Fourier features: the biased one, and the one that a random increment corrects.

Potapczynski et al. 2021, "Bias-Free Scalable Gaussian Processes via Randomized Truncations", sections 2.2 and 4.2,
appendix B. With f_k the log likelihood of the first m_k of a set of random frequencies, and the last one replaced by the
exact one, f_0 + (f_k - f_{k-1}) / p_k has the exact expectation for k drawn with probability p_k.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.errors import UnsupportedLikelihoodError
from gpy_iterative.linear_operators import KernelProducts, KernelTerm, NoisyLinearOperator, kernel_terms
from gpy_iterative.mlls.base import GaussianMarginalLogLikelihood
from gpy_iterative.mlls.estimates import DensityEstimate, Estimate, check_estimated
from gpy_iterative.mlls.feature_density import FeatureDensity, FeatureDensityTerm
from gpy_iterative.mlls.report import FrequencyReport
from gpy_iterative.mlls.surrogate import with_derivatives
from gpy_iterative.solvers import Solver, SolveStats, SolveStatus
from gpy_iterative.spectral import Draws, RandomFourierFeatures, draws_under


@dataclass(frozen=True)
class FeatureEstimate:
    """A weighted sum of log densities of parts of one feature matrix, and perhaps of the exact one.

    Attributes:
        features: Phi [*b, n, F], with the graph to the hyperparameters.
        terms: densities and their weights in the sum.
        exact: the exact density and its weight.
        stats, truncation: as in DensityEstimate.
    """

    features: Tensor
    terms: Sequence[tuple[float, FeatureDensityTerm]]
    exact: tuple[float, DensityEstimate] | None
    stats: SolveStats
    truncation: FrequencyReport

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


class RandomFeatureMarginalLogLikelihood(GaussianMarginalLogLikelihood):
    """Base of the marginal log likelihoods of random features; see its two subclasses for the options."""

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        resample: bool,
        solver: Solver | None,
        products: KernelProducts | None,
        generator: torch.Generator | int | None,
        distribution: str,
    ) -> None:
        super().__init__(
            likelihood,
            model,
            solver=solver,
            warm_start=False,
            products=products,
            generator=generator,
            distribution=distribution,
        )
        self.resample = resample

    def _has_separate_estimates(self, estimate: Estimate) -> bool:
        # Of kept frequencies value and gradient are one smooth function.
        return self.resample

    @abstractmethod
    def _draw(self, num_data: int) -> tuple[int, Draws]:
        """How many frequencies this step needs, and what else was drawn."""

    @abstractmethod
    def _combined(
        self,
        operator: NoisyLinearOperator,
        residual: Tensor,
        terms: list[KernelTerm],
        features: RandomFourierFeatures,
        density: FeatureDensity,
        draws: Draws,
    ) -> tuple[list[tuple[float, FeatureDensityTerm]], tuple[float, DensityEstimate] | None, FrequencyReport]:
        """The weighted densities of this step, and what to report."""

    def _estimate(
        self, operator: LinearOperator, prior: MultivariateNormal, observed: Tensor | None, residual: Tensor
    ) -> FeatureEstimate:
        with self._state.unchanged_by_failure():
            return self._feature_estimate(operator, prior, observed, residual)

    def _feature_estimate(
        self, operator: LinearOperator, prior: MultivariateNormal, observed: Tensor | None, residual: Tensor
    ) -> FeatureEstimate:
        start = time.perf_counter()
        if not isinstance(operator, NoisyLinearOperator):
            raise UnsupportedLikelihoodError(
                f"Random features need a noise covariance that is diagonal; {type(self.likelihood).__name__} has none. "
                "RussianRouletteMarginalLogLikelihood and HutchinsonMarginalLogLikelihood take any."
            )
        terms = kernel_terms(prior.lazy_covariance_matrix, observed)

        def draw() -> Draws:
            count, others = self._draw(operator.shape[-1])
            drawn = RandomFourierFeatures(count).draw(terms, self._state.generator)
            return {f"features.{name}": t for name, t in drawn.items()} | others | {"count": torch.tensor(count)}

        draws = self._state.draws_for("features", residual, operator.shape, draw, keep=not self.resample)
        features = RandomFourierFeatures(int(draws["count"]))
        # A graph where the caller wants one: then the operator has one too.
        with torch.set_grad_enabled(any(tensor.requires_grad for tensor in operator.representation())):
            matrix = features.differentiable(terms, draws_under("features", draws))
            matrix = matrix.expand(*operator.batch_shape, *matrix.shape[-2:])
        noise = operator.noise.detach().expand(operator.shape[:-1])
        density = FeatureDensity(matrix.detach(), noise, residual)
        weighted, exact, report = self._combined(operator, residual, terms, features, density, draws)
        stats = SolveStats(0, 0.0, 0.0, {"targets": 0.0}, time.perf_counter() - start)
        return FeatureEstimate(matrix, weighted, exact, stats, report)


class RFFMarginalLogLikelihood(RandomFeatureMarginalLogLikelihood):
    """The marginal log likelihood of a random feature approximation, its frequencies redrawn every step: a baseline.

    Its quadratic form comes out too large and its log-determinant too small, and its optimum is another than that of the
    exact likelihood, with shorter lengthscales. `SingleSampleRFFMarginalLogLikelihood` removes the bias,
    `RussianRouletteMarginalLogLikelihood` has none and less variance.

    Args:
        likelihood: a Gaussian likelihood with diagonal noise (fixed and heteroskedastic included).
        model: a `gpytorch.models.ExactGP` whose kernel has a registered spectral density.
        num_frequencies: m, for each kernel of the prior's sum: 2 m features.
        resample: False keeps the frequencies of the first step.
        solver: of predictions, which are of the kernel itself; None is Cholesky up to 3,000 data, and beyond conjugate
            gradients to 1e-4.
        products: how kernel products are computed.
        generator: a generator, or the seed of one. The global generator is never touched.

    A step costs n (2m)^2 + (2m)^3, or n^2 2m + n^3 where 2m >= n; memory some six times n 2m.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option outside its range.
        SpectralDensityMissingError: (from the call) the kernel has no random features, or no gradient through them.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        num_frequencies: int = 1000,
        resample: bool = True,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        check_count("num_frequencies", num_frequencies)
        super().__init__(
            likelihood,
            model,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
            distribution=f"random features of {num_frequencies} frequencies",
        )
        self.num_frequencies = num_frequencies

    def _draw(self, num_data: int) -> tuple[int, Draws]:
        return self.num_frequencies, {}

    def _combined(
        self,
        operator: NoisyLinearOperator,
        residual: Tensor,
        terms: list[KernelTerm],
        features: RandomFourierFeatures,
        density: FeatureDensity,
        draws: Draws,
    ) -> tuple[list[tuple[float, FeatureDensityTerm]], tuple[float, DensityEstimate] | None, FrequencyReport]:
        term = density.term(*features.leading(terms, self.num_frequencies))
        return [(1.0, term)], None, FrequencyReport(self.num_frequencies)

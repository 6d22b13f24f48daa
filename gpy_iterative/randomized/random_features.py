"""Marginal log likelihoods of random Fourier features: the biased one, and the one that a random increment corrects.

Potapczynski et al. 2021, "Bias-Free Scalable Gaussian Processes via Randomized Truncations", sections 2.2 and 4.2,
appendix B. With f_k the log likelihood of the first m_k of a set of random frequencies, and the last one replaced by the
exact one, f_0 + (f_k - f_{k-1}) / p_k has the exact expectation for k drawn with probability p_k.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.checks import check_count, check_flag
from gpy_iterative.errors import UnsupportedLikelihoodError
from gpy_iterative.exact.base import GaussianMarginalLogLikelihood
from gpy_iterative.exact.estimates import Estimate
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.randomized.feature_density import FeatureDensity
from gpy_iterative.randomized.feature_estimate import FeatureEstimate, FeatureStep
from gpy_iterative.randomized.report import FrequencyReport
from gpy_iterative.spectral.densities import Draws, draws_under
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.training.run import Run
from gpy_iterative.training.training_system import TrainingSystem


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
        options: Mapping[str, Any],
    ) -> None:
        options = {**options, "resample": resample}
        super().__init__(likelihood, model, solver=solver, products=products, generator=generator, options=options)
        check_flag("resample", resample)
        self.resample = resample

    def _has_separate_estimates(self, estimate: Estimate) -> bool:
        # Of kept frequencies value and gradient are one smooth function.
        return self.resample

    @abstractmethod
    def _draw(self, num_data: int, run: Run, generator: torch.Generator) -> tuple[int, Draws]:
        """How many frequencies this step needs, and what else was drawn."""

    @abstractmethod
    def _combined(self, step: FeatureStep, run: Run) -> tuple[FeatureEstimate, Run]:
        """The weighted densities of this step with what to report, and the next run."""

    def _estimate(self, system: TrainingSystem, run: Run) -> tuple[FeatureEstimate, Run]:
        start, operator, residual = time.perf_counter(), system.operator, system.residual
        if not isinstance(operator, NoisyLinearOperator):
            raise UnsupportedLikelihoodError(
                f"Random features need a noise covariance that is diagonal; {type(self.likelihood).__name__} has none. "
                "RussianRouletteMarginalLogLikelihood and HutchinsonMarginalLogLikelihood take any."
            )
        terms = system.terms()
        run = run.for_system(operator)
        kept = None if self.resample else run.part("features")
        if kept is None:
            generator = run.generator()
            count, others = self._draw(operator.shape[-1], run, generator)
            drawn = RandomFourierFeatures(count).draw(terms, generator)
            kept = {f"features.{name}": t for name, t in drawn.items()} | others | {"count": torch.tensor(count)}
            run = run.drawn(generator).having(features=kept)
        draws = dict(kept)
        features = RandomFourierFeatures(int(draws["count"]))
        # A graph where the caller wants one: then the operator has one too.
        with torch.set_grad_enabled(any(tensor.requires_grad for tensor in operator.representation())):
            matrix = features.differentiable(terms, draws_under("features", draws))
            matrix = matrix.expand(*operator.batch_shape, *matrix.shape[-2:])
        noise = operator.noise.detach().expand(operator.shape[:-1])
        density = FeatureDensity(matrix.detach(), noise, residual)
        return self._combined(FeatureStep(operator, residual, terms, features, matrix, density, draws, start), run)


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
            options={"num_frequencies": num_frequencies},
        )
        self.num_frequencies = num_frequencies

    def _draw(self, num_data: int, run: Run, generator: torch.Generator) -> tuple[int, Draws]:
        return self.num_frequencies, {}

    def _combined(self, step: FeatureStep, run: Run) -> tuple[FeatureEstimate, Run]:
        density = step.leading(self.num_frequencies)
        return step.combined([(1.0, density)], FrequencyReport(self.num_frequencies)), run

"""The posterior of an exact Gaussian process, from training's own solves.

Pathwise conditioning (Wilson et al. 2021; Lin et al. 2024, section 3): mean k(x, X) a, and samples that are functions,
f_j(x) = m(x) + Phi(x) w_j + k(x, X)(a - H^-1 xi_j).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import ZeroLinearOperator
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators import KernelProducts, kernel_operator, kernel_terms
from gpy_iterative.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.prediction.strategy import PathwisePredictionStrategy
from gpy_iterative.prediction.training_system import TrainingSystem
from gpy_iterative.prediction.variance import (
    ExactVariance,
    PosteriorVariance,
    SampledVariance,
    SolvedVariance,
    TestPoints,
)
from gpy_iterative.solvers import Solver
from gpy_iterative.spectral import has_random_features


@dataclass(frozen=True)
class VarianceError:
    """How far posterior variances are from directly solved ones: |log(estimate / exact)| over some test points."""

    median: float
    largest: float
    num_points: int


class PathwisePosterior:
    """`posterior(x)` is the latent posterior at x; `likelihood(posterior(x))` adds the noise.

    Args:
        model, likelihood: put into evaluation mode by `install`.
        solver: None chooses by size and structure, see `gpy_iterative.solvers.default_solver`.
        products: how kernel products are computed.
        generator: for the samples behind variances and paths.
        params: the likelihood's own arguments at the training inputs.
        initial_weights: [*b, n] representer weights, where the solve for the mean starts.
        num_samples, num_frequencies: of the samples that variances come from where no Cholesky factor is at hand. The
            relative error of a variance is about sqrt(2 / num_samples), here 9 %.

    The mean costs one product with k(x, X). Variances are exact where a Cholesky factor is at hand; otherwise the first
    one asked for costs a block solve of num_samples columns. Kernels without a spectral density, and covariances with
    other structure (multitask), get their variances by a solve for every test point.

    Hyperparameters or training data that have changed since are noticed, by value, and answered by one warm-started solve.
    """

    def __init__(
        self,
        model: ExactGP,
        likelihood: Likelihood,
        *,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | None = None,
        params: tuple[Any, ...] = (),
        initial_weights: Tensor | None = None,
        num_samples: int = 256,
        num_frequencies: int = 16_384,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        if num_frequencies < 1:
            raise ValueError(f"num_frequencies must be at least 1, got {num_frequencies}.")
        self.model, self.likelihood = model, likelihood
        self.num_samples, self.num_frequencies = num_samples, num_frequencies
        self._solver, self._params = solver, params
        self._products = KernelProducts() if products is None else products
        self._generator = torch.Generator().manual_seed(0) if generator is None else generator
        self._system: TrainingSystem | None = None
        self._variance: SampledVariance | None = None
        self._paths: SampledVariance | None = None
        self._initial_weights = initial_weights

    def install(self) -> None:
        """Evaluation mode for model and likelihood; `model(x)` answers from this posterior until `model.train()`."""
        self.model.eval()
        self.likelihood.eval()
        self.model.prediction_strategy = PathwisePredictionStrategy(self)
        self.refresh()

    def refresh(self) -> None:
        """Solves again where hyperparameters or training data have changed; does nothing where they have not."""
        if self._system is None or not self._system.is_current(self.model):
            start = self._initial_weights if self._system is None else self._system.weights
            self._variance = self._paths = None
            self._system = TrainingSystem(
                self.model,
                self.likelihood,
                solver=self._solver,
                products=self._products,
                params=self._params,
                initial_weights=start,
            )

    @property
    def system(self) -> TrainingSystem:
        """The training system at the current hyperparameters."""
        self.refresh()
        assert self._system is not None
        return self._system

    def __call__(self, *inputs: Tensor) -> MultivariateNormal:
        """The latent posterior at the test inputs [*b, t, d].

        Returns:
            A MultivariateNormal (MultitaskMultivariateNormal for a multitask model) whose covariance is lazy. Gradients
            flow to inputs that require them; otherwise there is no graph.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
            joint, mean, at = self._test_points(*inputs)
            mean = mean + (at.cross @ self.system.weights.unsqueeze(-1)).squeeze(-1)
            covariance = self._covariance(mean, at)
        if isinstance(joint, MultitaskMultivariateNormal):
            return MultitaskMultivariateNormal(mean.unflatten(-1, (-1, joint.num_tasks)), covariance)
        return MultivariateNormal(mean, covariance)

    def sample_paths(self, num_paths: int) -> Callable[[Tensor], Tensor]:
        """Posterior samples as functions: each call of `paths(x)` evaluates the same [num_paths, *b, t] functions at x.

        Raises:
            SpectralDensityMissingError: the prior's kernel has no spectral density.
        """
        if num_paths < 1:
            raise ValueError(f"num_paths must be at least 1, got {num_paths}.")
        self.refresh()
        if self._paths is None or self._paths.num_samples < num_paths:
            enough = num_paths <= self.num_samples
            self._paths = self._sampled_variance() if enough else self._sample(num_paths)
        paths, system = self._paths, self.system

        def evaluate(*inputs: Tensor) -> Tensor:
            if self.system is not system:
                raise RuntimeError("The model has changed since these paths were drawn: call sample_paths again.")
            with torch.set_grad_enabled(torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
                _, mean, at = self._test_points(*inputs)
                mean = mean + (at.cross @ system.weights.unsqueeze(-1)).squeeze(-1)
                deviations = paths.deviations(at)[..., :num_paths]
            return mean + deviations.movedim(-1, 0)

        return evaluate

    def variance_error(self, *inputs: Tensor, num_points: int = 64) -> VarianceError:
        """Measures the latent variances at a few of the test inputs [t, d] against directly solved ones."""
        some = [x[..., :num_points, :] for x in inputs]
        with torch.no_grad():
            _, mean, at = self._test_points(*some)
            estimate = self._covariance(mean, at).diagonal(dim1=-1, dim2=-2)
            exact = SolvedVariance(self.system).diagonal(at)
            ratio = (estimate / exact).log().abs()
        return VarianceError(float(ratio.median()), float(ratio.max()), mean.shape[-1])

    def covariance_of(self, at: TestPoints, mean: Tensor) -> LinearOperator:
        """The posterior covariance where only blocks of the joint prior are known, as GPyTorch hands them out."""
        return self._covariance(mean, at)

    def _test_points(self, *inputs: Tensor) -> tuple[MultivariateNormal, Tensor, TestPoints]:
        """The joint prior, its mean at the test points, and its blocks."""
        inputs = tuple(x.unsqueeze(-1) if x.dim() == 1 else x for x in inputs)
        train = tuple(x.unsqueeze(-1) if x.dim() == 1 else x for x in self.model.train_inputs)
        if len(inputs) != len(train):
            raise ValueError(f"The model takes {len(train)} inputs, got {len(inputs)}.")
        full = []
        for x, test in zip(train, inputs, strict=True):
            if x.shape[-1] != test.shape[-1]:
                raise ValueError(f"The test inputs have {test.shape[-1]} columns, the training inputs {x.shape[-1]}.")
            if x.dtype != test.dtype or x.device != test.device:
                raise ValueError(
                    f"The test inputs are {test.dtype} on {test.device}, the training inputs {x.dtype} on {x.device}."
                )
            batch = torch.broadcast_shapes(x.shape[:-2], test.shape[:-2])
            full.append(torch.cat([x.expand(*batch, *x.shape[-2:]), test.expand(*batch, *test.shape[-2:])], dim=-2))
        joint = gpytorch.Module.__call__(self.model, *full)
        covariance = joint.lazy_covariance_matrix
        outputs = joint.loc.shape[-1] // full[0].shape[-2]
        start = train[0].shape[-2] * outputs
        operator = kernel_operator(covariance, self._products)
        prior, cross = operator[..., start:, start:], operator[..., start:, :start]
        observed = self.system.observed
        if observed is not None:
            cross = cross[..., :, observed.nonzero().squeeze(-1)]
        terms = None
        if self._has_features(covariance):
            terms = [
                replace(term, inputs=term.inputs[..., train[0].shape[-2] :, :]) for term in kernel_terms(covariance)
            ]
        points = TestPoints(to_linear_operator(prior), to_linear_operator(cross), terms)
        return joint, joint.loc[..., start:], points

    def _covariance(self, mean: Tensor, at: TestPoints) -> LinearOperator:
        if gpytorch.settings.skip_posterior_variances.on():
            return ZeroLinearOperator(*mean.shape, mean.shape[-1], dtype=mean.dtype, device=mean.device)
        variance = _WhenNeeded(self, self.system)
        if torch.is_grad_enabled() and mean.requires_grad:
            return to_linear_operator(variance.matrix(at))
        return PosteriorCovarianceLinearOperator(mean.detach(), at=at, variance=variance)

    def _has_features(self, covariance: LinearOperator) -> bool:
        """Whether the prior is a sum of kernels that all have random features."""
        try:
            terms = kernel_terms(covariance)
        except SpectralDensityMissingError:
            return False
        return all(has_random_features(term.kernel) for term in terms)

    def _sampled_variance(self) -> SampledVariance:
        if self._variance is None:
            self._variance = self._sample(self.num_samples)
        return self._variance

    def _sample(self, num_samples: int) -> SampledVariance:
        return SampledVariance(
            self.system,
            num_samples=num_samples,
            num_frequencies=self.num_frequencies,
            generator=self._generator,
        )


class _WhenNeeded(PosteriorVariance):
    """The posterior's variance by the way that suits, found out at first use: means alone cost no solves."""

    def __init__(self, posterior: PathwisePosterior, system: TrainingSystem) -> None:
        self._posterior, self._system = posterior, system

    def diagonal(self, at: TestPoints) -> Tensor:
        return self._way(at).diagonal(at)

    def matrix(self, at: TestPoints) -> Tensor:
        return self._way(at).matrix(at)

    def _way(self, at: TestPoints) -> PosteriorVariance:
        if self._posterior.system is not self._system:
            raise RuntimeError("The model has changed since this prediction was made: predict again.")
        if self._system.factor is not None:
            return ExactVariance(self._system.factor)
        if at.terms is None:
            return SolvedVariance(self._system)
        return self._posterior._sampled_variance()

"""Biased marginal log likelihood of random Fourier features, and base of the unbiased one."""

import math
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag
from gpy_iterative.errors import UnsupportedLikelihoodError
from gpy_iterative.exact.base import GaussianMarginalLogLikelihood
from gpy_iterative.exact.estimates import Estimate, ExactEstimate, check_estimated, exact_estimate
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky, positive_factor
from gpy_iterative.linear_solvers.solution import SolveStats, SolveStatus
from gpy_iterative.spectral.densities import Draws, draws_under
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.training.report import Report
from gpy_iterative.training.run import Run
from gpy_iterative.training.surrogate import with_derivatives
from gpy_iterative.training.training_system import TrainingSystem
from gpy_iterative.worker_threads import CPU


@dataclass(frozen=True)
class FrequencyReport(Report):
    """A random feature step.

    Attributes:
        num_frequencies: of the largest feature matrix.
        grid_index: drawn increment; None without grid.
        probability: of that draw.
        is_exact: the increment ended at the exact likelihood.
    """

    num_frequencies: int
    grid_index: int | None = None
    probability: float | None = None
    is_exact: bool = False


@dataclass(frozen=True, kw_only=True)
class FeatureEstimate(Estimate):
    features: Tensor  # Phi [*b, n, F], with graph
    derivatives: tuple[Tensor, ...]  # by features, noise, residual, without the exact density
    exact: ExactEstimate | None
    exact_weight: float

    def with_gradient(self, operator: LinearOperator, residual: Tensor) -> Tensor:
        for derivative in self.derivatives:
            check_estimated("derivative", derivative)
        assert isinstance(operator, NoisyLinearOperator)
        tensors = (self.features, operator.noise, residual)
        value = with_derivatives(self.value, list(zip(tensors, self.derivatives, strict=True)))
        if self.exact is None:
            return value
        exact = self.exact.with_gradient(operator, residual)
        return value + self.exact_weight * (exact - exact.detach())


class FeatureDensity:
    """Log densities of N(0, Phi Phi^T + D) for parts of Phi, with a shared Gram matrix; differentiable once.

    Phi is [*b, n, F], D and r are [*b, n]. Cost: n F^2, and k^3 for k < n columns, else n^2 k + n^3.
    """

    def __init__(self, features: Tensor, noise: Tensor, residual: Tensor) -> None:
        root = noise.sqrt().unsqueeze(-1)
        self._features, self._noise, self._residual = features, noise, residual.unsqueeze(-1)
        self._weighted, self._whitened = features / root, self._residual / root

    def log_density(self, columns: Tensor, scale: Tensor) -> Tensor:
        """Log density [*b] of N(0, Phi_k Phi_k^T + D) at r, Phi_k = Phi[:, columns] * scale."""
        num_data = self._features.shape[-2]
        by_parts = self._by_woodbury if len(columns) < num_data else self._by_dense_factor
        quadratic, log_determinant = by_parts(columns, scale)
        return -0.5 * (quadratic + log_determinant + num_data * math.log(2 * math.pi))

    @cached_property
    def _gram(self) -> Tensor:
        """Phi^T D^-1 Phi; one product gives both (equal) derivatives."""
        gram = self._weighted.mT @ self._weighted.detach()
        return 2 * gram - gram.detach()

    def _by_woodbury(self, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        gram = self._gram[..., columns, :][..., columns] * (scale.unsqueeze(-1) * scale)
        factor = positive_factor(gram + torch.eye(len(columns), dtype=gram.dtype, device=gram.device))
        with torch.no_grad():  # the coefficients minimise the quadratic form
            projected = (self._weighted.mT @ self._whitened)[..., columns, :] * scale.unsqueeze(-1)
            coefficients = factor.solve(projected)
            spread = torch.zeros_like(self._weighted[..., 0, :].unsqueeze(-1))
            spread[..., columns, :] = coefficients * scale.unsqueeze(-1)
        # Two squares: r^T D^-1 r minus the explained part would cancel.
        rest = self._whitened - self._weighted @ spread
        quadratic = rest.square().sum((-2, -1)) + coefficients.square().sum((-2, -1))
        return quadratic, factor.logdet() + self._noise.log().sum(-1)

    def _by_dense_factor(self, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        features = self._features[..., columns] * scale
        factor = positive_factor(features @ features.mT + torch.diag_embed(self._noise))
        quadratic = (self._residual * factor.solve(self._residual)).sum((-2, -1))
        return quadratic, factor.logdet()


class RandomFeatureMarginalLogLikelihood(GaussianMarginalLogLikelihood):
    resample: bool

    def _is_always_in_float64(self, operator: LinearOperator) -> bool:
        """Float32 entries would bias the exact density against that of features."""
        return True

    @abstractmethod
    def _draw(self, num_data: int, run: Run, generator: torch.Generator) -> tuple[int, Draws]:
        """Number of frequencies, other draws."""

    @abstractmethod
    def _sum(self, num_data: int, draws: Draws) -> tuple[Mapping[int, float], float, FrequencyReport]:
        """Weights of log densities by number of leading frequencies, and of the exact one."""

    def _after(self, num_data: int, run: Run, draws: Draws, densities: Sequence[Tensor]) -> Run:
        """The next run; log densities [*b] are ordered by frequencies, the exact one last."""
        return run

    def _estimate(self, system: TrainingSystem, run: Run) -> tuple[FeatureEstimate, Run]:
        start, operator, residual = time.perf_counter(), system.operator, system.residual
        if not isinstance(operator, NoisyLinearOperator):
            raise UnsupportedLikelihoodError(
                f"Random features need a noise covariance that is diagonal; {type(self.likelihood).__name__} has none. "
                "RussianRouletteMarginalLogLikelihood and HutchinsonMarginalLogLikelihood take any."
            )
        terms, num_data = system.terms(), operator.shape[-1]
        run = run.for_system(operator)
        kept = None if self.resample else run.parts.get("features")
        if kept is None:
            generator = run.generator()
            count, others = self._draw(num_data, run, generator)
            drawn = RandomFourierFeatures(count).draw(terms, generator)
            others = others | {"count": torch.tensor(count, device=CPU)}
            kept = {f"features.{name}": t for name, t in drawn.items()} | others
            run = run.having(generator, features=kept)
        draws = dict(kept)
        features = RandomFourierFeatures(int(draws["count"]))
        weights, exact_weight, report = self._sum(num_data, draws)
        with torch.set_grad_enabled(any(tensor.requires_grad for tensor in operator.representation())):
            matrix = features.differentiable(terms, draws_under("features", draws))
            matrix = matrix.expand(*operator.batch_shape, *matrix.shape[-2:])
        inputs = (matrix, operator.noise.expand(operator.shape[:-1]), residual)
        # Copies: inference tensors take no gradient.
        leaves = [tensor.detach().clone().double().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            density = FeatureDensity(*leaves)
            densities = {count: density.log_density(*features.leading(terms, count)) for count in weights}
            value = torch.stack([weight * densities[count] for count, weight in weights.items()]).sum(0)
            derivatives = torch.autograd.grad(value.sum(), leaves)
        value, exact = value.detach(), None
        ordered = [densities[count].detach() for count in sorted(densities)]
        if exact_weight:
            exact = exact_estimate(operator, residual, Cholesky())
            ordered.append(exact.value.double())
            value = value + exact_weight * ordered[-1]
        estimate = FeatureEstimate(
            value=value.to(residual),
            value_sem=torch.full_like(value, math.nan, dtype=residual.dtype),  # unknown from one draw
            status=SolveStatus.CONVERGED,
            features=matrix,
            derivatives=tuple(derivative.to(tensor) for derivative, tensor in zip(derivatives, inputs, strict=True)),
            exact=exact,
            exact_weight=exact_weight,
            stats=SolveStats(0, 0.0, 0.0, {"targets": 0.0}, time.perf_counter() - start),
            truncation=report,
        )
        return estimate, self._after(num_data, run, draws, ordered)


class RFFMarginalLogLikelihood(RandomFeatureMarginalLogLikelihood):
    """Biased baseline: the marginal log likelihood of random features.

    Its quadratic form is too large, its log-determinant too small, the lengthscales at its optimum too short.

    Args:
        num_frequencies: m per kernel term: 2 m features.

    Cost: n (2m)^2 + (2m)^3, or n^2 2m + n^3 for 2m >= n; memory about six times n 2m.

    Other options and errors: see `SingleSampleRFFMarginalLogLikelihood`.
    """

    _described = ("num_frequencies", "resample")

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
        check_flag("resample", resample)
        super().__init__(likelihood, model, solver=solver, products=products, generator=generator)
        self.num_frequencies, self.resample = num_frequencies, resample
        if not resample:
            self._line_search = None

    def _draw(self, num_data: int, run: Run, generator: torch.Generator) -> tuple[int, Draws]:
        return self.num_frequencies, {}

    def _sum(self, num_data: int, draws: Draws) -> tuple[Mapping[int, float], float, FrequencyReport]:
        return {self.num_frequencies: 1.0}, 0.0, FrequencyReport(self.num_frequencies)

"""Probe vectors xi with covariance S, for the trace in the gradient: for any S,

    tr(H^-1 dH) = E[(H^-1 xi)^T dH (S^-1 xi)].

S = I is Hutchinson's estimator; an S near H has less variance. For fixed draws, probes are smooth in the hyperparameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag
from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import warned_cholesky
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal
from gpy_iterative.preconditioners.low_rank_plus_vecchia import LowRankPlusVecchia, has_neighbours
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky
from gpy_iterative.preconditioners.preconditioner import SampledPreconditioner
from gpy_iterative.preconditioners.task_noise import build_whitened, of_independent_noise
from gpy_iterative.preconditioners.vecchia import Vecchia
from gpy_iterative.random_numbers import integers, normal
from gpy_iterative.spectral.densities import Draws, draws_under
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.worker_threads import divided

Terms = Sequence[KernelTerm] | None


@dataclass(frozen=True)
class Probes:
    """Probe vectors and their duals.

    Attributes:
        vectors: xi [*b, n, s].
        dual: S^-1 xi [*b, n, s]; None where S = H.
        covariance: S, where it is a preconditioner.
    """

    vectors: Tensor
    dual: Tensor | None
    covariance: SampledPreconditioner | None = None


@dataclass(frozen=True, kw_only=True)
class ProbeDistribution(ABC):
    """Options of a probe distribution. ValueError for num_probes below 1."""

    num_probes: int
    needs_terms: ClassVar[bool] = False
    #: Relative residual with a solver error below half of a probe's noise; None where S is far from H or S^-1 xi unknown.
    residual_of_one: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_count("num_probes", self.num_probes)

    @abstractmethod
    def draw(
        self, operator: LinearOperator, terms: Terms, generator: torch.Generator, *, others: Draws | None = None
    ) -> Draws:
        """Draws for H [*b, n, n] and its kernels; those of `others` may be shared."""

    @abstractmethod
    def probes(self, operator: LinearOperator, terms: Terms, draws: Draws, *, others: Probes | None = None) -> Probes:
        """The probes at the current hyperparameters; `others`, with the same recipe, may share their S."""


@dataclass(frozen=True, kw_only=True)
class Rademacher(ProbeDistribution):
    """Independent signs: S = I, with the least variance of all product distributions."""

    def draw(
        self, operator: LinearOperator, terms: Terms, generator: torch.Generator, *, others: Draws | None = None
    ) -> Draws:
        return {"base": random_signs(operator, operator.shape[-1], self.num_probes, generator)}

    def probes(self, operator: LinearOperator, terms: Terms, draws: Draws, *, others: Probes | None = None) -> Probes:
        return Probes(draws["base"], draws["base"])


@dataclass(frozen=True, kw_only=True)
class Gaussian(ProbeDistribution):
    """Independent normal numbers: S = I."""

    def draw(
        self, operator: LinearOperator, terms: Terms, generator: torch.Generator, *, others: Draws | None = None
    ) -> Draws:
        return {"base": standard_normal(operator, operator.shape[-1], self.num_probes, generator)}

    def probes(self, operator: LinearOperator, terms: Terms, draws: Draws, *, others: Probes | None = None) -> Probes:
        return Probes(draws["base"], draws["base"])


@dataclass(frozen=True, kw_only=True)
class Preconditioned(ProbeDistribution):
    """S of a preconditioner; pivots and order of elimination are frozen.

    The default is S = L L^T + diag(d): a pivoted Cholesky factor of K, its missing diagonal and the noise. With the
    solver's recipe one factor serves both.

    Args:
        recipe: of the preconditioner.
        correct_diagonal: give S the diagonal of H; for a pivoted Cholesky factor.

    Cost: for a factor of rank k, k kernel rows, n k (k + s) multiply-adds.
    """

    recipe: PivotedCholesky | Vecchia | LowRankPlusVecchia = field(default=PivotedCholesky(rank=100))
    correct_diagonal: bool = True
    residual_of_one: ClassVar[float | None] = 0.12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("correct_diagonal", self.correct_diagonal)
        if not isinstance(self.recipe, PivotedCholesky | Vecchia | LowRankPlusVecchia):
            raise TypeError(f"recipe must be a PivotedCholesky, Vecchia or LowRankPlusVecchia, got {self.recipe!r}.")

    def has_drawn(self, draws: Draws) -> bool:
        """Whether these may be draws of it, and not of one with another kind of recipe."""
        has_order, has_pivots = not isinstance(self.recipe, PivotedCholesky), not isinstance(self.recipe, Vecchia)
        return ("order" in draws, "pivots" in draws) == (has_order, has_pivots)

    @divided()
    def draw(
        self, operator: LinearOperator, terms: Terms, generator: torch.Generator, *, others: Draws | None = None
    ) -> Draws:
        if others is not None and "order" in others and self.has_drawn(others):
            choices = others
        else:
            noisy = of_independent_noise(operator)
            choices = self.recipe.choices(operator if noisy is None else noisy, generator)
        rank = choices["pivots"].shape[-1] if "pivots" in choices else 0
        signs = random_signs(operator, rank + operator.shape[-1], self.num_probes, generator)
        return {**choices, "base": signs}

    @divided()
    def probes(self, operator: LinearOperator, terms: Terms, draws: Draws, *, others: Probes | None = None) -> Probes:
        build, factor = partial(self.recipe.build, choices=draws), None
        if isinstance(self.recipe, PivotedCholesky):
            build = partial(build, correct_diagonal=self.correct_diagonal)
        elif others is not None:  # draws that begin together have the same pivots and order
            factor = others.covariance
        if factor is None:
            factor = build(operator) if isinstance(operator, NoisyLinearOperator) else build_whitened(build, operator)
        return Probes(*factor.sample(draws["base"]), factor)


def suited_to(distribution: ProbeDistribution, solver: Solver, operator: LinearOperator) -> ProbeDistribution:
    """`Preconditioned` by the solver's recipe, where that looks at neighbours."""
    recipe = solver.preconditioner if isinstance(solver, ConjugateGradients) else None
    is_local = isinstance(recipe, Vecchia) or (
        isinstance(recipe, LowRankPlusVecchia) and has_neighbours(of_independent_noise(operator))
    )
    if isinstance(distribution, Preconditioned) and is_local:
        return replace(distribution, recipe=recipe)
    return distribution


@dataclass(frozen=True, kw_only=True)
class RandomFeatures(ProbeDistribution):
    """Samples of the prior and its noise, xi = Phi(X) w + sqrt(noise) e.

    Args:
        num_frequencies: m, for each kernel of the prior's sum.
        corrected: see `PathwiseMarginalLogLikelihood`.
        widened: see `RandomFourierFeatures`.

    Cost: n d m; corrected also n (2m)^2 / 2, and all features in memory.
    """

    num_frequencies: int
    corrected: bool = True
    widened: bool = False
    needs_terms: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("corrected", self.corrected)
        RandomFourierFeatures(self.num_frequencies, self.widened)  # validates

    @property
    def residual_of_one(self) -> float | None:
        """See `ProbeDistribution`."""
        return 0.2 if self.corrected else None

    def draw(
        self, operator: LinearOperator, terms: Terms, generator: torch.Generator, *, others: Draws | None = None
    ) -> Draws:
        noisy, terms = _prior(operator, terms)
        features = RandomFourierFeatures(self.num_frequencies, self.widened)
        draws = frequency_draws(others or {})
        if not draws:
            draws = {f"features.{name}": tensor for name, tensor in features.draw(terms, generator).items()}
        return draws | {
            "weights": standard_normal(noisy, features.num_features(terms), self.num_probes, generator),
            "noise_base": standard_normal(noisy, noisy.shape[-1], self.num_probes, generator),
        }

    def probes(self, operator: LinearOperator, terms: Terms, draws: Draws, *, others: Probes | None = None) -> Probes:
        noisy, terms = _prior(operator, terms)
        noise = noisy.noise.detach()
        if not self.corrected:
            vectors = self.prior_sample(terms, draws) + noise.sqrt().unsqueeze(-1) * draws["noise_base"]
            return Probes(vectors, None)
        features = RandomFourierFeatures(self.num_frequencies).features(terms, draws_under("features", draws)).to(noise)
        shape = torch.broadcast_shapes(noise.shape, features.shape[:-1])  # a batch of targets may meet one prior
        covariance = LowRankPlusDiagonal(features.expand(*shape, features.shape[-1]), noise.expand(shape))
        return Probes(*covariance.sample(torch.cat([draws["weights"], draws["noise_base"]], dim=-2)), covariance)

    def prior_sample(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        """Phi(x) w [*b, t, s], differentiable in the terms' inputs."""
        features = RandomFourierFeatures(self.num_frequencies)
        return features.apply(terms, draws_under("features", draws), draws["weights"])


@dataclass(frozen=True, kw_only=True)
class ExactPrior(ProbeDistribution):
    """Exact samples of prior and noise: S = H, by a dense float64 factor."""

    def draw(
        self, operator: LinearOperator, terms: Terms, generator: torch.Generator, *, others: Draws | None = None
    ) -> Draws:
        return {
            "base": standard_normal(operator, operator.shape[-1], self.num_probes, generator),
            "noise_base": standard_normal(operator, operator.shape[-1], self.num_probes, generator),
        }

    def probes(self, operator: LinearOperator, terms: Terms, draws: Draws, *, others: Probes | None = None) -> Probes:
        noisy, _ = _prior(operator, ())
        # K may be numerically singular: half of the noise in the factor replaces jitter.
        half = noisy.noise.detach() / 2
        matrix, name = NoisyLinearOperator(noisy.kernel, half).to_dense(), "The prior covariance with half of the noise"
        lower = warned_cholesky(matrix.double(), name, matrix.dtype)
        sample = (lower @ draws["base"].double()).to(draws["base"].dtype)
        return Probes(sample + half.sqrt().unsqueeze(-1) * draws["noise_base"], None)


def frequency_draws(draws: Draws) -> Draws:
    return {name: tensor for name, tensor in draws.items() if name.startswith("features.")}


def _prior(operator: LinearOperator, terms: Terms) -> tuple[NoisyLinearOperator, Sequence[KernelTerm]]:
    if not isinstance(operator, NoisyLinearOperator) or terms is None:
        raise SpectralDensityMissingError(
            "Prior samples need noise that is independent, also between the tasks of a datum, and this system, a "
            f"{type(operator).__name__}, has another one: take rank=0 in a MultitaskGaussianLikelihood. "
            "HutchinsonMarginalLogLikelihood takes any noise; posterior(x).rsample() draws from its posterior."
        )
    return operator, terms


def standard_normal(operator: LinearOperator, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return normal((*operator.batch_shape, rows, columns), generator, operator.device, operator.dtype)


def random_signs(operator: LinearOperator, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    bits = integers(2, (*operator.batch_shape, rows, columns), generator)
    return (2 * bits - 1).to(dtype=operator.dtype, device=operator.device)

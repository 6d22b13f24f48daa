"""The average information: curvature of the log marginal likelihood from one block solve.

Gilmour, Thompson and Cullis 1995, "Average information REML", Biometrics 51. With a = H^-1 (y - mean) and q_i =
(dH/dt_i) a, A = 1/2 Q^T H^-1 Q is the mean of observed and expected information if H is linear in t. Parameters b of
the mean add M^T H^-1 M with M = dmean/db, priors the positive part of their curvature.
"""

from dataclasses import dataclass

import gpytorch
import torch
from torch import Tensor

from gpy_iterative.exact.base import Evaluation, IterativeMarginalLogLikelihood
from gpy_iterative.exact.estimates import DensityEstimate, ExactEstimate
from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.fitting.steps.directional import directional_product, tangents
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.solution import ColumnGroup
from gpy_iterative.preconditioners.preconditioner import Preconditioner
from gpy_iterative.random_numbers import permutation
from gpy_iterative.training.surrogate import surrogate
from gpy_iterative.worker_threads import CPU

#: Relative residual; the error of A is of second order in it.
TOLERANCE = 0.1
#: Smaller relative energies are rounding errors: of solutions; of derivatives, in units of the dtype's.
LEAST_EIGENVALUE, ROUNDING = 1e-5, 10.0
NOISE_SAMPLES = 3


@dataclass(frozen=True)
class Curvature:
    """The average information at one point.

    Attributes:
        matrix: A [p, p], float64, with priors; one for a batch of models.
        correction: [p], of the gradient for the residual of H a = y - mean, which may hide several nats.
        linear: [p], whether only the mean depends on it.
        solutions: H^-1 Q [*b, n, c]; None for Cholesky.
        is_rough: by one-sided differences or steps: no standard errors.
    """

    matrix: Tensor
    correction: Tensor
    linear: Tensor
    solutions: Tensor | None
    epochs: float
    is_rough: bool = False


def average_information(
    mll: IterativeMarginalLogLikelihood,
    evaluation: Evaluation,
    coordinates: Coordinates,
    *,
    generator: torch.Generator,
    initial_guess: Tensor | None = None,
) -> Curvature:
    """The average information at a point; `evaluation` has graph and tiles.

    Cost for a radial kernel with d lengthscales: one product with 1 + 2d columns, a solve with p columns.
    """
    estimate = evaluation.estimate
    columns = _Columns.of(evaluation, coordinates)
    if isinstance(estimate, ExactEstimate):
        # Not from the exact gradient's weights: large targets would drown their H^-1 beside a a^T.
        solutions, epochs = estimate.factor.solve(columns.joined), 0.0
        energies = _symmetric(columns.joined.double().mT @ solutions.double())
    else:
        assert isinstance(estimate, DensityEstimate)
        # At equal residuals, errors of other solvers have more energy: the matrix may be too small by half.
        solver = mll.solver if isinstance(mll.solver, ConjugateGradients) else ConjugateGradients()
        combine, back = _orthonormal(columns.joined, estimate.preconditioner)
        combined = lambda vectors: (vectors.to(combine) @ combine).to(columns.joined)
        rhs = combined(columns.joined)
        is_fitting = initial_guess is not None and initial_guess.shape == rhs.shape
        solution = solver.solve(
            evaluation.system.operator,
            rhs,
            groups=(ColumnGroup("curvature", rhs.shape[-1], TOLERANCE),),
            preconditioner=estimate.preconditioner,
            initial_guess=combined(initial_guess) if is_fitting else None,
            generator=generator,
        )
        energies = back.mT @ _energies(*(t.double() for t in (rhs, solution.value, solution.residual))) @ back
        solutions, epochs = (solution.value.double() @ back).to(rhs), solution.stats.epochs
    matrix = columns.information(energies, len(coordinates))
    matrix = matrix + prior_information(mll, coordinates, evaluation.value.shape)
    correction = columns.correction(solutions, _residual(evaluation), len(coordinates))
    kept = None if isinstance(estimate, ExactEstimate) else solutions
    linear = torch.zeros(len(coordinates), dtype=torch.bool, device=CPU)
    linear[columns.numbers[columns.is_mean]] = True
    linear[columns.numbers[~columns.is_mean]] = False
    return Curvature(matrix, correction, linear & coordinates.has_units, kept, epochs)


@dataclass(frozen=True)
class _Columns:
    """Derivatives of H a, then of the mean, [*b, n, c], and their coordinates [c]."""

    joined: Tensor
    numbers: Tensor
    is_mean: Tensor

    @classmethod
    def of(cls, evaluation: Evaluation, coordinates: Coordinates) -> "_Columns":
        system, estimate = evaluation.system, evaluation.estimate
        tensors = [*system.operator.representation(), system.residual]
        product = directional_product(system.operator, estimate.weights)
        of_matrix: dict[int, Tensor] = {}
        of_mean: dict[int, Tensor] = {}
        for number, (*tangent, residual) in enumerate(tangents(tensors, coordinates)):
            moved = product.along(tangent)
            if moved is not None:
                of_matrix[number] = moved.expand_as(system.residual)
            if residual is not None:
                of_mean[number] = -residual
        found = [*of_matrix.values(), *of_mean.values()]
        joined = torch.stack(found, dim=-1) if found else system.residual.new_zeros(*system.residual.shape, 0)
        numbers = torch.tensor([*of_matrix, *of_mean], dtype=torch.long, device=CPU)
        return cls(joined.detach(), numbers, torch.arange(len(found), device=CPU) >= len(of_matrix))

    def information(self, energies: Tensor, size: int) -> Tensor:
        """A [size, size] from Q^T H^-1 Q [*b, c, c]."""
        factors = torch.where(self.is_mean, 1.0, 0.5) * (self.is_mean == self.is_mean.unsqueeze(-1))
        entries = factors * energies.sum_to_size(factors.shape).cpu()
        matrix = torch.zeros(size, size, dtype=torch.float64, device=CPU)
        return matrix.index_put_((self.numbers.unsqueeze(-1), self.numbers), entries, accumulate=True)

    def correction(self, solutions: Tensor, missed: Tensor, size: int) -> Tensor:
        """(H^-1 Q)^T (y - mean - H a), [size]."""
        found = torch.zeros(size, dtype=torch.float64, device=CPU)
        inner = (solutions.double() * missed.double().unsqueeze(-1)).flatten(0, -2).sum(0).cpu()
        return found.index_add_(0, self.numbers, inner)


@torch.no_grad()
def _residual(evaluation: Evaluation) -> Tensor:
    system, weights = evaluation.system, evaluation.estimate.weights
    return system.residual - system.operator._matmul(weights.unsqueeze(-1)).squeeze(-1)


def _orthonormal(q: Tensor, preconditioner: Preconditioner | None) -> tuple[Tensor, Tensor]:
    """T and its pseudo-inverse [*b, c, c], float64: columns of Q T are orthonormal for P^-1, where P is the preconditioner.

    Derivatives nearly cancel along ridges of the likelihood, as that of outputscale and lengthscales. Solutions for Q
    would have errors beyond what they leave of A there; those for Q T have errors relative to every combination.
    """
    solved = q if preconditioner is None else preconditioner.to(q.dtype).solve(q)
    gram = _symmetric(q.double().mT @ solved.double())
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    values, vectors = torch.linalg.eigh(inverse.unsqueeze(-1) * gram * inverse.unsqueeze(-2))
    roots = torch.where(values > ROUNDING * torch.finfo(q.dtype).eps, values, 0.0).sqrt()
    combine = inverse.unsqueeze(-1) * vectors * torch.where(roots > 0, 1 / roots, 0.0).unsqueeze(-2)
    return combine, roots.unsqueeze(-1) * vectors.mT * scale.unsqueeze(-2)


def _energies(q: Tensor, v: Tensor, rest: Tensor) -> Tensor:
    """Q^T H^-1 Q [*b, c, c] in the span of V ~ H^-1 Q: (V^T Q)^T (V^T H V)^-1 (V^T Q), for Q - H V.

    The Rayleigh-Ritz value is never negative nor too large, and has the error of the best combination of columns.
    """
    cross, gram = v.mT @ q, _symmetric(v.mT @ (q - rest))
    scale = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = torch.where(scale > 0, 1 / scale, 0.0)
    cross = scale.unsqueeze(-1) * cross
    values, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * gram * scale.unsqueeze(-2))
    inverse = torch.where(values > LEAST_EIGENVALUE, 1 / values, 0.0)
    projected = vectors.mT @ cross
    return projected.mT @ (inverse.unsqueeze(-1) * projected)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def log_prior(mll: gpytorch.mlls.MarginalLogLikelihood, batch_shape: torch.Size) -> Tensor:
    total = torch.zeros(batch_shape, device=CPU)
    for _, module, prior, closure, _ in mll.model.named_priors():
        terms = prior.log_prob(closure(module))
        total = total.to(terms) + terms.reshape(*terms.shape[: len(batch_shape)], -1).sum(-1)
    return total.sum()


def prior_information(
    mll: gpytorch.mlls.MarginalLogLikelihood, coordinates: Coordinates, batch_shape: torch.Size
) -> Tensor:
    """Positive part of the priors' curvature, [p, p]."""
    values, vectors = torch.linalg.eigh(-coordinates.hessian(log_prior(mll, batch_shape)))
    return (vectors * values.clamp_min(0)) @ vectors.mT


def gradient_noise(evaluation: Evaluation, coordinates: Coordinates, num_samples: int = NOISE_SAMPLES) -> Tensor | None:
    """Samples [num_samples, p] of the gradient's probe noise; None for an exact gradient."""
    estimate, system = evaluation.estimate, evaluation.system
    if isinstance(estimate, ExactEstimate):
        return None
    assert isinstance(estimate, DensityEstimate)
    left, right = estimate.left[..., 1:], estimate.right[..., 1:]
    zero = torch.zeros_like(estimate.value)
    samples = []
    for signs in _balanced_signs(left.shape[-1], num_samples):
        noise = surrogate(system.operator, zero, left * signs.to(left), right)
        samples.append(coordinates.gradient(noise.sum(), retain_graph=True))
    return torch.stack(samples)


def _balanced_signs(size: int, num_samples: int) -> Tensor:
    """Scaled signs [num_samples, size] with sum zero: the mean over probes becomes a sample of its error."""
    if size == 1:
        return torch.ones(1, 1, device=CPU)
    generator, half = torch.Generator().manual_seed(0), size // 2
    signs = torch.zeros(num_samples, size, device=CPU)
    for row in signs:
        order = permutation(size, generator)
        row[order[:half]], row[order[half : 2 * half]] = 1.0, -1.0
    return signs * (size / (2 * half)) ** 0.5

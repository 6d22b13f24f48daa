"""The largest lower bound by a Gaussian in the span of the actions S.

With features Psi = K S L^-T, L L^T = S^T K S, the prior is f = m + Psi u + rest, u ~ N(0, I). For any q(u) = N(b, Q^-1),

    log p(y) >= sum_n E_q log p(y_n | f_n) - KL,   KL = (b^T b + tr Q^-1 - r + log det Q) / 2

(Titsias 2009, "Variational learning of inducing variables", here S^T f). At its maximum over b and Q,

    b = Psi^T E[g],   Q = I + Psi^T E[W] Psi,

with g and W the likelihood's gradient and negative Hessian. There, with Z = [E[g], E[W] Psi R^-T], R R^T = Q, and its part
Y = S (S^T K S)^-1 S^T K Z (Z itself if Psi is a root of K),

    dB = <dK, Y Z^T - Y Y^T / 2> - sum_n <dK_nn, E[W_n]> / 2,   dB/dm = E[g].

Steps are natural gradients (Khan and Lin 2017, "Conjugate-computation variational inference").
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.evidence import ObjectiveEstimate
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.quadrature import normal_rule
from gpy_iterative.laplace.newton.base import LaplaceSolution
from gpy_iterative.laplace.newton.basis import inverse_root
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.cholesky import jittered_cholesky, positive_factor
from gpy_iterative.linear_solvers.solution import SolveStatus

#: Relative jitter of covariance blocks.
JITTER = 1e-6
#: Largest step in standard deviations of q; squared, largest promised rise in nats.
TOLERANCE = 1e-5
MAX_STEPS = 200
#: Earlier steps in a mixture.
MEMORY = 5
#: Most latent values at a time in an average over q: they fit a CPU's cache.
SAMPLED_LATENTS = 2**16
#: Share of the promised rise that a step must reach; halvings of a step.
ARMIJO, MAX_HALVINGS = 1e-4, 20


@dataclass(frozen=True)
class BoundProblem:
    likelihood: PointwiseLikelihood
    mean: Tensor  # m, [n, C]
    features: Tensor  # Psi, [n C, r]
    rest: Tensor  # blocks of K - Psi Psi^T, [n, C, C]
    scale: Tensor  # prior variances, [n]

    def by_point(self, columns: Tensor) -> Tensor:
        return columns.view(*self.mean.shape, columns.shape[-1])

    def precision(self, sites: Tensor) -> Tensor:
        """Q for given sites."""
        matrix = self.features.mT @ (sites @ self.by_point(self.features)).flatten(0, 1)
        matrix = (matrix + matrix.mT) / 2
        matrix.diagonal().add_(1)
        return matrix

    def at(self, coefficients: Tensor, residual: Tensor, sites: Tensor) -> "Gaussian | None":
        """The Gaussian at b + Q^-1 residual; None if Q is indefinite or the bound not finite."""
        factor, info = torch.linalg.cholesky_ex(self.precision(sites))
        if info.any():
            return None
        coefficients = coefficients + torch.cholesky_solve(residual.unsqueeze(-1), factor).squeeze(-1)
        roots = torch.linalg.solve_triangular(factor, self.features.mT, upper=False).mT.contiguous()
        known = self.by_point(roots) @ self.by_point(roots).mT
        means, blocks = self.mean + (self.features @ coefficients).view_as(self.mean), self.rest + known
        value, gradient, curvature = _expectation(self.likelihood, means, blocks, self.scale)
        # tr Q^-1 = r - <Q - I, Q^-1>
        divergence = (coefficients.square().sum() - (sites * known).sum()) / 2 + factor.diagonal().log().sum()
        bound, size = float(value - divergence), float(value.abs() + divergence.abs())
        if not (math.isfinite(bound) and torch.isfinite(curvature).all()):
            return None
        rounding = 10 * torch.finfo(torch.float64).eps * size
        moments = means, blocks, gradient, curvature
        return Gaussian(coefficients, sites, factor, *moments, bound, rounding)


class NaturalStep(NamedTuple):
    """b [r] moves by Q^-1 (Psi^T E[g] - b), sites move to E[W]."""

    coefficients: Tensor
    residual: Tensor
    sites: Tensor
    wanted: Tensor


@dataclass(frozen=True)
class Gaussian:
    coefficients: Tensor  # b, [r]
    sites: Tensor  # [n, C, C]
    factor: Tensor  # of Q, [r, r]
    means: Tensor  # mu_n, [n, C]
    blocks: Tensor  # V_n, [n, C, C]
    gradient: Tensor  # E[g], [n, C]
    curvature: Tensor  # E[W], [n, C, C]
    bound: float
    rounding: float


@torch.no_grad()
def exact_bound(prior: LatentPrior, likelihood: PointwiseLikelihood, solution: LaplaceSolution) -> ObjectiveEstimate:
    """Over all Gaussians, from dense matrices: O((n C)^3) per step."""
    kernel = prior.operator.to_dense().detach().double()
    features, _ = jittered_cholesky(kernel, "The kernel matrix")
    return _estimate(prior, likelihood, solution, features, lambda columns: (columns @ columns.mT / 2, None))


@torch.no_grad()
def subspace_bound(prior: LatentPrior, likelihood: PointwiseLikelihood, solution: LaplaceSolution) -> ObjectiveEstimate:
    """Over those in the span of the actions, held fixed: O(n C r^2) per step."""
    actions, images = solution.inverse.actions, solution.inverse.images
    whitening = inverse_root(actions.mT @ images, torch.finfo(prior.operator.dtype).eps)
    features = images @ whitening

    def factors(columns: Tensor) -> tuple[Tensor, Tensor]:
        known = actions @ (whitening @ (features.mT @ columns))
        return known, columns - known / 2

    return _estimate(prior, likelihood, solution, features, factors)


def _estimate(
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    features: Tensor,
    factors: Callable[[Tensor], tuple[Tensor, Tensor | None]],
) -> ObjectiveEstimate:
    blocks = prior.point_blocks().detach().double()
    known = features.view(*prior.mean.shape, -1)
    rest = blocks - known @ known.mT
    if prior.num_latents == 1:
        rest = rest.clamp_min(0)
    scale = blocks.diagonal(dim1=-2, dim2=-1).mean(-1)
    problem = BoundProblem(likelihood, prior.mean.double(), features, rest, scale)
    posterior, status = _maximised(problem, solution)
    weighted = (posterior.curvature @ known).flatten(0, 1)
    roots = torch.linalg.solve_triangular(posterior.factor, weighted.mT, upper=False).mT
    left, right = factors(torch.cat([posterior.gradient.reshape(-1, 1), roots], dim=-1))

    def expected_log_prob() -> Tensor:
        roots, total = _roots(posterior.blocks, scale), torch.zeros_like(scale[0])
        for samples, _, weights in _samples(posterior.means, roots):
            total = total + weights @ likelihood.log_probs(samples).sum(-1)
        return total

    value = scale.new_tensor(posterior.bound)
    return ObjectiveEstimate(
        value=value,
        value_sem=torch.zeros_like(value),
        left=left,
        right=right,
        mean_weights=posterior.gradient.flatten(),
        likelihood_terms=expected_log_prob,
        status=status,
        advice=(
            f"The search for the largest lower bound ended with status {status.name.lower()}: value and gradient are those "
            "of a smaller one. Bound the outputscale."
        ),
        diagonal=-posterior.curvature / 2,
    )


def _maximised(problem: BoundProblem, solution: LaplaceSolution) -> tuple[Gaussian, SolveStatus]:
    # Log densities with fast tails have no finite average under a wide Gaussian.
    sites = solution.curvature.blocks()
    sites = sites + torch.eye(sites.shape[-1], dtype=sites.dtype, device=sites.device)
    coefficients = problem.features.mT @ solution.value.flatten()
    current = problem.at(coefficients, torch.zeros_like(coefficients), sites)
    if current is None:
        raise NonFiniteError(
            f"The lower bound of {problem.likelihood.name} is not finite at the mode: check data and outputscale, or use "
            "float64."
        )
    history: list[NaturalStep] = []
    for _ in range(MAX_STEPS):
        residual = problem.features.mT @ current.gradient.flatten() - current.coefficients
        step = NaturalStep(current.coefficients, residual, current.sites, current.curvature)
        history = [*history[-MEMORY:], step]
        lengths = _lengths(history, current)
        found = _ascended(problem, current, history, lengths)
        if found is None:
            return current, SolveStatus.STAGNATED
        current, promise = found
        if max(promise, float(lengths[:, -1].square().sum())) <= TOLERANCE**2:
            return current, SolveStatus.CONVERGED
    return current, SolveStatus.BUDGET_EXHAUSTED


def _lengths(steps: Sequence[NaturalStep], q: Gaussian) -> Tensor:
    """In standard deviations of q, [*, k]."""
    residuals = torch.stack([step.residual for step in steps], dim=-1)
    changes = torch.stack([(q.blocks @ (step.wanted - step.sites)).flatten() for step in steps], dim=-1)
    return torch.cat([torch.linalg.solve_triangular(q.factor, residuals, upper=False), changes])


def _ascended(
    problem: BoundProblem, current: Gaussian, steps: Sequence[NaturalStep], lengths: Tensor
) -> tuple[Gaussian, float] | None:
    """A Gaussian whose bound rises enough, and the rise that a full step promises."""
    step = steps[-1]
    shorter = [(step, 0.5**halvings) for halvings in range(MAX_HALVINGS)]
    for tried, length in [(_mixture(steps, lengths), 1.0), *shorter]:
        trial = problem.at(tried.coefficients, length * tried.residual, torch.lerp(tried.sites, tried.wanted, length))
        if trial is None:
            continue
        moved = (step.residual * (trial.coefficients - current.coefficients)).sum()
        promise = abs(float(moved + ((step.sites - step.wanted) * (trial.blocks - current.blocks)).sum() / 2))
        if trial.bound >= current.bound + ARMIJO * promise - max(trial.rounding, current.rounding):
            return trial, promise / length
    return None


def _mixture(steps: Sequence[NaturalStep], lengths: Tensor) -> NaturalStep:
    """Anderson acceleration (Walker and Ni 2011): full steps overshoot under a wide prior."""
    changes = lengths[:, :-1] - lengths[:, -1:]
    older = -torch.linalg.pinv(changes.mT @ changes, hermitian=True) @ (changes.mT @ lengths[:, -1])
    weights = [*older.tolist(), 1 - float(older.sum())]
    return NaturalStep(*(sum(map(mul, weights, parts)) for parts in zip(*steps, strict=True)))


def _expectation(
    likelihood: PointwiseLikelihood, means: Tensor, blocks: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum_n E log p(y_n | f_n) for f_n ~ N(mu_n, V_n), E[g] [n, C] and E[W] [n, C, C]."""
    with torch.enable_grad():
        covariance = blocks.detach().clone().requires_grad_()
        roots = _roots(covariance, scale)
    value, gradient, of_roots = means.new_zeros(()), torch.zeros_like(means), torch.zeros_like(roots)
    for samples, nodes, weights in _samples(means, roots.detach()):
        with torch.enable_grad():
            average = weights @ likelihood.log_probs(samples.requires_grad_()).sum(-1)
            (slopes,) = torch.autograd.grad(average, samples)
        value, gradient = value + average.detach(), gradient + slopes.sum(0)
        of_roots = of_roots + torch.einsum("knc,kd->ncd", slopes, nodes)
    (of_blocks,) = torch.autograd.grad(roots, covariance, of_roots)
    return value, gradient, -(of_blocks + of_blocks.mT)


def _roots(blocks: Tensor, scale: Tensor) -> Tensor:
    if blocks.shape[-1] == 1:
        return blocks.clamp_min(torch.finfo(blocks.dtype).tiny).sqrt()
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    jitter = (JITTER * scale).view(-1, 1, 1) * identity
    return positive_factor(blocks + jitter).lower


def _samples(means: Tensor, roots: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some values of f [k, n, C] at a time, their nodes [k, C] and weights [k]."""
    nodes, weights = (part.to(means) for part in normal_rule(means.shape[-1]))
    count = max(SAMPLED_LATENTS // means.numel(), 1)
    for some, of_some in zip(nodes.split(count), weights.split(count), strict=True):
        yield means + torch.einsum("ncd,kd->knc", roots, some), some, of_some

"""Laplace's evidence and its gradient.

    L = sum log p(y | f) - v^T (f - m) / 2 - log det H / 2,  H = I + R^T K R,  W = R R^T,

at f = m + K v, v = d log p / df. With the fixed posterior covariance Sigma, s = d/df (-1/2 sum <Sigma_n, W_n(f_n)>) and the
adjoint u = (I + W K)^-1 s of the moving mode,

    dL/dK = v v^T / 2 + u v^T - P / 2,   dL/dm = v + u,
    dL/dphi = d_phi [log p(y | f) + (K u)^T g(f) - 1/2 sum <Sigma_n, W_n(f_n)>].

W in u is the true, perhaps indefinite, negative Hessian; P = R H^-1 R^T and Sigma = K - K P K use the semi-definite
curvature (Rasmussen and Williams 2006, section 5.5.1, for diagonal W). With probes xi of covariance S and the actions' part
Q Q^T = R G R^T of P,

    tr(P dK) = tr(Q^T dK Q) + E[(R (H^-1 - G) xi)^T dK (R (I - G H) S^-1 xi)],
    K P K = K Q Q^T K + E[(K R (H^-1 - G) xi) (K R (I - G H) S^-1 xi)^T].

As G H G = G, I - G H changes no mean; it reduces the variance.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, float64_first
from gpy_iterative.exact.probes import Probes, random_signs
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.newton.base import LaplaceSolution
from gpy_iterative.laplace.newton.dense import DenseInverse
from gpy_iterative.laplace.newton.whitened import WhitenedSystem
from gpy_iterative.linear_operators.latent import LatentPrior, function_kernels
from gpy_iterative.linear_solvers.logdet.lanczos import LogDeterminantQuadrature, SharedProducts
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.surrogate import surrogate, with_derivatives

NUM_LOGDET_PROBES = 4
MAX_ADJOINT_PRODUCTS = 500


@dataclass(frozen=True)
class ObjectiveEstimate:
    """An objective L and the factors of its gradient; float64."""

    value: Tensor  # L, []
    value_sem: Tensor  # []
    left: Tensor  # dL/dK = left right^T, [n C, k] each, or left [n C, n C], or [C, n, n] of independent functions
    right: Tensor | None
    mean_weights: Tensor  # dL/dm, [n C]
    likelihood_terms: Callable[[], Tensor]  # its gradient is dL/dphi
    status: SolveStatus
    advice: str  # if only the mode was reached
    diagonal: Tensor | None = None  # more for K's diagonal blocks, [n, C, C]
    probe_epochs: float = 0.0

    def __post_init__(self) -> None:
        for name, tensor in (("value", self.value), ("gradient", self.mean_weights)):
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(
                    f"The objective's {name} is not finite: bound the hyperparameters, or use float64."
                )

    def with_gradient(self, prior: LatentPrior, likelihood: PointwiseLikelihood) -> Tensor:
        """L [] in the prior's dtype, with gradients."""
        dtype, operator, left = prior.operator.dtype, prior.operator, self.left
        kernels = function_kernels(operator)
        if kernels is not None and left.dim() == 3:
            operator, left = kernels, left.sum_to_size(kernels.shape)
        right = None if self.right is None else self.right.to(dtype)
        value = surrogate(operator, self.value.to(dtype), left.to(dtype), right)
        value = with_derivatives(value, [(prior.mean.flatten(), self.mean_weights.to(dtype))])
        if torch.is_grad_enabled() and self.diagonal is not None:
            value = value + _gradient_alone((self.diagonal * prior.point_blocks().double()).sum()).to(dtype)
        if torch.is_grad_enabled() and likelihood.has_parameters:
            value = value + _gradient_alone(self.likelihood_terms()).to(dtype)
        return value


def _gradient_alone(term: Tensor) -> Tensor:
    return term - term.detach()


@torch.no_grad()
def exact_evidence(prior: LatentPrior, likelihood: PointwiseLikelihood, solution: LaplaceSolution) -> ObjectiveEstimate:
    """From `LaplaceCholesky`'s dense factors."""
    inverse, v = solution.inverse, solution.value.flatten()
    assert isinstance(inverse, DenseInverse)
    kernel, logdet = inverse.kernel, inverse.logdet()
    covariance = solution.inverse.covariance_blocks(prior)
    source = _adjoint_source(likelihood, solution.latent, covariance)
    if likelihood.is_log_concave:
        adjoint = source - inverse.matmul(kernel.matmul(source))
    else:
        hessian = likelihood.hessian(solution.latent).detach()
        weighted = (hessian @ kernel.joint.view(*solution.latent.shape, -1)).flatten(0, 1)
        weighted.diagonal().add_(1)
        adjoint = torch.linalg.solve(weighted, source)
    return ObjectiveEstimate(
        value=solution.log_joint - logdet / 2,
        value_sem=torch.zeros_like(logdet),
        left=inverse.weights(v, v / 2 + adjoint),
        right=None,
        mean_weights=v + adjoint,
        likelihood_terms=partial(_likelihood_terms, likelihood, solution.latent, kernel.matmul(adjoint), covariance),
        status=solution.status,
        advice="",
    )


@torch.no_grad()
def stochastic_evidence(
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    *,
    num_probes: int,
    tolerance: float,
    generator: torch.Generator,
) -> ObjectiveEstimate:
    """From probes: a block solve, a product, the adjoint's solve."""
    curvature, system = solution.curvature, WhitenedSystem.at(prior.operator, solution)
    probes, of_logdet = (_probes(system, count, generator) for count in (num_probes, NUM_LOGDET_PROBES))
    quadrature = LogDeterminantQuadrature(system.operator, of_logdet.vectors, system.preconditioner)
    shared = replace(system, operator=SharedProducts.of(system.operator, quadrature))
    solved = shared.solve(probes.vectors, tolerance)
    root = solution.inverse.root
    known = curvature.root_t(curvature.pinv(root))  # G = known known^T
    # Makes the solve's error orthogonal to the actions.
    unknown = solved.value.double() + known @ (known.mT @ (solved.residual - probes.vectors).double())
    dual = probes.dual.double()
    left, right = curvature.root(unknown), curvature.root(dual)
    left_image, right_image = prior.matmul(torch.cat([left, right], dim=-1)).split(num_probes, dim=-1)
    coefficients = known.mT @ (dual + curvature.root_t(right_image))
    right, right_image = right - root @ coefficients, right_image - solution.inverse.image_of_root @ coefficients

    images = [image.view(*solution.latent.shape, num_probes) for image in (left_image, right_image)]
    unseen = images[0] @ images[1].mT / num_probes
    covariance = solution.inverse.covariance_blocks(prior) - (unseen + unseen.mT) / 2
    source = _adjoint_source(likelihood, solution.latent, covariance)
    if not source.any():
        adjoint, epochs, adjoint_status = source, 0.0, SolveStatus.CONVERGED
    elif likelihood.is_log_concave:
        adjoint, epochs, adjoint_status = _adjoint(prior, system, known, source, tolerance)
    else:
        hessian = likelihood.hessian(solution.latent).detach()
        adjoint, epochs, adjoint_status = _indefinite_adjoint(prior, hessian, source, tolerance)
    image = prior.matmul(adjoint.unsqueeze(-1))
    v = solution.value.flatten()
    logdet = quadrature.finished()
    status = max(solution.status, solved.status, adjoint_status, key=list(SolveStatus).index)
    return ObjectiveEstimate(
        value=solution.log_joint - logdet.mean.double() / 2,
        value_sem=logdet.sem.double() / 2,
        left=torch.cat([(v / 2 + adjoint).unsqueeze(-1), left / (-2 * num_probes), root / -2], dim=-1),
        right=torch.cat([v.unsqueeze(-1), right, root], dim=-1),
        mean_weights=v + adjoint,
        likelihood_terms=partial(_likelihood_terms, likelihood, solution.latent, image, covariance),
        status=status,
        advice=(
            f"A solve for the gradient ended with status {status.name.lower()}: {float64_first(prior.operator.dtype)}"
            "loosen the tolerance of LaplaceMarginalLogLikelihood, or keep outputscale and likelihood parameters in bounds."
        ),
        probe_epochs=solved.stats.epochs + 1 + epochs,
    )


def _likelihood_terms(likelihood: PointwiseLikelihood, f: Tensor, image: Tensor, covariance: Tensor) -> Tensor:
    """The bracket of dL/dphi."""
    point = f.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.log_prob(point).sum(), point, create_graph=True)
    moved = (image.view_as(f) * gradient).sum()
    return likelihood.log_prob(f).sum() + moved + likelihood.weighted_curvature(f, covariance)


def _probes(system: WhitenedSystem, count: int, generator: torch.Generator) -> Probes:
    base = random_signs(system.operator, system.preconditioner.num_signs, count, generator)
    return Probes(*system.preconditioner.sample(base), system.preconditioner)


def _adjoint_source(likelihood: PointwiseLikelihood, latent: Tensor, covariance: Tensor) -> Tensor:
    """The vector s [n C]."""
    with torch.inference_mode(False), torch.enable_grad():
        point = latent.detach().clone().requires_grad_()
        total = likelihood.weighted_curvature(point, covariance) + 0 * point.sum()  # also of a constant curvature
        (source,) = torch.autograd.grad(total, point)
    return source.flatten()


def _adjoint(
    prior: LatentPrior, system: WhitenedSystem, known: Tensor, source: Tensor, tolerance: float
) -> tuple[Tensor, float, SolveStatus]:
    """The adjoint u, kernel products, status."""
    curvature = system.curvature
    found = system.solve(curvature.root_t(prior.matmul(source.unsqueeze(-1))), tolerance)
    value = found.value.double() + known @ (known.mT @ found.residual.double())
    return source - curvature.root(value).squeeze(-1), found.stats.epochs + 1, found.status


def _indefinite_adjoint(
    prior: LatentPrior, hessian: Tensor, source: Tensor, tolerance: float
) -> tuple[Tensor, float, SolveStatus]:
    """For an indefinite W: conjugate gradients on K^-1 + W, preconditioned with K."""

    def product(x: Tensor) -> Tensor:
        return prior.matmul(x.unsqueeze(-1)).squeeze(-1)

    # The solution is K u: no product with K^-1.
    u, residual = torch.zeros_like(source), source.clone()
    image = product(residual)
    direction, direction_image = residual.clone(), image.clone()
    square = residual @ image
    threshold = tolerance * square.clamp_min(0).sqrt()
    for iteration in range(1, MAX_ADJOINT_PRODUCTS):
        applied = direction + (hessian @ direction_image.view(*hessian.shape[:2], 1)).flatten()
        slope = direction_image @ applied
        if not slope > 0:
            return u, iteration, SolveStatus.DIVERGED
        length = square / slope
        u, residual = u + length * direction, residual - length * applied
        image = product(residual)
        following = residual @ image
        if following.clamp_min(0).sqrt() <= threshold:
            return u, iteration + 1, SolveStatus.CONVERGED
        ratio = following / square
        direction, direction_image = residual + ratio * direction, image + ratio * direction_image
        square = following
    return u, MAX_ADJOINT_PRODUCTS, SolveStatus.BUDGET_EXHAUSTED

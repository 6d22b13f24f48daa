"""Laplace's evidence at the mode, and what its gradient is made of.

    L = sum log p(y | f) - v^T (f - m) / 2 - log det(I + R^T K R) / 2,  W = R R^T,

at f = m + K v with v = d log p / df. The mode moves with the hyperparameters. With Sigma the posterior covariance,
s = d/df (-1/2 sum <Sigma_n, W_n(f_n)>) for a fixed Sigma, and the adjoint u = (I + W K)^-1 s,

    dL/dK = v v^T / 2 + u v^T - P / 2,   dL/dm = v + u,
    dL/dphi = d_phi [log p(y | f) + (K u)^T g(f) - 1/2 sum <Sigma_n, W_n(f_n)>].

W in u is always the true negative Hessian, definite or not: it is how the mode moves. P and Sigma belong to the positive
semi-definite curvature. Rasmussen and Williams 2006, section 5.5.1, is the case of one function and a diagonal W.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.pointwise import CurvatureKind, PointwiseLikelihood
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.laplace.newton.whitened import dense_factor
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.surrogate import surrogate


@dataclass(frozen=True)
class EvidenceEstimate:
    """L and the factors of its gradient; float64.

    Attributes:
        value, value_sem: L and its standard error, scalars, not divided by n.
        left, right: [n C, k], with dL/dK = left right^T; right None: left is dL/dK itself, [n C, n C].
        adjoint: u [n C].
        image: K u [n C].
        covariance: Sigma's blocks [n, C, C], exact or estimated.
        solution: the mode.
        status: of the mode, or of the worst solve.
        probe_epochs: products with all probes, and with the adjoint, that the gradient took.
    """

    value: Tensor
    value_sem: Tensor
    left: Tensor
    right: Tensor | None
    adjoint: Tensor
    image: Tensor
    covariance: Tensor
    solution: LaplaceSolution
    status: SolveStatus
    probe_epochs: float = 0.0

    def __post_init__(self) -> None:
        for name, tensor in (("value", self.value), ("adjoint", self.adjoint)):
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(
                    f"The Laplace evidence's {name} is not finite: bound the hyperparameters, or use float64."
                )

    def with_gradient(self, prior: LatentPrior, likelihood: PointwiseLikelihood, kind: CurvatureKind) -> Tensor:
        """L [] in the prior's dtype, connected with the parameters behind K, m and the likelihood."""
        dtype = prior.operator.dtype
        value = surrogate(
            prior.operator,
            self.value.to(dtype),
            self.left.to(dtype),
            None if self.right is None else self.right.to(dtype),
            (self.solution.value.flatten() + self.adjoint).to(dtype),
            -prior.mean.flatten(),
        )
        if likelihood.has_parameters and torch.is_grad_enabled():
            own = self._likelihood_terms(likelihood, kind)
            value = value + (own - own.detach()).to(dtype)
        return value

    def _likelihood_terms(self, likelihood: PointwiseLikelihood, kind: CurvatureKind) -> Tensor:
        f = self.solution.latent
        moved = (self.image.view_as(f) * likelihood.differentiable_gradient(f)).sum()
        return likelihood.log_prob(f).sum() + moved + likelihood.weighted_curvature(f, self.covariance, kind)


def adjoint_source(likelihood: PointwiseLikelihood, latent: Tensor, covariance: Tensor, kind: CurvatureKind) -> Tensor:
    """S = d/df (-1/2 sum <Sigma_n, W_n(f_n)>) [n C] for fixed blocks Sigma [n, C, C]."""
    with torch.inference_mode(False), torch.enable_grad():
        point = latent.detach().clone().requires_grad_()
        total = likelihood.weighted_curvature(point, covariance, kind)
        if not total.requires_grad:  # a constant curvature
            return torch.zeros_like(latent).flatten()
        (source,) = torch.autograd.grad(total, point, allow_unused=True)
    return torch.zeros_like(latent).flatten() if source is None else source.flatten()


def true_hessian(likelihood: PointwiseLikelihood, latent: Tensor) -> Tensor:
    """The negative Hessian's blocks [n, C, C] at the mode, definite or not."""
    with torch.inference_mode(False), torch.enable_grad():
        return likelihood.hessian(latent.detach().clone()).detach()


@torch.no_grad()
def exact_evidence(
    prior: LatentPrior, likelihood: PointwiseLikelihood, solution: LaplaceSolution, kind: CurvatureKind
) -> EvidenceEstimate:
    """L and its gradient from dense matrices, without randomness: O((n C)^3) time, a few (n C)^2 numbers.

    Args:
        prior: m and K.
        likelihood: with its targets.
        solution: of LaplaceCholesky.
        kind: of the curvature.
    """
    kernel = prior.operator.to_dense().detach().double()
    curvature, root, image_of_root = solution.curvature, solution.root, solution.image_of_root
    precision = root @ root.mT
    logdet = 2 * dense_factor(kernel, curvature, prior.operator.dtype).diagonal().log().sum()
    latents, v = prior.num_latents, solution.value.flatten()
    known = image_of_root.view(-1, latents, image_of_root.shape[-1])
    covariance = diagonal_blocks(kernel, latents) - known @ known.mT
    source = adjoint_source(likelihood, solution.latent, covariance, kind)
    if likelihood.has_true_curvature(kind):
        adjoint = source - precision @ (kernel @ source)
    else:
        hessian = true_hessian(likelihood, solution.latent)
        weighted = (hessian @ kernel.view(-1, latents, kernel.shape[-1])).flatten(0, 1)
        weighted.diagonal().add_(1)
        adjoint = torch.linalg.solve(weighted, source)
    mixed = torch.outer(adjoint, v)
    return EvidenceEstimate(
        value=solution.log_joint - logdet / 2,
        value_sem=torch.zeros_like(logdet),
        left=(torch.outer(v, v) + mixed + mixed.mT - precision) / 2,
        right=None,
        adjoint=adjoint,
        image=kernel @ adjoint,
        covariance=covariance,
        solution=solution,
        status=solution.status,
    )


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks [n, C, C] on the diagonal of a dense [n C, n C]."""
    points = matrix.shape[-1] // size
    index = torch.arange(points, device=matrix.device)
    return matrix.view(points, size, points, size)[index, :, index, :]


def worst_status(statuses: Sequence[SolveStatus]) -> SolveStatus:
    """The one that needs most attention."""
    return max(statuses, key=list(SolveStatus).index)

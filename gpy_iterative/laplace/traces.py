"""Laplace's evidence and gradient from a few probes, where K cannot be a dense matrix.

tr(P dK) = tr(Q^T dK Q) + E[(R (H^-1 - G) xi)^T dK (R S^-1 xi)] for probes xi of covariance S, with H = I + R^T K R,
P = R H^-1 R^T, and Q Q^T = R G R^T the part of P that the mode's own actions know: what is left to chance is what they
do not. The same pairs estimate Sigma, K P K = K Q Q^T K + E[(K R (H^-1 - G) xi)(K R S^-1 xi)^T].
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gpy_iterative.exact.probes import Probes, random_signs, standard_normal
from gpy_iterative.laplace.evidence import EvidenceEstimate, adjoint_source, true_hessian, worst_status
from gpy_iterative.laplace.likelihoods.pointwise import CurvatureKind, PointwiseLikelihood
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.laplace.newton.whitened import nystrom_preconditioner, whitened_system
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.logdet.lanczos import stochastic_logdet
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, NystromFactor
from gpy_iterative.spectral.features import RandomFourierFeatures

Trace = Literal["preconditioned", "standard", "pathwise"]
LogDet = Literal["slq", "lowrank"]
#: Probes of the log-determinant's quadrature, which serves the value alone.
NUM_LOGDET_PROBES = 4
#: Products that the adjoint solve may take where the Hessian is not definite.
MAX_ADJOINT_PRODUCTS = 500
#: Numbers that features of all latent functions together may have.
MAX_FEATURE_NUMBERS = 2**28


@torch.no_grad()
def stochastic_evidence(
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    kind: CurvatureKind,
    *,
    trace: Trace,
    deflate: bool,
    logdet: LogDet,
    num_probes: int,
    num_frequencies: int,
    tolerance: float,
    terms: tuple[Sequence[KernelTerm], bool] | None,
    generator: torch.Generator,
) -> EvidenceEstimate:
    """L and an unbiased estimate of its gradient (but for the solves' tolerance and the noise in Sigma's square).

    Args:
        prior: m and K.
        likelihood: with its targets.
        solution: the mode.
        kind: of the curvature.
        trace: S = I + L L^T with Nystrom's approximation by the actions ("preconditioned"), S = I ("standard"), or S =
            I + R^T Phi Phi^T R with random features ("pathwise").
        deflate: take the actions' part of the trace exactly; its cost is a bilinear form with as many columns.
        logdet: "slq" is unbiased; "lowrank" is a lower bound, so that L comes out too large.
        num_probes: s.
        num_frequencies: of "pathwise".
        tolerance: relative residual of all solves.
        terms: the prior's kernels, and whether functions share them; for "pathwise".
        generator: of the probes.

    Cost beyond the mode: a block solve with s columns, two products with s columns, a solve with one.
    """
    curvature, dtype = solution.curvature, prior.operator.dtype
    system = whitened_system(prior.operator, curvature)
    preconditioner = nystrom_preconditioner(curvature, solution.actions, solution.images, dtype)
    probes = _probes(trace, system, preconditioner, solution, num_probes, num_frequencies, terms, generator)
    solver = ConjugateGradients(tolerance=tolerance)
    solved = solver.solve(system, probes.vectors, preconditioner=preconditioner)
    root = solution.root
    undeflated = solved.value.double()
    if deflate:
        known = curvature.root_t(curvature.pinv(root))
        undeflated = undeflated - known @ (known.mT @ probes.vectors.double())
    left, right = curvature.root(undeflated), curvature.root((probes.dual).double())

    blocks = _covariance_blocks(prior, solution, root, left, right, deflate=deflate)
    source = adjoint_source(likelihood, solution.latent, blocks, kind)
    adjoint, epochs, adjoint_status = _adjoint(prior, likelihood, solution, kind, source, solver, preconditioner)
    v = solution.value.flatten()
    lefts, rights = [(v / 2 + adjoint).unsqueeze(-1), left / (-2 * num_probes)], [v.unsqueeze(-1), right]
    if deflate:
        lefts, rights = [*lefts, root / -2], [*rights, root]
    value, sem = _log_determinant(system, preconditioner, solution, logdet, generator)
    return EvidenceEstimate(
        value=solution.log_joint - value / 2,
        value_sem=sem / 2,
        left=torch.cat(lefts, dim=-1),
        right=torch.cat(rights, dim=-1),
        adjoint=adjoint,
        image=prior.matmul(adjoint.unsqueeze(-1)).squeeze(-1),
        covariance=blocks,
        solution=solution,
        status=worst_status([solution.status, solved.status, adjoint_status]),
        probe_epochs=solved.stats.epochs + 2 + epochs,
    )


def _probes(
    trace: Trace,
    system: NoisyLinearOperator,
    preconditioner: NystromFactor,
    solution: LaplaceSolution,
    count: int,
    num_frequencies: int,
    terms: tuple[Sequence[KernelTerm], bool] | None,
    generator: torch.Generator,
) -> Probes:
    """Xi and S^-1 xi [n r, s]."""
    size = system.shape[-1]
    if trace == "standard":
        signs = random_signs(system, size, count, generator)
        return Probes(signs, signs)
    if trace == "preconditioned":
        base = (random_signs(system, rows, count, generator) for rows in (preconditioner.rank, size))
        return Probes.of(preconditioner, *base)
    assert terms is not None
    factor = _whitened_features(solution, *terms, num_frequencies, generator).to(system.noise)
    base = (standard_normal(system, rows, count, generator) for rows in (factor.shape[-1], size))
    return Probes.of(LowRankPlusDiagonal(factor, system.noise), *base)


def _whitened_features(
    solution: LaplaceSolution,
    terms: Sequence[KernelTerm],
    shared: bool,
    num_frequencies: int,
    generator: torch.Generator,
) -> Tensor:
    """R^T Phi [n r, F], with features of its own for each latent function. Raises ValueError where these are too many."""
    features = RandomFourierFeatures(num_frequencies)
    points, latents = solution.latent.shape
    count = features.num_features(terms)
    if points * latents * latents * count > MAX_FEATURE_NUMBERS:
        raise ValueError(
            f"trace='pathwise' would need features [{points * latents}, {latents * count}] for {latents} latent functions: "
            "use trace='preconditioned', which needs none, or fewer frequencies."
        )
    phi = features.features(terms, features.draw(terms, generator)).double()
    phi = phi.expand(latents, *phi.shape[-2:])  # where one kernel, or a batch of one, is all of theirs
    whole = phi.new_zeros(points, latents, latents, count)
    for latent in range(latents):
        whole[:, latent, latent] = phi[0 if shared else latent]
    return solution.curvature.root_t(whole.view(points * latents, latents * count))


def _covariance_blocks(
    prior: LatentPrior, solution: LaplaceSolution, root: Tensor, left: Tensor, right: Tensor, *, deflate: bool
) -> Tensor:
    """An unbiased estimate of Sigma's blocks [n, C, C]."""
    latents = prior.num_latents
    blocks = prior.point_blocks().double()
    if deflate and root.shape[-1]:
        known = solution.image_of_root.view(-1, latents, root.shape[-1])
        blocks = blocks - known @ known.mT
    images = [prior.matmul(part).view(-1, latents, part.shape[-1]) for part in (left, right)]
    estimate = images[0] @ images[1].mT / left.shape[-1]
    return blocks - (estimate + estimate.mT) / 2


def _adjoint(
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    kind: CurvatureKind,
    source: Tensor,
    solver: ConjugateGradients,
    preconditioner: NystromFactor,
) -> tuple[Tensor, float, SolveStatus]:
    """U = (I + W K)^-1 s, its products, and how the solve ended."""
    if not bool((source != 0).any()):
        return source, 0.0, SolveStatus.CONVERGED
    if not likelihood.has_true_curvature(kind):
        return indefinite_adjoint(prior, true_hessian(likelihood, solution.latent), source, solver.tolerance)
    curvature = solution.curvature
    system = whitened_system(prior.operator, curvature)
    rhs = curvature.root_t(prior.matmul(source.unsqueeze(-1)))
    found = solver.solve(system, rhs.to(prior.operator.dtype), preconditioner=preconditioner)
    return source - curvature.root(found.value.double()).squeeze(-1), found.stats.epochs + 1, found.status


@torch.no_grad()
def indefinite_adjoint(
    prior: LatentPrior, hessian: Tensor, source: Tensor, tolerance: float
) -> tuple[Tensor, float, SolveStatus]:
    """U = (I + W K)^-1 s for a W [n, C, C] that need not be definite: conjugate gradients on K^-1 + W.

    Preconditioned with K, in the unknown x = K u: one product an iteration, and no inverse of K. K^-1 + W is positive
    definite at a strict mode, whatever the signs of W.
    """

    def weighted(x: Tensor) -> Tensor:
        return (hessian @ x.view(*hessian.shape[:2], 1)).flatten()

    # u carries K^-1 x, the recurrence's residual r lives in dual coordinates with image K r.
    u, residual = torch.zeros_like(source), source.clone()
    image = prior.matmul(residual.unsqueeze(-1)).squeeze(-1)
    direction, direction_image = residual.clone(), image.clone()
    product = residual @ image
    threshold = tolerance * product.clamp_min(0).sqrt()
    for iteration in range(1, MAX_ADJOINT_PRODUCTS):
        applied = direction + weighted(direction_image)
        slope = direction_image @ applied
        if not slope > 0:
            return u, iteration, SolveStatus.DIVERGED
        length = product / slope
        u = u + length * direction
        residual = residual - length * applied
        image = prior.matmul(residual.unsqueeze(-1)).squeeze(-1)
        following = residual @ image
        if following.clamp_min(0).sqrt() <= threshold:
            return u, iteration + 1, SolveStatus.CONVERGED
        ratio = following / product
        direction, direction_image = residual + ratio * direction, image + ratio * direction_image
        product = following
    return u, MAX_ADJOINT_PRODUCTS, SolveStatus.BUDGET_EXHAUSTED


def _log_determinant(
    system: NoisyLinearOperator,
    preconditioner: NystromFactor,
    solution: LaplaceSolution,
    method: LogDet,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Log det(I + R^T K R) and its standard error."""
    if method == "lowrank":
        gram = solution.actions.mT @ solution.curvature.pinv(solution.actions)
        whole = gram + solution.actions.mT @ solution.images
        logdets = [torch.linalg.slogdet((part + part.mT) / 2)[1] for part in (whole, gram)]
        value = logdets[0] - logdets[1]
        return value, torch.zeros_like(value)
    sizes = preconditioner.rank, system.shape[-1]
    vectors = preconditioner.sample(*(random_signs(system, rows, NUM_LOGDET_PROBES, generator) for rows in sizes))
    estimate = stochastic_logdet(system, vectors, preconditioner)
    return estimate.mean.double(), estimate.sem.double()

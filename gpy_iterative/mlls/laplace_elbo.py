"""A lower bound on the log marginal likelihood from the posterior that was computed, however little that was.

q = N(m + T a, K - T M^-1 T^T) with T = K S and M = S^T (K + W^+) S is a Gaussian process posterior for some Gaussian
pseudo-data, so that

    log p(y) >= sum_n E_q log p(y_n | f_n) - KL,
    KL = (a^T S^T T a - tr(M^-1 S^T T) + log det M - log det(S^T W^+ S)) / 2.

It holds for any S, W^+ and a, which are fixed here; the derivative goes through K S alone: no adjoint, no probes.
"""

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.likelihoods import STEP_FLOOR, CurvatureKind, PointwiseLikelihood
from gpy_iterative.likelihoods.quadrature import normal_nodes
from gpy_iterative.linear_operators import LatentPrior
from gpy_iterative.solvers import LaplaceSolution

#: Nodes for one latent function, draws for more.
NUM_QUADRATURE, NUM_SAMPLES = 32, 32
#: Added to C x C covariance blocks before they are factored, relative to the prior's.
JITTER = 1e-6


def elbo(
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    kind: CurvatureKind,
    coefficients: Tensor,
    seed: int,
) -> Tensor:
    """The bound [] in float64, differentiable in everything that the prior and the likelihood depend on.

    Args:
        prior: m and K, with their graphs.
        likelihood: with its targets.
        solution: S, f and v of a mode solver, found at the same hyperparameters.
        kind: of the curvature.
        coefficients: a [B, 1], see `mean_coefficients`.
        seed: of the draws for more than one latent function: the same ones at every step.

    Cost: a product with B columns and its derivative, O(n C B^2).
    """
    actions = solution.actions
    curvature = likelihood.curvature(solution.latent, kind, STEP_FLOOR)
    mean = prior.mean.double()
    noise = actions.mT @ curvature.pinv(actions)
    noise = (noise + noise.mT) / 2
    images = (prior.operator @ actions.to(prior.operator.dtype)).double()
    gram = actions.mT @ images
    gram = (gram + gram.mT) / 2
    factor = _factor(gram + noise)
    means = mean + (images @ coefficients).view_as(mean)
    known = torch.linalg.solve_triangular(factor, images.mT, upper=False).mT
    known = known.view(*mean.shape, known.shape[-1])
    before = prior.point_blocks().double()
    expected = _expected_log_prob(likelihood, means, before - known @ known.mT, before, seed)
    quadratic = (coefficients.mT @ gram @ coefficients).squeeze()
    trace = torch.cholesky_solve(gram, factor).diagonal().sum()
    logdets = 2 * (factor.diagonal().log().sum() - _factor(noise).diagonal().log().sum())
    return expected - (quadratic - trace + logdets) / 2


@torch.no_grad()
def mean_coefficients(
    prior: LatentPrior, likelihood: PointwiseLikelihood, solution: LaplaceSolution, kind: CurvatureKind
) -> Tensor:
    """A = M^-1 S^T (f - m + W^+ g) [B, 1]: the Newton step in the span of the actions."""
    actions = solution.actions
    curvature = likelihood.curvature(solution.latent, kind, STEP_FLOOR)
    matrix = actions.mT @ (solution.images + curvature.pinv(actions))
    gradient = likelihood.gradient(solution.latent).flatten().unsqueeze(-1)
    rhs = (solution.latent - prior.mean.detach().double()).flatten().unsqueeze(-1) + curvature.pinv(gradient)
    return torch.cholesky_solve(actions.mT @ rhs, _factor((matrix + matrix.mT) / 2))


def _factor(matrix: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        raise NonFiniteError(
            "The subspace's matrix has no Cholesky factor: the curvature spans too many orders of magnitude. Use float64, "
            "or bound the outputscale."
        )
    return factor


def _expected_log_prob(
    likelihood: PointwiseLikelihood, means: Tensor, blocks: Tensor, scale: Tensor, seed: int
) -> Tensor:
    """sum_n E_q log p(y_n | f_n) for marginals N(means [n, C], blocks [n, C, C])."""
    if means.shape[-1] == 1:
        tiny = torch.finfo(torch.float64).eps
        variances = blocks[:, 0, 0].clamp_min(tiny)
        nodes, log_weights = normal_nodes(means[:, 0], variances, NUM_QUADRATURE)
        return torch.stack(
            [
                weight * likelihood.log_prob(node.unsqueeze(-1)).sum()
                for node, weight in zip(nodes, log_weights.exp().flatten(), strict=True)
            ]
        ).sum()
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(NUM_SAMPLES // 2, *means.shape, 1, generator=generator, dtype=torch.float64).to(means)
    base = torch.cat([base, -base])  # pairs: what is odd in the draws cancels
    jitter = JITTER * scale.diagonal(dim1=-2, dim2=-1).mean(-1)
    roots = _factor(blocks + torch.diag_embed(jitter.unsqueeze(-1).expand_as(means)))
    samples = means + (roots @ base).squeeze(-1)
    return torch.stack([likelihood.log_prob(sample).sum() for sample in samples]).mean()

"""From Laplace's approximation to the variational one: means and covariances that agree with what they average over.

At points where the mode saturates the likelihood, the curvature is nearly zero and the covariance nearly the prior's,
though much of that covariance's own mass lies where the likelihood does object. A refinement takes gradient and curvature
as averages over the marginals of the last approximation (`gpy_iterative.likelihoods.SmoothedLikelihood`). Its fixed point
is a Gaussian at which the variational bound is stationary; one or two refinements are most of the way.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.likelihoods.smoothed import SmoothedLikelihood
from gpy_iterative.laplace.newton.base import LaplaceSolver
from gpy_iterative.laplace.newton.solution import LaplaceSolution
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.solution import SolveProgress

#: Points whose share of K Q is held at a time.
CHUNK_POINTS = 4096


@torch.no_grad()
def refine(
    solver: LaplaceSolver,
    prior: LatentPrior,
    likelihood: PointwiseLikelihood,
    solution: LaplaceSolution,
    *,
    generator: torch.Generator | None = None,
    callback: Callable[[SolveProgress], None] | None = None,
) -> LaplaceSolution:
    """The mode under the likelihood that is averaged over a solution's marginals, and the covariance around it.

    Args:
        solver: which found the solution.
        prior: of the solution.
        likelihood: itself, not averaged.
        solution: Laplace's, or of a refinement.
        generator, callback: see `LaplaceSolver.solve`.

    Kernel products of the solution are used again; those of the answer's stats come on top. Otherwise memory O(n C^2).

    Raises as `LaplaceSolver.solve`.
    """
    smoothed = SmoothedLikelihood(likelihood, marginal_blocks(prior, solution))
    return solver.solve(prior, smoothed, initial_solution=solution, generator=generator, callback=callback)


@torch.no_grad()
def marginal_blocks(prior: LatentPrior, solution: LaplaceSolution) -> Tensor:
    """The covariance blocks [n, C, C] of a solution at the training points, computational uncertainty included.

    Cost O(n C^2 B), no kernel product.
    """
    blocks = prior.point_blocks().double().clone()
    images = solution.images.view(*prior.mean.shape, solution.images.shape[-1])
    for start in range(0, prior.num_points, CHUNK_POINTS):
        known = images[start : start + CHUNK_POINTS] @ solution.transform
        blocks[start : start + CHUNK_POINTS] -= known @ known.mT
    return blocks

"""One set of nodes for E g(e) with e ~ N(0, V) of a point's latent values, the same at every point and every call.

For one value Gauss-Hermite quadrature. For more, nodes of a Sobol sequence with their reflections, stretched to the exact
second moments: exact for polynomials of degree 3, with about half the error of as many random draws.
"""

from functools import cache

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from gpy_iterative.laplace.likelihoods.quadrature import normal_nodes

#: Nodes for one value; at a standard deviation of 10 the logit's mean curvature has errors of about a percent.
NUM_QUADRATURE = 64
#: Nodes with their reflections for more values, the least.
NUM_NODES = 128
#: Matrices that are factored at a time.
CHUNK_POINTS = 4096


@cache
def normal_rule(dimension: int) -> tuple[Tensor, Tensor]:
    """Nodes [s, C] and positive weights [s] of sum 1 for E g(z) with z ~ N(0, I), float64 on the CPU.

    Args:
        dimension: C.

    s is 64 for one dimension, else 128, and 4 C at the least.
    """
    if dimension == 1:
        nodes, log_weights = normal_nodes(torch.zeros(1), torch.ones(1), NUM_QUADRATURE)
        return nodes, log_weights.flatten().exp()
    half = NUM_NODES // 2
    while half < 2 * dimension:
        half *= 2
    # Scrambled with a seed of its own: the plain sequence starts at zero, where the normal quantile is infinite.
    uniform = SobolEngine(dimension, scramble=True, seed=0).draw(half, dtype=torch.float64)
    resolution = 2.0**-31
    nodes = torch.special.ndtri(uniform.clamp(resolution, 1 - resolution))
    factor = torch.linalg.cholesky(nodes.mT @ nodes / half)
    nodes = torch.linalg.solve_triangular(factor, nodes.mT, upper=False).mT
    return torch.cat([nodes, -nodes]), torch.full((2 * half,), 0.5 / half, dtype=torch.float64)


def symmetric_roots(blocks: Tensor) -> Tensor:
    """The symmetric square roots of covariances [n, C, C]; negative eigenvalues, of rounding size, count as zero."""
    if blocks.shape[-1] == 1:
        return blocks.clamp_min(0).sqrt()
    roots = []
    for part in blocks.split(CHUNK_POINTS):
        values, vectors = torch.linalg.eigh((part + part.mT) / 2)
        roots.append((vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT)
    return torch.cat(roots)

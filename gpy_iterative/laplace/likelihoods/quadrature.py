"""Quadrature against normal distributions, with nodes in float64 under any default dtype (GPyTorch's have the default's).

Nodes of a Gauss-Hermite rule serve functions that are smooth on the scale of the normal distribution. A much narrower
density falls between them: where it is log-concave, Gauss-Legendre panels lie on either side of the maximum of its product
with the normal density; else nodes lie densely. Averages over several values take nodes of a Sobol sequence with their
reflections, stretched to the exact second moments: exact for polynomials of degree 3.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

#: Nodes of an average over one value.
NUM_QUADRATURE = 64
#: Least number of nodes, with their reflections, of an average over several values.
NUM_NODES = 128
#: Halvings of the interval that holds a maximum.
NUM_HALVINGS = 80
#: Panels on either side, each as long as all that are nearer, and nodes of each.
NUM_PANELS, PANEL_NODES = 8, 12
#: A density that has fallen so far, in logarithm, counts for nothing.
NEGLIGIBLE = 40.0
#: Nodes of the dense rule, and the deviations that they reach.
NUM_DENSE, REACH = 4001, 12.0


@cache
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / math.sqrt(2 * math.pi)


def normal_nodes(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Nodes [count, *shape] of normal distributions [*shape], and the logarithms of their weights [count, 1, ..]."""
    nodes, weights = (torch.as_tensor(part, dtype=torch.float64, device=mean.device) for part in _nodes(count))
    shape = (count, *[1] * mean.dim())
    points = mean.double() + variance.double().sqrt() * nodes.view(shape)
    # The outermost weights underflow for many nodes: they count for nothing, and log(0) would be a NaN in gradients.
    return points, weights.clamp_min(torch.finfo(torch.float64).tiny).log().view(shape)


@cache
def normal_rule(dimension: int) -> tuple[Tensor, Tensor]:
    """Nodes [s, C] and positive weights [s] of sum 1 for E g(z) with z ~ N(0, I) of C dimensions, float64 on the CPU.

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


@cache
def graded_rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1] for functions with details near 0 that are smooth away from it: float64, CPU."""
    nodes, weights = np.polynomial.legendre.leggauss(PANEL_NODES)
    ends = np.concatenate([[0.0], 0.5 ** np.arange(NUM_PANELS - 1, -1, -1)])
    starts, lengths = ends[:-1, None], np.diff(ends)[:, None]
    points, shares = starts + lengths * (nodes + 1) / 2, lengths * weights / 2
    return torch.from_numpy(points.ravel()), torch.from_numpy(shares.ravel())


def log_concave_marginal(
    log_density: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor
) -> Tensor:
    """Log E exp(l(f)) for f ~ N(mean, variance) and a concave l, elementwise: [*shape], float64.

    The gradient of l may be infinite or NaN where l is minus infinity. Differentiable in mean and variance.
    """
    mean, deviation = mean.double(), variance.double().sqrt()
    with torch.no_grad():
        centre = _maximum(lambda u: deviation * gradient(mean + deviation * u) - u, torch.zeros_like(mean))
        points, shares = (part.to(mean.device) for part in graded_rule())
        nodes, log_weights = [], []
        for side in (-1.0, 1.0):
            reach = _reach(lambda u: log_density(mean + deviation * u) - 0.5 * u.square(), centre, side)
            lengths = reach * points.view(-1, *[1] * mean.dim())
            nodes.append(centre + side * lengths)
            log_weights.append((reach * shares.view(-1, *[1] * mean.dim())).log())
        u = torch.cat(nodes)
        prior = torch.cat(log_weights) - 0.5 * u.square() - 0.5 * math.log(2 * math.pi)
    return torch.logsumexp(prior + torch.stack([log_density(mean + deviation * node) for node in u]), 0)


def dense_marginal(log_density: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """As `log_concave_marginal` for any l, by the trapezoidal rule: for densities wider than .01 deviations."""
    mean, deviation = mean.double(), variance.double().sqrt()
    grid = torch.linspace(-REACH, REACH, NUM_DENSE, dtype=torch.float64, device=mean.device)
    log_weights = -0.5 * grid.square() - 0.5 * math.log(2 * math.pi) + (grid[1] - grid[0]).log()
    total = torch.full_like(mean, -torch.inf)
    for node, log_weight in zip(grid, log_weights, strict=True):
        total = torch.logaddexp(total, log_density(mean + deviation * node) + log_weight)
    return total


def _maximum(slope: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where a slope that falls at least as fast as -u is zero, elementwise, by bisection."""
    end = slope(start).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # the zero is between the start and the slope there
    low, high = torch.minimum(start, end), torch.maximum(start, end)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        rises = slope(middle) > 0  # not where it is NaN
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    return (low + high) / 2


def _reach(log_product: Callable[[Tensor], Tensor], centre: Tensor, side: float) -> Tensor:
    """How far from its maximum a log-concave product with exp(-u^2 / 2) is negligible on one side, or twice as far."""
    top, reach = log_product(centre), torch.full_like(centre, math.sqrt(2 * NEGLIGIBLE))
    for _ in range(NUM_HALVINGS):
        # Also where the product is NaN, out of range.
        shorter = ~(top - log_product(centre + side * reach / 2) < NEGLIGIBLE)
        if not shorter.any():
            break
        reach = torch.where(shorter, reach / 2, reach)
    return reach

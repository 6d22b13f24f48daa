"""Gauss-Hermite quadrature against normal distributions, with nodes in float64 whatever the default dtype is.

GPyTorch's own quadrature builds its nodes in the default dtype: under float32 they stay 1.5e-7 off after `.double()`.

A density that is much narrower than the normal distribution falls between the distribution's own nodes. Where it is
log-concave, the nodes go where the product of both is (Liu and Pierce 1994, "A note on Gauss-Hermite quadrature");
else they lie densely.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gpy_iterative.checks import check_count

#: Halvings of the interval that holds a maximum.
NUM_HALVINGS = 80
#: Nodes of the dense rule, and the deviations that they reach.
NUM_DENSE, REACH = 4001, 12.0


@cache
def _nodes(count: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / math.sqrt(2 * math.pi)


def normal_nodes(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Nodes [count, *shape] of normal distributions and the logarithms of their weights [count, 1, ..], float64.

    Args:
        mean: [*shape].
        variance: [*shape], not negative.
        count: number of nodes; the sum is exact for polynomials of degree 2 count - 1.

    Raises:
        ValueError: a count below 1.
    """
    check_count("num_quadrature", count)
    nodes, weights = (torch.as_tensor(part, dtype=torch.float64, device=mean.device) for part in _nodes(count))
    shape = (count, *[1] * mean.dim())
    points = mean.double() + variance.double().sqrt() * nodes.view(shape)
    # The outermost weights underflow for many nodes: they count for nothing, and log(0) would be a NaN in gradients.
    return points, weights.clamp_min(torch.finfo(torch.float64).tiny).log().view(shape)


def log_concave_marginal(
    log_density: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    curvature: Callable[[Tensor], Tensor],
    mean: Tensor,
    variance: Tensor,
    count: int,
) -> Tensor:
    """Log E exp(l(f)) for f ~ N(mean, variance) and a concave l, elementwise: [*shape], float64.

    Args:
        log_density: l at latent values [*shape].
        gradient: its derivative there; an infinite one or NaN where f is so large that l is minus infinity.
        curvature: minus its second derivative.
        mean: [*shape].
        variance: [*shape], not negative.
        count: nodes.

    Differentiable in mean and variance; the nodes are fixed where they are.
    """
    mean, deviation = mean.double(), variance.double().sqrt()
    with torch.no_grad():
        centre = _maximum(lambda u: deviation * gradient(mean + deviation * u) - u, torch.zeros_like(mean))
        steep = deviation.square() * curvature(mean + deviation * centre).clamp_min(0)
        # Where the curvature overflows, the density itself has no place of its own.
        width = (1 + torch.where(torch.isfinite(steep), steep, torch.zeros_like(steep))).rsqrt()
        nodes, log_weights = normal_nodes(centre, width.square(), count)
        # From N(centre, width^2), whose nodes these are, to N(0, 1), which is integrated against.
        log_weights = log_weights + width.log() - 0.5 * (nodes.square() - ((nodes - centre) / width).square())
    return torch.logsumexp(log_weights + torch.stack([log_density(mean + deviation * node) for node in nodes]), 0)


def dense_marginal(log_density: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """Log E exp(l(f)) for f ~ N(mean, variance) and any l, elementwise: [*shape], float64.

    The trapezoidal rule in steps of .006 deviations: right for densities that are no narrower than about .01 of them.
    """
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

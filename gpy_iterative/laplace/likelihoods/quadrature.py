"""Quadrature with float64 nodes (GPyTorch's have the default dtype)."""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

#: Nodes for one value, and least number for several.
NUM_QUADRATURE, NUM_NODES = 64, 128
NUM_HALVINGS = 80
#: Gauss-Legendre panels, each as long as all nearer ones; their nodes.
NUM_PANELS, PANEL_NODES = 8, 12
#: Negligible fall of a log density.
NEGLIGIBLE = 40.0
#: Dense rule: least reach in standard deviations; nodes on both sides, nodes near the maximum, their largest distance to
#: it; nodes of the search.
REACH, NUM_BESIDE, NUM_NEAR, NEAR, NUM_SEARCHED = 12.0, 1601, 1001, 3.0, 241


@cache
@torch.inference_mode(False)  # autograd saves them
def normal_rule(dimension: int) -> tuple[Tensor, Tensor]:
    """Nodes [s, C] and weights [s] for z ~ N(0, I) in C dimensions, float64 on the CPU.

    64 for C = 1, else at least max(128, 4 C): reflected Sobol nodes, exact for polynomials of degree 3.
    """
    if dimension == 1:
        nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(NUM_QUADRATURE))
        return nodes.unsqueeze(-1), weights / math.sqrt(2 * math.pi)
    half = NUM_NODES // 2
    while half < 2 * dimension:
        half *= 2
    # Scrambled: the plain sequence starts at zero, whose quantile is infinite.
    uniform = SobolEngine(dimension, scramble=True, seed=0).draw(half, dtype=torch.float64)
    resolution = 2.0**-31
    nodes = torch.special.ndtri(uniform.clamp(resolution, 1 - resolution))
    factor = torch.linalg.cholesky(nodes.mT @ nodes / half)
    nodes = torch.linalg.solve_triangular(factor, nodes.mT, upper=False).mT
    return torch.cat([nodes, -nodes]), nodes.new_full((2 * half,), 0.5 / half)


@cache
def graded_rule() -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1], refined towards 0."""
    nodes, weights = np.polynomial.legendre.leggauss(PANEL_NODES)
    ends = np.concatenate([[0.0], 0.5 ** np.arange(NUM_PANELS - 1, -1, -1)])
    starts, lengths = ends[:-1, None], np.diff(ends)[:, None]
    points, shares = starts + lengths * (nodes + 1) / 2, lengths * weights / 2
    return torch.from_numpy(points.ravel()), torch.from_numpy(shares.ravel())


def log_concave_marginal(
    log_density: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor
) -> Tensor:
    """Log E exp(l(f)) for f ~ N(mean, variance) and a concave l, elementwise, float64, differentiable.

    Panels on both sides of the integrand's maximum resolve narrow integrands. The gradient may be non-finite where l is
    minus infinity.
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
    """`log_concave_marginal` for any l, by the trapezoidal rule, without gradient.

    Resolves a single maximum of any width, wherever it is; of several, those near the mean and wider than .01 deviations.
    """
    mean, deviation = mean.double(), variance.double().sqrt()

    def log_product(u: Tensor) -> Tensor:
        value = log_density(mean + deviation * u) - 0.5 * u.square()
        return value.masked_fill(value.isnan(), -torch.inf)  # f out of range

    centre = _highest(log_product, torch.zeros_like(mean))
    before, after = (_reach(log_product, centre, side) for side in (-1.0, 1.0))
    ends = (
        (centre - before).clamp_max(-REACH),
        centre - before.clamp_max(NEAR),
        centre + after.clamp_max(NEAR),
        (centre + after).clamp_min(REACH),
    )
    total = torch.full_like(mean, -torch.inf)
    for (start, end), count in zip(pairwise(ends), (NUM_BESIDE, NUM_NEAR, NUM_BESIDE), strict=True):
        length = (end - start) / (count - 1)
        log_weights = length.log() - math.log(2.0), length.log()  # at the ends, between them
        for index in range(count):
            is_between = 0 < index < count - 1
            total = torch.logaddexp(total, log_product(start + index * length) + log_weights[is_between])
    return total - 0.5 * math.log(2 * math.pi)


def _highest(log_product: Callable[[Tensor], Tensor], zero: Tensor) -> Tensor:
    """The maximum, from a search within REACH, and farther out only where the product still rises there."""
    best, top = zero, log_product(zero)
    for node in torch.linspace(-REACH, REACH, NUM_SEARCHED, dtype=zero.dtype).tolist():
        value = log_product(zero + node)
        best, top = torch.where(value > top, node, best), torch.maximum(value, top)
    for _ in range(NUM_HALVINGS):
        farther = torch.where(best.abs() >= REACH, 2 * best, best)
        value = log_product(farther)
        if not (value > top).any():
            break
        best, top = torch.where(value > top, farther, best), torch.maximum(value, top)
    step = torch.where(best.abs() >= REACH, best.abs(), 2 * REACH / (NUM_SEARCHED - 1))
    low, high = best - step, best + step
    for _ in range(NUM_HALVINGS):
        first, second = low + (high - low) / 3, high - (high - low) / 3
        rises = log_product(first) < log_product(second)
        low, high = torch.where(rises, first, low), torch.where(rises, high, second)
    middle = (low + high) / 2
    return torch.where(log_product(middle) > top, middle, best)


def _maximum(slope: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The zero of a slope that falls at least as fast as -u."""
    end = slope(start).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # the zero is between start and slope(start)
    low, high = torch.minimum(start, end), torch.maximum(start, end)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        rises = slope(middle) > 0  # false for NaN
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    return (low + high) / 2


def _reach(log_product: Callable[[Tensor], Tensor], centre: Tensor, side: float) -> Tensor:
    """Distance to where the product is negligible, up to a factor 2."""
    top, reach = log_product(centre), torch.full_like(centre, math.sqrt(2 * NEGLIGIBLE))
    for _ in range(NUM_HALVINGS):
        # Also true for NaN.
        shorter = ~(top - log_product(centre + side * reach / 2) < NEGLIGIBLE)
        if not shorter.any():
            break
        reach = torch.where(shorter, reach / 2, reach)
    return reach

"""Gauss-Hermite quadrature against normal distributions, with nodes in float64 whatever the default dtype is.

GPyTorch's own quadrature builds its nodes in the default dtype: under float32 they stay 1.5e-7 off after `.double()`.
"""

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gpy_iterative.checks import check_count


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

"""The exact curvature along the directions in which nats are left, by differences of gradients.

The average information lacks second derivatives of the kernel, and may be ten times the curvature where the data say
little. Conjugate gradients for a step by the exact curvature, preconditioned by the average information (Nocedal and Wright
2006, "Numerical optimization", section 7.1), find the directions in which that counts, mostly one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpy_iterative.fitting.steps.points import with_change, with_curvature
from gpy_iterative.fitting.stopping import LEFT

#: Nats that further directions may gain by the average information.
REST = 0.01
#: Largest move for a difference: in nats, and relative to the largest one of a step. Valleys are curved.
MOST_NATS, MOST_OF_RADIUS = 0.002, 0.005


def refined(
    matrix: Tensor, gradient: Tensor, radius: Tensor, difference: Callable[[Tensor], tuple[Tensor, Tensor] | None]
) -> Tensor:
    """The matrix [p, p], positive definite, with the exact curvature along a few directions. Cost: a gradient for each.

    Args:
        gradient: [p].
        radius: [p], largest moves of a step.
        difference: for a short move, the move inside the bounds and the decrease of the gradient; None without a value.
    """
    # A smaller curvature would gain less than `LEFT` within the radius, and lead beyond.
    preconditioner = matrix + torch.diag(2 * LEFT / radius.square())
    rest, direction, before = gradient, torch.zeros_like(gradient), math.inf
    for number in range(len(gradient)):
        solved = torch.linalg.solve(preconditioner, rest)
        energy = float(rest @ solved)
        if energy <= (2 * REST if number else 0.0):
            break
        direction, before = solved + energy / before * direction, energy
        norm = float(direction @ preconditioner @ direction) ** 0.5
        length = min((2 * MOST_NATS) ** 0.5 / norm, MOST_OF_RADIUS * _reach(radius, direction))
        found = difference(length * direction)
        if found is None:
            break
        move, change = found
        slope, curvature, reach = float(rest @ move), float(move @ change), _reach(radius, move)
        if slope <= 0:
            break
        if curvature * reach < slope:
            # No optimum within the radius: a curvature that tells what is gained there.
            gain = reach * (slope - 0.5 * curvature * reach)
            return with_curvature(matrix, move, slope**2 / (2 * gain))
        matrix = with_change(matrix, move, change)
        rest = rest - slope / curvature * change
    return matrix


def _reach(radius: Tensor, move: Tensor) -> float:
    """Multiple of the move that stays within the radius."""
    return float((radius / move.abs()).min())

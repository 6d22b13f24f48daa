"""Negative curvature: what a matrix that is not positive definite shows to a solver on its way."""

import math

import torch
from linear_operator import LinearOperator
from torch import Tensor

#: Rounding errors of a product below zero at which a matrix is called indefinite: rounding alone stays above.
SLACK = 10


def is_negative(curvature: float, operator: LinearOperator, eps: float) -> bool:
    """Whether a curvature v^T H v / v^T v is negative beyond the rounding of a product.

    Args:
        curvature: found in products with H, or in blocks on its diagonal.
        operator: H [n, n].
        eps: relative rounding error of its entries.

    Looks at H's diagonal, and only where the curvature is negative.
    """
    if not curvature < 0:
        return False
    largest = float(operator.diagonal(dim1=-1, dim2=-2).abs().max())
    return curvature < -SLACK * eps * math.sqrt(operator.shape[-1]) * largest


def lowest_curvature(directions: Tensor, energies: Tensor) -> Tensor:
    """The smallest of v^T H v / v^T v [], for directions v [n, s] and their v^T H v [s]; infinite where all are zero."""
    squares = directions.square().sum(-2)
    quotients = energies / squares.clamp_min(torch.finfo(squares.dtype).tiny)
    return torch.where((squares > 0) & (quotients == quotients), quotients, torch.inf).amin()

"""Skeletons: a few points of a node, from which the kernel's values at all its points are interpolated.

K(node, far) ~ U K(skeleton, far). With A = K(node, proxies), pivoted Cholesky of A A^T picks the skeleton S, and
U = A A_S^T (A_S A_S^T)^-1: interpolative decomposition (Cheng et al. 2005) on proxies (Erlandson et al. 2020). A A^T has
half of float64's digits, so the second half of S is picked from the errors of the first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Relative squared error that counts as rounding.
ROUNDING = 64 * torch.finfo(torch.float64).eps
#: Smallest relative error for which one product A A^T suffices.
SMALLEST_PART = 1e-5


@dataclass(frozen=True)
class Skeletons:
    """Picked rows, and the interpolation from them.

    Attributes:
        pivots: picked rows, [b, r].
        weights: U^T, [b, r, m].
    """

    pivots: Tensor
    weights: Tensor

    def errors(self, values: Tensor) -> Tensor:
        picked = values.gather(1, self.pivots.unsqueeze(-1).expand(-1, -1, values.shape[2]))
        return torch.baddbmm(values, self.weights.mT, picked, alpha=-1)

    def followed_by(self, others: "Skeletons") -> "Skeletons":
        """Both together; the others were picked from the errors of these."""
        at_others = self.weights.gather(2, others.pivots.unsqueeze(1).expand(-1, self.weights.shape[1], -1))
        weights = torch.baddbmm(self.weights, at_others, others.weights, alpha=-1)
        pivots = torch.cat([self.pivots, others.pivots], dim=1)
        return Skeletons(pivots, torch.cat([weights, others.weights], dim=1))


def skeletons(values: Tensor, rank: int) -> Skeletons:
    """Picks `rank` of the m rows of A [b, m, p] in float64. Cost: 2 m^2 p + m rank^2 multiply-adds."""
    first = _picked(values, (rank + 1) // 2)
    return first.followed_by(_picked(first.errors(values), rank // 2))


def needed_rank(values: Tensor, error: float) -> int:
    """Rows to pick for this root mean square error."""
    rank = 0
    while rank < values.shape[1] and (size := float(values.square().mean().sqrt())) > error:
        picked = _picked(values, values.shape[1] - rank, error=max(error, SMALLEST_PART * size))
        rank, values = rank + picked.pivots.shape[1], picked.errors(values)
    return rank


def _picked(values: Tensor, rank: int, error: float = -1.0) -> Skeletons:
    """Picks `rank` rows by one product A A^T, or fewer once the root mean square error is at most `error`."""
    gram = torch.bmm(values, values.mT) / values.shape[-1]
    left = gram.diagonal(dim1=1, dim2=2).clone()
    factor = values.new_zeros(len(values), rank, values.shape[1])
    pivots = torch.zeros(len(values), rank, dtype=torch.int64, device=values.device)
    floor = left.amax(1, keepdim=True) * ROUNDING
    for step in range(rank):
        if error >= 0 and step and float(left.clamp_min(0).mean()) <= error**2:
            return _interpolated(pivots[:, :step], factor[:, :step])
        largest, pivot = left.max(1, keepdim=True)
        pivots[:, step] = pivot.squeeze(1)
        factor[:, step] = column = _next_column(gram, factor[:, :step], pivot, largest, floor)
        left.addcmul_(column, column, value=-1).scatter_(1, pivot, -1.0)
    return _interpolated(pivots, factor)


def _next_column(gram: Tensor, factor: Tensor, pivot: Tensor, largest: Tensor, floor: Tensor) -> Tensor:
    """The factor's next column [b, m]; a unit vector if only rounding is left."""
    row = pivot.unsqueeze(-1)
    column = gram.gather(1, row.expand(-1, -1, gram.shape[2]))
    if factor.shape[1]:
        column.baddbmm_(factor.gather(2, row.expand(-1, factor.shape[1], -1)).mT, factor, alpha=-1)
    is_rounding = largest <= floor
    column = column.squeeze(1).mul_(largest.clamp_min(torch.finfo(gram.dtype).tiny).rsqrt())
    column.masked_fill_(is_rounding, 0.0)
    return column.scatter_(1, pivot, torch.where(is_rounding, 1.0, largest.clamp_min(0).sqrt()))


def _interpolated(pivots: Tensor, factor: Tensor) -> Skeletons:
    picked = pivots.unsqueeze(1).expand(-1, pivots.shape[1], -1)
    weights = torch.linalg.solve_triangular(factor.gather(2, picked), factor, upper=True)
    identity = torch.eye(pivots.shape[1], dtype=weights.dtype, device=weights.device)
    return Skeletons(pivots, weights.scatter_(2, picked, identity.expand_as(picked).contiguous()))

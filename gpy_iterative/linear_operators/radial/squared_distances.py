"""Squared distances between blocks of inputs, by a matrix product.

[-2 x, |x|^2, 1] . [x', 1, |x'|^2] = |x - x'|^2 has rounding errors relative to the norms: in float32, kernel matrices of
inputs that span hundreds of lengthscales are indefinite. Differences of such coordinates are squared and added.
"""

import torch
from torch import Tensor

#: Allowed error in squared lengthscales; GPyTorch's smallest default noise is 1e-4.
ALLOWED_ERROR = 3e-5
#: `few` of functions with a kink, whose lengthscale depends on very near points.
FEW_OF_KINK = 2
#: `few` of k(x, X): a prediction's solve magnifies errors between near data.
FEW_OF_PREDICTION = 3
#: Coordinates up to which differences within sets of points cost no more than float64 products.
FEW_WITHIN = 32


class SquaredDistances:
    """scale * |x1_i - x2_j|^2 without autograd.

    Args:
        x1, x2: inputs [*b, n, d] and [*b, m, d], around a common centre near zero; x2 None is x1.
        scale: a constant, [] or [*b, 1, 1].
        few: up to so many coordinates, all are apart.

    Attributes:
        together, apart: coordinates in the product, and those with differences.
    """

    def __init__(self, x1: Tensor, x2: Tensor | None, scale: float | Tensor, *, few: int = 0) -> None:
        self._is_symmetric = x2 is None
        x2 = x1 if x2 is None else x2
        left, right = x1.detach() * scale**0.5, x2.detach() * scale**0.5
        self.together, self.apart = _by_spread(left, right, few)
        # Not scaled, to round as without tiles.
        self._x1, self._x2, self._scale = x1.detach().expand_as(left), x2.detach().expand_as(right), scale
        left, right = left[..., self.together], right[..., self.together]
        norms = [x.square().sum(-1, keepdim=True) for x in (left, right)]
        self._left = torch.cat([left * -2, norms[0], torch.ones_like(norms[0])], dim=-1)
        self._right = torch.cat([right, torch.ones_like(norms[1]), norms[1]], dim=-1)

    def block(
        self, rows: slice | Tensor, columns: slice, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """A block [*b, rows, columns], perhaps slightly negative; overwrites `out` and `scratch`.

        Without x2 it is exactly zero from a point to itself.
        """
        u = torch.matmul(self._left[..., rows, :], self._right[..., columns, :].mT, out=out)
        for coordinate in self.apart:
            difference = self.difference(coordinate, rows, columns, out=scratch)
            if isinstance(self._scale, Tensor):
                u.addcmul_(difference.square_(), self._scale)
            else:
                u.addcmul_(difference, difference, value=self._scale)
        if self._is_symmetric:
            size = self._x1.shape[-2]
            if isinstance(rows, slice):
                u.diagonal(rows.indices(size)[0] - columns.indices(size)[0], dim1=-2, dim2=-1).zero_()
            else:
                u.masked_fill_(rows.unsqueeze(-1) == torch.arange(size, device=u.device)[columns], 0.0)
        return u

    def difference(self, coordinate: int, rows: slice | Tensor, columns: slice, out: Tensor | None = None) -> Tensor:
        left, right = self._x1[..., rows, coordinate], self._x2[..., columns, coordinate]
        return torch.sub(left.unsqueeze(-1), right.unsqueeze(-2), out=out)


def differentiable_squared_distances(x1: Tensor, x2: Tensor | None) -> Tensor:
    """|x1_i - x2_j|^2 [*b, n, m], differentiable; x2 None is x1."""
    left, right = x1, x1 if x2 is None else x2
    together, apart = _by_spread(left.detach(), right.detach(), FEW_OF_KINK if x2 is None else FEW_OF_PREDICTION)
    rows, columns = left[..., together], right[..., together]
    norms = rows.square().sum(-1).unsqueeze(-1) + columns.square().sum(-1).unsqueeze(-2)
    distances = (norms - 2 * rows @ columns.mT).clamp_min(0)
    for coordinate in apart:
        distances = distances + (left[..., coordinate].unsqueeze(-1) - right[..., coordinate].unsqueeze(-2)).square()
    if x2 is not None:
        return distances
    return distances.masked_fill(torch.eye(x1.shape[-2], dtype=torch.bool, device=x1.device), 0.0)


def needs_differences(x1: Tensor, x2: Tensor) -> bool:
    centre = x2.detach().mean(-2, keepdim=True)
    return bool(_by_spread(x1.detach() - centre, x2.detach() - centre, FEW_OF_KINK)[1])


def _by_spread(x1: Tensor, x2: Tensor, few: int) -> tuple[list[int], list[int]]:
    """Coordinates whose rounding errors add up to less than allowed, and the others.

    Errors are those at the mean squared distance from the centre: single outliers do not count.
    """
    if x1.shape[-1] <= few:
        return [], list(range(x1.shape[-1]))
    mean_squares = [x.square().mean(-2).reshape(-1, x.shape[-1]).amax(0) for x in (x1, x2) if x.numel()]
    if not mean_squares:
        return list(range(x1.shape[-1])), []
    spread = torch.stack(mean_squares).amax(0).double()
    order = spread.argsort()
    error = torch.finfo(x1.dtype).eps * spread[order].cumsum(0)
    # NaN is together: it raises where the matrix is used.
    count = int((~(error > ALLOWED_ERROR)).sum())
    return sorted(order[:count].tolist()), sorted(order[count:].tolist())


def squared_distances_within(sets: Tensor) -> Tensor:
    """|x_i - x_j|^2 [c, k, k] within sets of points [c, k, d], without cancellation for points near the last one."""
    if sets.shape[-1] <= FEW_WITHIN:
        return torch.cdist(sets, sets, compute_mode="donot_use_mm_for_euclid_dist").square_()
    centred = (sets - sets[..., -1:, :]).double()
    products = centred @ centred.mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    return (squares.unsqueeze(-1) + squares.unsqueeze(-2)).sub_(products, alpha=2).clamp_min_(0).to(sets.dtype)

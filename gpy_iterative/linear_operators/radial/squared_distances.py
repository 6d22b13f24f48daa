"""Squared distances between blocks of inputs, as fast as a GEMM and as exact as the kernel needs them.

One matrix product of inputs that carry their norms along gives a block,

    [-2 x, |x|^2, 1] . [x', 1, |x'|^2] = |x - x'|^2,

up to rounding errors of the norms' size. In float32 these drown the distances of neighbours where the inputs stretch
over hundreds of lengthscales, as hours do over a year, and the kernel matrix is then no longer positive definite.
Such coordinates are left out of the product, and the squares of their differences are added one by one.

What is bounded is the error of points at the average distance from the centre. Of a few that lie together far outside of
all others, hundreds of lengthscales away, float32 keeps fewer digits: in elevators, whose outliers are a hundred standard
deviations out, a bound on the largest error would take all coordinates apart.
"""

import torch
from torch import Tensor

#: The rounding error that a squared distance may have, in squared lengthscales. With it the error of a kernel's value
#: stays below the smallest noise that GPyTorch's default constraint allows, 1e-4.
ALLOWED_ERROR = 3e-5
#: Coordinates up to which a function with a kink at 0 has all differences taken one by one. What its lengthscale is lies in
#: the nearest points, which are that near in few dimensions.
FEW_OF_KINK = 2
#: The same for k(x, X): a prediction solves for the nearest of thousands of data, which magnifies errors.
FEW_OF_PREDICTION = 3


class SquaredDistances:
    """scale * |x1_i - x2_j|^2 without autograd.

    Args:
        x1, x2: inputs [*b, n, d] and [*b, m, d], around a common centre near zero.
        scale: a constant that is folded in, [] or [*b, 1, 1].
        few: up to so many coordinates, all differences are taken one by one.

    Attributes:
        together, apart: the coordinates that one product serves, and those whose differences are taken one by one.

    An entry costs d + 2 multiply-adds, and two element-wise passes for every coordinate that is taken apart (three
    where the scale is a tensor).
    """

    def __init__(self, x1: Tensor, x2: Tensor, scale: float | Tensor, *, few: int = 0) -> None:
        left, right = x1.detach() * scale**0.5, x2.detach() * scale**0.5
        self.batch_shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        self.together, self.apart = _by_spread(left, right, few)
        self._left, self._right = _with_norms(left[..., self.together], right[..., self.together])
        # Not multiplied by the scale's root, which would round them differently from where no tiles are made.
        self._x1, self._x2, self._scale = x1.detach().expand_as(left), x2.detach().expand_as(right), scale

    def block(
        self, rows: slice | Tensor, columns: slice, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """A block [*b, rows, columns], negative by a rounding error at most; `out` and `scratch` are overwritten."""
        u = torch.matmul(self._left[..., rows, :], self._right[..., columns, :].mT, out=out)
        for coordinate in self.apart:
            difference = self.difference(coordinate, rows, columns, out=scratch)
            if isinstance(self._scale, Tensor):
                u.addcmul_(difference.square_(), self._scale)
            else:
                u.addcmul_(difference, difference, value=self._scale)
        return u

    def difference(self, coordinate: int, rows: slice | Tensor, columns: slice, out: Tensor | None = None) -> Tensor:
        """x1 - x2 of one coordinate, [*b, rows, columns]."""
        left, right = self._x1[..., rows, coordinate], self._x2[..., columns, coordinate]
        return torch.sub(left.unsqueeze(-1), right.unsqueeze(-2), out=out)


def few_coordinates(*, has_kink: bool, is_symmetric: bool) -> int:
    """Up to how many coordinates a kernel matrix takes all differences one by one."""
    if not is_symmetric:
        return FEW_OF_PREDICTION
    return FEW_OF_KINK if has_kink else 0


def differentiable_squared_distances(x1: Tensor, x2: Tensor | None) -> Tensor:
    """|x1_i - x2_j|^2 [*b, n, m] with the graph to the inputs, as exact as `SquaredDistances`; x2 None is x1.

    Memory O(n m), and once more for every coordinate that is taken apart.
    """
    left, right = x1, x1 if x2 is None else x2
    few = few_coordinates(has_kink=True, is_symmetric=x2 is None)
    together, apart = _by_spread(left.detach(), right.detach(), few)
    rows, columns = left[..., together], right[..., together]
    norms = rows.square().sum(-1).unsqueeze(-1) + columns.square().sum(-1).unsqueeze(-2)
    distances = (norms - 2 * rows @ columns.mT).clamp_min(0)
    for coordinate in apart:
        distances = distances + (left[..., coordinate].unsqueeze(-1) - right[..., coordinate].unsqueeze(-2)).square()
    if x2 is not None:
        return distances
    # Exactly zero, with gradient zero: the rounding of a norm would be a distance.
    return distances.masked_fill(torch.eye(x1.shape[-2], dtype=torch.bool, device=x1.device), 0.0)


def needs_differences(x1: Tensor, x2: Tensor) -> bool:
    """Whether one product for all coordinates, around a common centre, may leave more rounding error than is allowed."""
    centre = x2.detach().mean(-2, keepdim=True)
    return bool(_by_spread(x1.detach() - centre, x2.detach() - centre, FEW_OF_KINK)[1])


def _by_spread(x1: Tensor, x2: Tensor, few: int) -> tuple[list[int], list[int]]:
    """The coordinates whose rounding errors add up to no more than is allowed, and the others; none of up to `few`."""
    if x1.shape[-1] <= few:
        return [], list(range(x1.shape[-1]))
    mean_squares = [x.square().mean(-2).reshape(-1, x.shape[-1]).amax(0) for x in (x1, x2) if x.numel()]
    if not mean_squares:
        return list(range(x1.shape[-1])), []
    spread = torch.stack(mean_squares).amax(0).double()
    order = spread.argsort()
    error = torch.finfo(x1.dtype).eps * spread[order].cumsum(0)
    # Written so that NaN counts as together: it is found, and named, where the matrix is used.
    count = int((~(error > ALLOWED_ERROR)).sum())
    return sorted(order[:count].tolist()), sorted(order[count:].tolist())


def _with_norms(x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """[-2 x, |x|^2, 1] and [x', 1, |x'|^2]."""
    norms1, norms2 = (x.square().sum(-1, keepdim=True) for x in (x1, x2))
    ones1, ones2 = torch.ones_like(norms1), torch.ones_like(norms2)
    return torch.cat([x1 * -2, norms1, ones1], dim=-1), torch.cat([x2, ones2, norms2], dim=-1)

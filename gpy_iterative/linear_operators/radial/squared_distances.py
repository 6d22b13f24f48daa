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

from gpy_iterative.linear_operators.tiles.tiles import RowBlocks

#: The rounding error that a squared distance may have, in squared lengthscales. With it the error of a kernel's value
#: stays below the smallest noise that GPyTorch's default constraint allows, 1e-4.
ALLOWED_ERROR = 3e-5
#: Coordinates up to which a function with a kink at 0 has all differences taken one by one. What its lengthscale is lies in
#: the nearest points, which are that near in few dimensions.
FEW = 2


class SquaredDistances:
    """scale * |x1_i - x2_j|^2 without autograd.

    Args:
        x1, x2: inputs [*b, n, d] and [*b, m, d], around a common centre near zero.
        scale: a constant that is folded in, [] or [*b, 1, 1].
        has_kink: whether it is for a function that is not differentiable at 0.
        length: rows and columns of the tiles that are asked for.

    An entry costs d + 2 multiply-adds, and two element-wise passes for every coordinate that is taken apart (three
    where the scale is a tensor).
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: float | Tensor,
        *,
        has_kink: bool = False,
        length: int,
    ) -> None:
        x1, x2, self._scale = x1.detach(), x2.detach(), scale
        left, right = x1 * scale**0.5, x2 * scale**0.5
        self.batch_shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        #: The coordinates that one product serves, and those whose differences are taken one by one.
        self.together, self.apart = together, apart = _by_spread(left, right, has_kink)
        of_rows = lambda x: RowBlocks.of(x, x1.shape[-2], length)
        of_columns = lambda x: RowBlocks.of(x, x2.shape[-2], length)
        self._left = of_rows(_with_norms(left[..., together], is_left=True))
        self._right = of_columns(_with_norms(right[..., together], is_left=False))
        # Not multiplied by the scale's root, which would round them differently from where no tiles are made.
        self._left_apart = of_rows(x1.expand_as(left)[..., apart])
        self._right_apart = of_columns(x2.expand_as(right)[..., apart])

    def tile(self, i: int, j: int, *, out: Tensor, scratch: Tensor) -> Tensor:
        """The tile (i, j), [*b, rows, columns], negative by a rounding error at most.

        `out` and `scratch` of that shape are overwritten.
        """
        u = torch.matmul(self._left.block(i).mT, self._right.block(j), out=out)
        return _add_squares_(u, self._left_apart.block(i), self._right_apart.block(j), self._scale, scratch)

    def difference(self, number: int, i: int, j: int) -> Tensor:
        """x1 - x2 of the coordinate `apart[number]`, in the tile (i, j): [*b, rows, columns]."""
        return _difference(self._left_apart.block(i), self._right_apart.block(j), number)

    def block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The same of any rows and columns, by their numbers: [*b, rows, columns]."""
        u = self._left.rows(rows) @ self._right.rows(columns).mT
        return _add_squares_(u, self._left_apart.rows(rows).mT, self._right_apart.rows(columns).mT, self._scale)


def _add_squares_(
    u: Tensor, rows: Tensor, columns: Tensor, scale: float | Tensor, scratch: Tensor | None = None
) -> Tensor:
    """Adds to u [..., n, m] the squared differences of coordinates [..., c, n] and [..., c, m] times scale, one by one."""
    for coordinate in range(rows.shape[-2]):
        difference = _difference(rows, columns, coordinate, scratch)
        if isinstance(scale, Tensor):
            u.addcmul_(difference.square_(), scale)
        else:
            u.addcmul_(difference, difference, value=scale)
    return u


def _difference(rows: Tensor, columns: Tensor, coordinate: int, out: Tensor | None = None) -> Tensor:
    return torch.sub(rows[..., coordinate, :].unsqueeze(-1), columns[..., coordinate, :].unsqueeze(-2), out=out)


def differentiable_squared_distances(x1: Tensor, x2: Tensor | None) -> Tensor:
    """|x1_i - x2_j|^2 [*b, n, m] with the graph to the inputs, as exact as `SquaredDistances`; x2 None is x1.

    Memory O(n m), and once more for every coordinate that is taken apart.
    """
    left, right = x1, x1 if x2 is None else x2
    together, apart = _by_spread(left.detach(), right.detach(), True)
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
    return bool(_by_spread(x1.detach() - centre, x2.detach() - centre, True)[1])


def _by_spread(x1: Tensor, x2: Tensor, has_kink: bool) -> tuple[list[int], list[int]]:
    """The coordinates whose rounding errors add up to no more than is allowed, and the others."""
    if has_kink and x1.shape[-1] <= FEW:
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


def _with_norms(x: Tensor, *, is_left: bool) -> Tensor:
    norms, ones = x.square().sum(-1, keepdim=True), torch.ones_like(x[..., :1])
    if not x.shape[-1]:
        norms = ones = x.new_zeros(*x.shape[:-1], 1)
    return torch.cat([x * -2, norms, ones] if is_left else [x, ones, norms], dim=-1)

"""Entries of radial kernel matrices and their products in batches of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from gpy_iterative.linear_operators.radial.functions import RadialFunction

#: Coordinates of widest spread that are subtracted.
MOST_DIFFERENCES = 3
#: One in so many proxies is for derivatives.
DERIVATIVE_PART = 4


@dataclass(frozen=True)
class ScaledInputs:
    """Scaled inputs of points [b, m].

    Attributes:
        apart: coordinates that are subtracted, [b, c, m].
        together: the others, [b, m, k], or None.
    """

    apart: Tensor
    together: Tensor | None

    def of(self, nodes: Tensor) -> "ScaledInputs":
        together = None if self.together is None else self.together.index_select(0, nodes)
        return ScaledInputs(self.apart.index_select(0, nodes), together)


#: Those of all factors.
Inputs = Sequence[ScaledInputs]


class RadialEntries:
    """Entries f(|x_i - x_j|^2) of a symmetric matrix, without the outputscale.

    Args:
        x: scaled inputs [n, d].
        alpha: [1] or None.
    """

    def __init__(self, x: Tensor, function: RadialFunction, alpha: Tensor | None) -> None:
        self.positions, self.dtype, self.device = x, x.dtype, x.device
        self._original, self.alpha = function, alpha
        root = torch.as_tensor(function.scale(alpha), dtype=x.dtype, device=x.device).sqrt().reshape(())
        by_spread = x.std(0, correction=0).argsort(descending=True)
        apart, together = by_spread[:MOST_DIFFERENCES], by_spread[MOST_DIFFERENCES:]
        scaled = x * root
        self._apart = [column.contiguous() for column in scaled[:, apart].unbind(1)]
        self._together = scaled[:, together].contiguous() if len(together) else None
        self.function = function.at_exact_distances() if self._together is None else function

    def double(self) -> "RadialEntries":
        alpha = None if self.alpha is None else self.alpha.double()
        entries = RadialEntries(self.positions.double(), self._original, alpha)
        # Of the same points: float32 rounds scaled inputs, and interpolations of others would not fit these entries.
        entries._apart = [column.double() for column in self._apart]
        entries._together = None if self._together is None else self._together.double()
        return entries

    def at_distances(self, distances: Tensor) -> Tensor:
        """Float64 entries at these distances."""
        scale = torch.as_tensor(self._original.scale(self.alpha), dtype=torch.float64, device=distances.device)
        u = distances.double().square().view(1, -1) * scale.reshape(())
        alpha = None if self.alpha is None else self.alpha.double()
        return self._original.value_(u, torch.empty_like(u), alpha).view(distances.shape)

    def inputs(self, rows: Tensor) -> ScaledInputs:
        picked = [column.index_select(0, rows.flatten()).view(rows.shape) for column in self._apart]
        together = None if self._together is None else self._together[rows]
        return ScaledInputs(torch.stack(picked, dim=1), together)

    def blocks(
        self, left: ScaledInputs, right: ScaledInputs, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> Tensor:
        """Blocks [b, m, p] between points left [b, m] and right [b, p]; overwrites `out` and `scratch`."""
        u, scratch = self.squared_distances(left, right, out, scratch)
        return self.function.value_(u, scratch, self.alpha)

    def derivatives(self, points: ScaledInputs, proxies: ScaledInputs) -> Tensor:
        """As `blocks`: derivatives by log lengthscales, in turn."""
        u, scratch = self.squared_distances(points, proxies)
        squares, num = u.clone(), len(self._apart) + (self._together is not None)
        # In pairs, because a node's own proxies alternate with its parent's (`level_proxies`).
        turn = torch.arange(u.shape[-1], device=u.device) // 2 % num
        for index, (own, given) in enumerate(zip(points.apart.unbind(1), proxies.apart.unbind(1), strict=True)):
            squares[..., turn == index] = (own.unsqueeze(-1) - given[:, turn == index].unsqueeze(-2)).square_()
        derivatives = self.function.value_and_derivative_(u, scratch, self.alpha)[1].mul_(squares)
        return derivatives.mul_(2 * self.function.derivative_factor / self._original.scale(self.alpha))

    def squared_distances(
        self, left: ScaledInputs, right: ScaledInputs, out: Tensor | None = None, scratch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Times the function's scale, and scratch of their shape; see `blocks`."""
        own, other = left.apart.unsqueeze(-1).unbind(1), right.apart.unsqueeze(-2).unbind(1)
        first, *others = zip(own, other, strict=True)
        u = torch.sub(*first, out=out).square_()
        scratch = torch.empty_like(u) if scratch is None else scratch
        for pair in others:
            torch.sub(*pair, out=scratch)
            u.addcmul_(scratch, scratch)
        if left.together is not None and right.together is not None:
            centre = left.together[:, :1]
            points, others = left.together - centre, right.together - centre
            u.add_(points.square().sum(-1, keepdim=True)).add_(others.square().sum(-1).unsqueeze(1))
            u.baddbmm_(points, others.mT, alpha=-2)
        return u, scratch


class ProductEntries:
    """Entries of a product of one or more radial kernel matrices."""

    def __init__(self, factors: Sequence[RadialEntries]) -> None:
        self.factors, first = factors, factors[0]
        self.positions = torch.cat([factor.positions for factor in factors], dim=-1)
        self.dtype, self.device = first.dtype, first.device

    def __len__(self) -> int:
        return len(self.positions)

    def double(self) -> "ProductEntries":
        return ProductEntries([factor.double() for factor in self.factors])

    def at_distances(self, distances: Tensor) -> Tensor:
        """The largest float64 entries at these distances: log f is convex in q, so those along one factor."""
        return reduce(torch.maximum, [factor.at_distances(distances) for factor in self.factors])

    def inputs(self, rows: Tensor) -> Inputs:
        return [factor.inputs(rows) for factor in self.factors]

    def blocks(self, left: Inputs, right: Inputs) -> Tensor:
        """Blocks [b, m, p] between points left [b, m] and right [b, p]."""
        given = zip(self.factors, left, right, strict=True)
        return reduce(torch.Tensor.mul_, [factor.blocks(*pair) for factor, *pair in given])

    def at_proxies(self, rows: Tensor, proxies: Tensor) -> Tensor:
        """Entries [b, m, p] of rows [b, m] at proxies [b, p], which skeletons interpolate.

        The last proxies have derivatives by log lengthscales, which a skeleton for values need not interpolate: on a line,
        one point suffices for exp(-r).
        """
        points, count = self.inputs(rows), len(proxies[0]) // DERIVATIVE_PART
        first, last = proxies.split([len(proxies[0]) - count, count], dim=1)
        found = [self.blocks(points, self.inputs(first))]
        for number, part in enumerate(last.tensor_split(len(self.factors), dim=1)):
            given = zip(self.factors, points, self.inputs(part), strict=True)
            blocks = [
                factor.derivatives(*pair) if place == number else factor.blocks(*pair)
                for place, (factor, *pair) in enumerate(given)
            ]
            found.append(reduce(torch.Tensor.mul_, blocks))
        return torch.cat(found, dim=2)

"""The far field of exp(-q / 2) at points some of whose coordinates are those of circles.

A period moves neighbours on a circle by different turns, which the far field's derivative cannot tell: it moves skeletons
in place of points. But f' = -f / 2, so products with the kernel give the derivative by each point.
"""

from typing import Any

import torch

from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.radial.tiles import RadialDerivative
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TileWeights

_ALL = slice(None)


class PeriodicFarField(RadialFarField):
    """`RadialFarField` whose first `angles` coordinates have derivatives by single points."""

    def __init__(self, *args: Any, angles: int) -> None:
        super().__init__(*args)
        self._angles = angles

    def derivative(self, weights: TileWeights, *, value: bool, alpha: bool) -> RadialDerivative:
        """See `RadialTiles.derivative`. Cost: a product with 1 + angles columns for each of the weights' factors."""
        field = self.far_field() if isinstance(weights, BilinearWeights) else None
        if field is None:
            return super().derivative(weights, value=value, alpha=alpha)
        x, right = self.x1[:, : self._angles], weights.right
        factors = torch.cat([right, *(coordinate * right for coordinate in x.mT.unsqueeze(-1))], dim=-1)
        products = self.product(_ALL, _ALL, factors).unflatten(-1, (-1, right.shape[-1]))
        # sum_j W_ij f_ij (x_j - x_i), and without the difference.
        plain, of_angles = torch.linalg.vecdot(products, weights.left.unsqueeze(-2)).double().tensor_split([1], dim=-1)
        of_angles -= x * plain
        if self._angles == self.x1.shape[-1]:
            return RadialDerivative(of_angles.to(x.dtype), plain.sum() / 2, plain.new_zeros(()))
        found = super().derivative(weights, value=value, alpha=alpha)
        found.x1[:, : self._angles] = of_angles
        return found

"""Products and derivatives of a radial kernel matrix by KeOps, in place of tiles."""

import torch
from torch import Tensor

from gpy_iterative.linear_operators.extensions import Rows
from gpy_iterative.linear_operators.radial.keops import derivative_sum, kernel_sum
from gpy_iterative.linear_operators.radial.tiles import RadialDerivative, RadialTiles, derivative_of_scales
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TileWeights


class RadialKeOps(RadialTiles):
    """The same matrix as `RadialTiles`, whose sums over rows and columns are KeOps reductions.

    Entries are evaluated for every product and never kept: memory is O((n + m)(d + s)). Where a solver or a
    preconditioner asks for entries themselves (a principal block, rows of a pivoted Cholesky factor), they are tiles.
    Distances come from differences, so they are exact where a GEMM's would be rounding noise.
    """

    @property
    def keeps_derivatives(self) -> bool:
        """No: gradients are reductions too."""
        return False

    def matmul(self, rhs: Tensor) -> Tensor:
        x1, x2 = self._scaled_inputs()
        return kernel_sum(self.function, x1, x2, self.alpha, rhs)

    def rows_matmul(self, rows: Rows, rhs: Tensor) -> Tensor:
        x1, x2 = self._scaled_inputs()
        return kernel_sum(self.function, x1[rows], x2, self.alpha, rhs)

    def columns_matmul(self, columns: slice, rhs: Tensor) -> Tensor:
        x1, x2 = self._scaled_inputs()
        return kernel_sum(self.function, x1, x2[columns], self.alpha, rhs)

    def derivative(
        self, weights: TileWeights, *, value: bool, alpha: bool, scales_only: bool = False
    ) -> RadialDerivative:
        """The derivative for W = weights, in one pass; in two of them for a matrix that is not symmetric.

        Weights that are no product of a few vectors fill as much memory as tiles, which are used for them.
        """
        if not isinstance(weights, BilinearWeights):
            return super().derivative(weights, value=value, alpha=alpha, scales_only=scales_only)
        x1, x2 = self._scaled_inputs()
        dimension, factor = x1.shape[-1], 2 / self.function.scale(self.alpha) ** 0.5
        if self.symmetric:
            rows = derivative_sum(self.function, x1, x1, self.alpha, *weights.both_sides())
            dx2, pairs = None, 0.5  # every pair is met from both sides
        else:
            left, right = weights.left, weights.right
            rows = derivative_sum(self.function, x1, x2, self.alpha, left, right)
            dx2 = factor * derivative_sum(self.function, x2, x1, self.alpha, right, left)[..., :dimension]
            pairs = 1.0
        sums = pairs * rows[..., dimension:].sum(-2, dtype=torch.float64)
        dvalue, dalpha = sums[..., 0], sums[..., 1] if sums.shape[-1] > 1 else torch.zeros_like(sums[..., 0])
        dx1 = factor * rows[..., :dimension]
        if scales_only and self.symmetric:
            dx1 = derivative_of_scales((dx1.double() * self.x1).sum(-2), self.x1)
        return RadialDerivative(dx1, dx2, dvalue, dalpha)

    def _scaled_inputs(self) -> tuple[Tensor, Tensor]:
        """Inputs into which the radial function's constant is folded."""
        root = self.function.scale(self.alpha) ** 0.5
        x1 = self.x1 * root
        return x1, x1 if self.x2 is None else self.x2 * root

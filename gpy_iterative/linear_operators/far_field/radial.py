"""A radial kernel matrix with a far field."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.entries import ProductEntries, RadialEntries
from gpy_iterative.linear_operators.far_field.far_field import FarField, far_field
from gpy_iterative.linear_operators.far_field.levels import Batch
from gpy_iterative.linear_operators.radial.tiles import RadialDerivative, RadialTiles
from gpy_iterative.linear_operators.tiles.cache import Tile
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TileWeights
from gpy_iterative.worker_threads import divided

_ALL = slice(None)
#: Rounding error of squared inputs, in squared lengthscales, above which derivatives take differences of pairs.
LARGEST_CANCELLATION = 1e-8


class RadialFarField(RadialTiles):
    """Tiles of an unbatched symmetric matrix f(|x_i - x_j|^2).

    Full products, bilinear and directional derivatives use the far field, if it pays.

    Args:
        args: of `RadialTiles`.
        angles: the first so many coordinates are those of circles; RBF only. A period moves neighbours on a circle by
            different turns, which the far field's derivative cannot tell: it moves skeletons in place of points.
        number: of the factor of a product that the tiles are a function of.
    """

    def __init__(self, *args: Any, angles: int = 0, number: int = 0, is_centred: bool = False) -> None:
        super().__init__(*args, is_centred=is_centred)
        self._angles, self.number = angles, number

    @cached_property
    def own_entries(self) -> RadialEntries:
        return RadialEntries(self.x1, self._function, self.alpha)

    @property
    def entries(self) -> ProductEntries:
        return ProductEntries([self.own_entries])

    def far_field(self) -> FarField | None:
        """The far field, made once for these tensors; None if it does not pay."""
        wanted = self.products.far_field
        assert wanted is not None
        with self.cache.serving(*self.owner):
            return cast(FarField | None, self.cache.structure(lambda: far_field(self.entries, wanted)))

    def layout(self) -> tuple[str, list[Tensor]]:
        description, tensors = super().layout()
        field = self.far_field()
        if field is None:
            return description, tensors
        parts = field.levels.parts
        blocks = ", ".join(str(tuple(part.points.shape)) for part in parts)
        return f"{description}, a far field of blocks {blocks}", [*tensors, *(part.pairs for part in parts)]

    def product(
        self, rows: slice, columns: slice, rhs: Tensor, values: Callable[[Any], Tensor] | None = None
    ) -> Tensor:
        field = self.far_field() if rows == columns == _ALL else None
        if field is None:
            return super().product(rows, columns, rhs, values)
        return self._product(field, rhs, values or self.values)

    @divided()
    def _product(self, field: FarField, rhs: Tensor, values: Callable[[Any], Tensor]) -> Tensor:
        columns = rhs.movedim(-2, 0)
        with self.cache.serving(*self.owner):
            product = field.levels.matmul(columns.flatten(1), values, self._own_batches(field))
        product = product.view(columns.shape).movedim(0, -2)
        self.complete([product], [rhs])
        return product

    def _own_batches(self, field: FarField) -> list[Batch]:
        batches = field.levels.batches
        return batches if self.ranks is None else batches[self.ranks.rank :: self.ranks.size]

    def scale_products(self, rhs: Tensor) -> Tensor:
        if self.far_field() is None:
            return super().scale_products(rhs)

        def weighted(column: Tensor, batch: Batch) -> Tensor:
            left, right = (column[batch.part.points.index_select(0, nodes)] for nodes in (batch.left, batch.right))
            differences = left.unsqueeze(-1) - right.unsqueeze(-2)
            return self.values_and_derivatives(batch)[1] * differences.square_()

        parts = [self.product(_ALL, _ALL, rhs, partial(weighted, column)) for column in self.x1.unbind(-1)]
        return torch.cat(parts, dim=-1)

    def evaluate(self, tile: Tile | Batch, out: Tensor) -> Tensor:
        if isinstance(tile, Tile):
            return super().evaluate(tile, out)
        return self.own_entries.blocks(*tile.inputs(self.number), out, self.scratch(tile.shape, 1))

    def evaluate_both(self, tile: Tile | Batch, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(tile, Tile):
            return super().evaluate_both(tile, value, derivative)
        own = self.own_entries
        u, scratch = own.squared_distances(*tile.inputs(self.number), value, derivative)
        return own.function.value_and_derivative_(u, scratch, self.alpha)

    def alpha_derivatives(self, tile: Tile | Batch) -> Tensor:
        if isinstance(tile, Tile):
            return super().alpha_derivatives(tile)
        u, _ = self.own_entries.squared_distances(*tile.inputs(self.number))
        return self.own_entries.function.alpha_derivative(u, self.alpha)

    def derivative(self, weights: TileWeights, *, value: bool, alpha: bool) -> RadialDerivative:
        """See `RadialTiles.derivative`; interpolations count as constants.

        Cost with angles: a product with 1 + angles columns more for each of the weights' factors.
        """
        if not isinstance(weights, BilinearWeights) or (field := self.far_field()) is None:
            return super().derivative(weights, value=value, alpha=alpha)
        if not self._angles:
            return self._derivative(field, weights, value, alpha)
        found = self._by_angles(weights)
        if self._angles < self.x1.shape[-1]:
            by_others = self._derivative(field, weights, value, alpha)
            by_others.x1[:, : self._angles] = found.x1[:, : self._angles]
            return by_others
        return found

    def _by_angles(self, weights: BilinearWeights) -> RadialDerivative:
        """By products with the kernel, for each point: exp(-q / 2) is -2 times its derivative."""
        x, right = self.x1[:, : self._angles], weights.right
        factors = torch.cat([right, *(coordinate * right for coordinate in x.mT.unsqueeze(-1))], dim=-1)
        products = self.product(_ALL, _ALL, factors).unflatten(-1, (-1, right.shape[-1]))
        # sum_j W_ij f_ij (x_j - x_i), and without the difference.
        plain, of_angles = torch.linalg.vecdot(products, weights.left.unsqueeze(-2)).double().tensor_split([1], dim=-1)
        of_angles -= x * plain
        return RadialDerivative(of_angles.to(x.dtype), plain.sum() / 2, plain.new_zeros(()))

    @divided()
    def _derivative(self, field: FarField, weights: BilinearWeights, value: bool, alpha: bool) -> RadialDerivative:
        vectors = field.levels.up(weights.left.movedim(-2, 0).flatten(1))
        # The right factor is the left one with its halves swapped (`BilinearWeights`).
        halves = 2 * vectors[0].shape[1] // weights.left.shape[-1]
        swapped = torch.arange(halves, device=self.x1.device).view(-1, 2).flip(1).flatten()
        share = partial(self._share_of_batches, vectors, swapped, value, alpha)
        totals = self.sums(share, self._own_batches(field))
        self.complete(totals, weights.tensors)
        inputs, sum_of_values, sum_of_alpha = totals
        factor = 2 * self.function.derivative_factor
        return RadialDerivative((factor * inputs).to(self.x1.dtype), sum_of_values, sum_of_alpha)

    def _share_of_batches(
        self, vectors: list[Tensor], swapped: Tensor, value: bool, alpha: bool, batches: Sequence[Batch]
    ) -> list[Tensor]:
        """Sums of G_ij (x_i - x_j) by row [n, d], of f and of df/dalpha."""
        zeros = partial(self.x1.new_zeros, dtype=torch.float64)  # terms cancel
        inputs, sum_of_values, sum_of_alpha = zeros(self.x1.shape), zeros(()), zeros(())
        is_wide = torch.finfo(inputs.dtype).eps * float(self.x1.abs().amax()) ** 2 > LARGEST_CANCELLATION
        for _, of_part in groupby(batches, lambda batch: batch.key[0]):
            first, *others = of_part
            rows = first.part.points
            points = self.x1.double().index_select(0, rows.flatten()).view(*rows.shape, -1).mT.contiguous()
            by_node = torch.zeros_like(points)
            for batch in (first, *others):
                factor = vectors[batch.part.step]
                left, halves = factor.index_select(0, batch.left), factor.unflatten(1, (len(swapped), -1)).flatten(0, 1)
                of_right = batch.right.unsqueeze(-1) * len(swapped) + swapped
                weights = torch.bmm(left.mT, halves.index_select(0, of_right.flatten()).view(left.shape))
                if batch.part.is_diagonal:
                    weights *= 0.5
                if alpha:
                    sum_of_alpha += (self.alpha_derivatives(batch) * weights).sum(dtype=torch.float64)
                values, derivatives = self.values_and_derivatives(batch)
                if value:
                    sum_of_values += torch.linalg.vecdot(values.flatten(1), weights.flatten(1)).sum(dtype=torch.float64)
                _add_differences(by_node, points, batch, weights.mul_(derivatives).double(), is_wide=is_wide)
            inputs.index_add_(0, rows.flatten(), by_node.mT.flatten(0, 1))
        return [inputs, sum_of_values, sum_of_alpha]


def _add_differences(sums: Tensor, points: Tensor, batch: Batch, weights: Tensor, *, is_wide: bool) -> None:
    """Adds sum_j W_ij (x_i - x_j) to every point i of a batch's nodes, and the opposite to every j.

    Sums and points are [nodes, d, size]: products with few rows are faster than with few columns. All are float64: a node
    may lie in two distant clusters, and the sums are differences of two products. Wide inputs need differences of pairs,
    because the derivative by a lengthscale multiplies the sums' rounding errors by the inputs. They take a third longer.
    """
    left, right = points.index_select(0, batch.left), points.index_select(0, batch.right)
    if is_wide:
        for total, one, other in zip(sums.unbind(1), left.unbind(1), right.unbind(1), strict=True):
            terms = weights * (one.unsqueeze(-1) - other.unsqueeze(-2))
            total.index_add_(0, batch.left, terms.sum(-1)).index_add_(0, batch.right, terms.sum(-2), alpha=-1)
        return
    centre = left[..., :1]  # near both, to keep digits
    for nodes, own, other, to_own in ((batch.left, left, right, weights.mT), (batch.right, right, left, weights)):
        own, other = own - centre, torch.nn.functional.pad(other - centre, (0, 0, 0, 1), value=1.0)
        products, ones = torch.bmm(other, to_own).split([own.shape[1], 1], dim=1)
        sums.index_add_(0, nodes, ones * own - products)

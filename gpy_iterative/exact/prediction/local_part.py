"""The local part of a projection: observations near a test point.

With a far field and one kernel a tree finds the nearest, else the largest remaining correlations are taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.exact.prediction import blocks
from gpy_iterative.linear_operators.extensions import dense, kernel_inputs, sum_terms
from gpy_iterative.linear_operators.noisy import kernel_and_noise
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.preconditioners.neighbours import Tree
from gpy_iterative.preconditioners.vecchia import block_factors
from gpy_iterative.worker_threads import run

#: Most neighbours of all points whose joint covariance is evaluated by entries.
MAX_PAIRWISE = 2048
#: Points per task of a CPU thread: their systems fit its cache.
POINTS = 16
#: Error of an entry of R, in machine epsilons of the prior variance.
ROUNDING_ERRORS = 16


@dataclass(frozen=True)
class LocalPart:
    operator: LinearOperator  # H [*b, m, m]
    product: Tensor  # H A [*b, m, r]
    deviation: Tensor  # diag(R)^1/2 [*b, m]
    rounding: Tensor  # norm of neighbours' rounding errors, [*b]
    num_neighbours: int
    observed: Tensor | None  # [n]
    tree: Tree | None  # of the m points

    @classmethod
    def of(
        cls,
        operator: LinearOperator,
        product: Tensor,
        num_neighbours: int,
        observed: Tensor | None,
        *,
        are_nearest: bool,
    ) -> "LocalPart":
        kernel, diagonal, noise = kernel_and_noise(operator)
        rounding = ROUNDING_ERRORS * torch.finfo(diagonal.dtype).eps * num_neighbours**0.5 * diagonal.amax(-1).double()
        diagonal, noise = (diagonal, diagonal) if noise is None else (diagonal + noise, noise)
        # Data inside the span are only rounding errors. A norm stores no squares.
        explained = torch.linalg.vector_norm(product, dim=-1).square()
        deviation = torch.maximum(diagonal - explained, 1e-4 * noise).sqrt()
        # In a sum with a weak short-range kernel, and among several tasks, the nearest are not the most correlated.
        terms = [term for term, _ in sum_terms(kernel)]
        is_single = not operator.batch_shape and len(terms) == 1 and isinstance(terms[0], TiledLinearOperator)
        points = kernel_inputs(operator) if are_nearest and is_single else None
        tree = None if points is None else Tree(points)
        return cls(operator, product, deviation, rounding, num_neighbours, observed, tree)

    def nearest_to(self, test_train: LinearOperator) -> Tensor | None:
        """The nearest data [*b, t, num_neighbours]; None without a tree.

        Operators centre their inputs differently: a common datum gives the offset.
        """
        if self.tree is None:
            return None
        points, data = kernel_inputs(test_train), kernel_inputs(test_train.mT)
        known = kernel_inputs(self.operator)
        if points is None or data is None or known is None:
            return None
        first = 0 if self.observed is None else int(self.observed.nonzero()[0])
        offset = known[0] - data[..., first, :]
        return self.tree.nearest(points + offset.unsqueeze(-2), self.num_neighbours)


class Neighbours:
    """Neighbours of test points [*batch, t]; `coefficients` are A^T k_x [*batch, t, r]."""

    def __init__(self, local: LocalPart, test_train: LinearOperator, coefficients: Tensor) -> None:
        self.local, self.test_train, self.coefficients = local, test_train, coefficients
        self.points = coefficients.shape[:-1]
        self.product = local.product.to(coefficients.dtype)
        self.rounding = local.rounding[..., None, None]
        with torch.no_grad():
            nearest = local.nearest_to(test_train)
            index = self._most_correlated() if nearest is None else nearest
        # Members may share their nearest points.
        shape = (*test_train.shape[:-1], -1) if test_train.batch_shape else index.shape
        self.index = index.expand(shape).reshape(*self.points, -1)
        self.prior = self._prior_at(self.index)

    def _most_correlated(self) -> Tensor:
        rest = self._known_rows() - blocks.rows_product(self.coefficients, self.product.mT)
        score = rest.abs() / self.local.deviation.to(rest.dtype).unsqueeze(-2)
        return score.topk(self.local.num_neighbours, dim=-1).indices

    def _known_rows(self) -> Tensor:
        """K(x, X) of the m observed data, [*batch, t, m]."""
        rows, observed = dense(self.test_train), self.local.observed
        return (rows if observed is None else rows[..., observed]).reshape(*self.points, -1)

    def _prior_at(self, index: Tensor) -> Tensor:
        observed = self.local.observed
        columns = index if observed is None else observed.nonzero().squeeze(-1)[index]
        rows = torch.arange(self.points.numel(), device=index.device).repeat_interleave(index.shape[-1])
        rows = torch.unravel_index(rows, self.test_train.shape[:-1])
        return self.test_train[(*rows, columns.flatten())].view(index.shape)

    def _weighted(self, points: slice) -> tuple[Tensor, Tensor, Tensor]:
        """R [*batch, t, k, k], k' and weights [*batch, t, k]."""
        index = self.index[..., points, :]
        rows = self._rows(index)
        with torch.no_grad():
            covariance = self._blocks(index, rows)
            covariance.diagonal(dim1=-2, dim2=-1).add_(self.rounding)
            lower = block_factors(covariance)  # in float32, R may be only rounding errors
        projected = (rows @ self.coefficients[..., points, :].unsqueeze(-1)).squeeze(-1)
        correlation = (self.prior[..., points, :] - projected).double()
        return covariance, correlation, torch.cholesky_solve(correlation.unsqueeze(-1), lower).squeeze(-1)

    def explained_variance(self) -> Tensor:
        """2 g^T k' - g^T R g, [*batch, t]: correct despite rounding errors of g."""
        return torch.cat(self._of_parts(self._explained), dim=-1)

    def _of_parts(self, function: Callable[[slice], Tensor]) -> list[Tensor]:
        size = self.points[-1]
        length = POINTS if self.index.device.type == "cpu" else size
        parts = [slice(start, start + length) for start in range(0, size, length)]
        return run([partial(function, part) for part in parts])

    def _explained(self, points: slice) -> Tensor:
        covariance, correlation, weights = self._weighted(points)
        return (weights * (2 * correlation - (covariance @ weights.unsqueeze(-1)).squeeze(-1))).sum(-1)

    def explained_covariance(self) -> Tensor:
        """G^T K' + K'^T G - G^T R G, [*batch, t, t]."""
        weights = torch.cat(self._of_parts(lambda points: self._weighted(points)[-1]), dim=-2)
        is_small = self.index.shape[-1] * self.index.shape[-2] <= MAX_PAIRWISE
        cross, square = self._pairwise(weights) if is_small else self._by_products(weights)
        rounding = self.rounding * weights.square().sum(-1, keepdim=True)
        return cross + cross.mT - square - torch.diag_embed(rounding.squeeze(-1))

    def _pairwise(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """K'^T G and G^T R G from (t k)^2 kernel entries."""
        together = self.index.flatten(-2).unsqueeze(-2)
        rows = self._rows(together)
        covariance = self._blocks(together, rows).squeeze(-3)
        # [*batch, t k, t]: column i has the weights of point i.
        weights = torch.diag_embed(weights.mT).movedim(-3, -2).flatten(-3, -2)
        rest = self._prior_at(together.expand(*self.points, -1)) - self.coefficients @ rows.squeeze(-3).mT
        return rest.double() @ weights, weights.mT @ (covariance @ weights)

    def _by_products(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.product.new_zeros(*self.points, self.product.shape[-2])
        columns = columns.scatter(-1, self.index, weights.to(columns.dtype)).mT
        projected = self.product.mT @ columns
        square = columns.mT.double() @ blocks.product(self.local.operator, columns).double()
        square = square - projected.mT.double() @ projected.double()
        cross = blocks.rows_product(self._known_rows(), columns)
        return cross.double() - self.coefficients.double() @ projected.double(), square

    def _rows(self, index: Tensor) -> Tensor:
        """Rows of H A at an index [*batch, *b, p, k]."""
        shape = self.product.shape[:-2]
        members = [
            torch.arange(size, device=index.device).view(-1, *[1] * (len(shape) - position + 1))
            for position, size in enumerate(shape)
        ]
        return self.product[(*members, index)]

    def _blocks(self, index: Tensor, rows: Tensor) -> Tensor:
        return (blocks.principal_blocks(self.local.operator, index).to(rows.dtype) - rows @ rows.mT).double()

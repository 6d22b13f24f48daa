"""Predictive variances from a few projections of the data, without solves.

A linear predictor g^T y of f(x) has the error variance

    E (f(x) - g^T y)^2 = k(x, x) - 2 g^T k_x + g^T H g  =  var(x) + |g - H^-1 k_x|_H^2.

Here g is the best in a space of two parts (Wenger et al. 2022, "Posterior and computational uncertainty in Gaussian
processes"; Sang and Huang 2012, "A full scale approximation of covariance functions for large spatial data sets"):

* the span of a randomly pivoted Cholesky factor of K over the noise. With A^T H A = I, the weights are A A^T k_x.
* the observations N with the largest remaining correlation. With R = H - H A A^T H and k' = k_x - H A A^T k_x,
  the weights are R_NN^-1 k'_N.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.checks import check_count
from gpy_iterative.errors import NotPositiveDefiniteError
from gpy_iterative.exact.prediction import blocks
from gpy_iterative.exact.prediction.local_part import ROUNDING_ERRORS, LocalPart, Neighbours
from gpy_iterative.linear_operators.extensions import dense, far_field_error, sum_terms
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.noisy import kernel_and_noise
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.linear_solvers.base import product_rounding
from gpy_iterative.linear_solvers.cholesky import ADVICE, CholeskyFactor
from gpy_iterative.linear_solvers.kronecker import KroneckerFactor, entries_of
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky

#: With a far field neighbours matter most, and blocks [n, rank] are limited.
RANK, NUM_NEIGHBOURS = 1024, 128
FAR_FIELD_RANKS, FAR_FIELD_ENTRIES = (64, 256), 2**24
#: Rows, and columns of a product, at a time; a product takes memory for up to four times its columns.
CHUNK = 4096
COLUMNS = 512
#: Part of the rest of K that neighbours must be able to explain.
LEAST_EXPLAINED = 0.1


class Projection(ABC):
    """Predictive covariances. K(x, X) is [*batch, t, n] or one list [batch * t, n]."""

    local: LocalPart | None  # None where |A^T k_x|^2 = k_x^T H^-1 k_x
    dtype: torch.dtype

    @property
    def _has_neighbours(self) -> bool:
        return self.local is not None and self.local.num_neighbours > 0

    @abstractmethod
    def _coefficients(self, test_train: LinearOperator) -> Tensor:
        """A^T k_x, [*batch, t, r]."""

    def _prepared(self, test_train: LinearOperator) -> LinearOperator:
        """In the projection's dtype, and evaluated once where neighbours are found among all data."""
        test_train = blocks.converted(test_train, self.dtype)
        is_read_again = self._has_neighbours and self.local.tree is None
        return to_linear_operator(dense(test_train)) if is_read_again else test_train

    @abstractmethod
    def numbers_per_point(self, test_train: LinearOperator) -> int:
        """Memory for the variance of a point, in numbers."""

    def variance(self, prior_variance: Tensor, test_train: LinearOperator) -> Tensor:
        """var(x) [*batch, t] from k(x, x), never below its rounding error."""
        # The two numbers may agree in almost all digits of float32.
        explained = self._explained_variance(self._prepared(test_train))
        variance = prior_variance.double() - explained.reshape(prior_variance.shape)
        return variance.to(prior_variance.dtype).maximum(_least_variance(prior_variance))

    def _explained_variance(self, test_train: LinearOperator) -> Tensor:
        coefficients = self._coefficients(test_train)
        explained = torch.linalg.vector_norm(coefficients, dim=-1, dtype=torch.float64).square()
        if self._has_neighbours and explained.numel():
            explained = explained + Neighbours(self.local, test_train, coefficients).explained_variance()
        return explained

    def covariance(self, prior_covariance: Tensor, test_train: LinearOperator) -> Tensor:
        """The covariance [*batch, t, t], semi-definite up to rounding; its diagonal is `variance`."""
        points, test_train = prior_covariance.shape[:-1], self._prepared(test_train)
        coefficients = self._coefficients(test_train)
        coefficients = coefficients.reshape(*points, coefficients.shape[-1])
        exact = coefficients.double()
        covariance = prior_covariance.double() - exact @ exact.mT
        if self._has_neighbours and points.numel():
            covariance = covariance - Neighbours(self.local, test_train, coefficients).explained_covariance()
        variance, least = (matrix.diagonal(dim1=-2, dim2=-1) for matrix in (covariance, prior_covariance))
        raised = (_least_variance(least).double() - variance).clamp_min(0)
        return (covariance + torch.diag_embed(raised)).to(prior_covariance.dtype)


@dataclass(frozen=True)
class ExactProjection(Projection):
    """All data: A A^T = H^-1."""

    factor: CholeskyFactor | KroneckerFactor
    observed: Tensor | None = None  # [n]
    local: ClassVar[None] = None
    dtype: ClassVar[torch.dtype] = torch.float64

    def _coefficients(self, test_train: LinearOperator) -> Tensor:
        rows = dense(test_train)
        columns = (rows if self.observed is None else rows[..., self.observed]).mT
        return blocks.from_columns(self.factor.whiten(blocks.as_columns(columns, self.factor.dim())), columns).mT

    def numbers_per_point(self, test_train: LinearOperator) -> int:
        return 4 * test_train.shape[-1]


@dataclass(frozen=True)
class KroneckerProjection(ExactProjection):
    """All data, on a grid or of several outputs."""

    factor: KroneckerFactor

    def _coefficients(self, test_train: LinearOperator) -> Tensor:
        rows = self._rows_by_axis(test_train)
        return super()._coefficients(test_train) if rows is None else self.factor.whiten_product(rows).mT

    def _explained_variance(self, test_train: LinearOperator) -> Tensor:
        rows = self._rows_by_axis(test_train)
        return super()._explained_variance(test_train) if rows is None else self.factor.explained(rows)

    def _rows_by_axis(self, test_train: LinearOperator) -> list[Tensor] | None:
        """K(x, X) as products of rows [t, size] of points, or a grid's axes, and of tasks; None for another form."""
        (term, scale), *others = sum_terms(test_train)
        has_tasks = isinstance(term, KroneckerLinearOperator | HadamardLinearOperator)
        points = term.points if has_tasks else term
        cells = points.grid_cells() if isinstance(points, RadialProductLinearOperator) else None
        if others or term.batch_shape or (cells is None and not has_tasks):
            return None
        axes = [points] if cells is None else points.axis_rows()
        if cells is None:
            cells = torch.arange(points.shape[-1], device=term.device)
        tasks = to_dense(term.tasks) if has_tasks else torch.ones(1, 1, dtype=term.dtype, device=term.device)
        numbers, columns = torch.arange(term.shape[-2], device=term.device), None
        if isinstance(term, HadamardLinearOperator):
            numbers, columns = term.observed, term.observed_columns
        entries = entries_of(cells, len(tasks), columns)
        entries = entries if self.observed is None else entries[self.observed]
        if [axis.shape[-1] for axis in axes] != self.factor.sizes or not torch.equal(entries, self.factor.entries):
            return None  # the grid of observed data is another
        of_points, of_tasks = numbers // len(tasks), numbers % len(tasks)
        return [*(dense(axis).index_select(0, of_points) for axis in axes), scale * tasks[of_tasks]]


@dataclass(frozen=True)
class GalerkinProjection(Projection):
    """A few projections, and neighbours."""

    basis: Tensor  # A [*b, n, r], zero for unobserved data
    local: LocalPart | None

    @property
    def dtype(self) -> torch.dtype:
        return self.basis.dtype

    def _coefficients(self, test_train: LinearOperator) -> Tensor:
        basis = self.basis.to(test_train.dtype)
        if test_train.dim() > basis.dim() > 2:
            return blocks.rows_product(dense(test_train), basis)
        return blocks.product(test_train, basis)

    def extended(self, operator: LinearOperator, rows: Tensor, observed: Tensor | None) -> "GalerkinProjection | None":
        """The incomplete projection with k new data, from their rows [*b, k, m] of H. Cost: n r k multiply-adds.

        With B = A^T H_Xf the new basis vectors are [-A B; I] L^-T, L L^T = H_ff - B^T B; None if L does not exist.
        """
        assert self.local is not None
        size = rows.shape[-1] - rows.shape[-2]
        batch, rank = rows.shape[:-2], self.basis.shape[-1]
        known = self.basis if observed is None else self.basis[..., observed[: self.basis.shape[-2]], :]
        known = known.expand(*batch, size, rank)
        cross = rows[..., :size] @ known  # B^T
        rest = rows[..., size:].double() - cross.double() @ cross.mT.double()
        before = self.local.product.expand(*batch, size, rank)
        rest.diagonal(dim1=-2, dim2=-1).add_(_rounding(operator).unsqueeze(-1))
        lower, info = torch.linalg.cholesky_ex(0.5 * (rest + rest.mT))
        if info.any():
            return None
        identity = torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device).expand(rest.shape)
        added = _solve_right_(torch.cat([-known @ cross.mT, identity], dim=-2), lower)
        basis = torch.cat([pad(known, (0, 0, 0, rows.shape[-2])), added], dim=-1)
        before = torch.cat([before, cross], dim=-2)
        product = torch.cat([before, _solve_right_(rows.mT - before @ cross.mT, lower)], dim=-1)
        local = LocalPart.of(
            operator, product, self.local.num_neighbours, observed, are_nearest=self.local.tree is not None
        )
        return GalerkinProjection(blocks.scatter_rows(basis, observed), local)

    def numbers_per_point(self, test_train: LinearOperator) -> int:
        rank, num_data = self.basis.shape[-1], test_train.shape[-1]
        if not self._has_neighbours:
            return rank
        neighbours = min(self.local.num_neighbours, num_data)
        all_data = (2 if self.local.observed is None else 3) * num_data if self.local.tree is None else 0
        return rank + all_data + neighbours * (2 * neighbours + 2 * rank)


@dataclass(frozen=True)
class ProjectionRecipe:
    """Options of a projection."""

    rank: int | None = None
    num_neighbours: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("rank", self.rank), ("num_neighbours", self.num_neighbours)):
            check_count(name, count, optional=True)

    def sizes_for(self, operator: LinearOperator) -> tuple[int, int]:
        rank, (least, most) = RANK, FAR_FIELD_RANKS
        if far_field_error(operator) is not None:
            rank = min(max(FAR_FIELD_ENTRIES // operator.shape[-1], least), most)
        return self.rank or rank, self.num_neighbours or NUM_NEIGHBOURS

    @torch.no_grad()
    def build(self, operator: LinearOperator, observed: Tensor | None = None) -> GalerkinProjection:
        """The projection for H [*b, m, m] of the observed data.

        Cost per batch member: r kernel rows, one product with r columns, a few n r^2 multiply-adds, four blocks [n, r].
        """
        batch, size = operator.batch_shape, operator.shape[-1]
        rank, num_neighbours = self.sizes_for(operator)
        if batch:
            members = [_galerkin_basis(operator[index], rank) for index in itertools.product(*map(range, batch))]
            bases, products, rests = zip(*members, strict=True)
            # Factors that ended early get zero columns, which change nothing.
            rank, rest = max(basis.shape[-1] for basis in bases), max(rests)
            basis, product = (
                torch.stack([pad(part, (0, rank - part.shape[-1])) for part in parts]).reshape(*batch, -1, rank)
                for parts in (bases, products)
            )
        else:
            basis, product, rest = _galerkin_basis(operator, rank)
        # Observations of the same value explain at most this part of the rest of its prior variance.
        if self.num_neighbours is None and num_neighbours * rest < LEAST_EXPLAINED:
            num_neighbours = 0
        local = None
        if basis.shape[-1] < size:
            are_nearest = num_neighbours > 0 and far_field_error(operator) is not None
            local = LocalPart.of(operator, product, min(num_neighbours, size), observed, are_nearest=are_nearest)
        return GalerkinProjection(blocks.scatter_rows(basis, observed), local)


def _galerkin_basis(operator: LinearOperator, rank: int) -> tuple[Tensor, Tensor, float]:
    """A in the span of D^-1 L, L a randomly pivoted Cholesky factor and D the noise plus the rest of K; H A; largest rest.

    The rest is relative to the noise, and at least rounding errors.

    (L L^T + D)^-1 k_x lies in it. D takes the mean of the rest, which is zero at pivots.
    """
    factor, _ = RandomlyPivotedCholesky(rank=rank).low_rank(operator)
    _, diagonal, noise = kernel_and_noise(operator)
    largest = math.inf
    if noise is not None:
        rest = diagonal - torch.linalg.vector_norm(factor, dim=-1).square()
        largest = float((rest.maximum(ROUNDING_ERRORS * torch.finfo(rest.dtype).eps * diagonal) / noise).max())
        factor = factor / (noise + rest.mean(-1, keepdim=True).clamp_min(0)).unsqueeze(-1)
    basis = torch.linalg.qr(factor).Q.contiguous()
    del factor
    product = torch.empty_like(basis)
    for columns, found in zip(basis.split(COLUMNS, dim=-1), product.split(COLUMNS, dim=-1), strict=True):
        found.copy_(operator._matmul(columns.contiguous()))
    gram = torch.zeros(basis.shape[-1], basis.shape[-1], dtype=torch.float64, device=basis.device)
    for left, right in zip(basis.split(CHUNK), product.split(CHUNK), strict=True):
        gram += left.mT.double() @ right.double()
    gram.diagonal().add_(_rounding(operator))
    try:
        lower = psd_safe_cholesky(0.5 * (gram + gram.mT))
    except NotPSDError as error:
        error_of_far_field = far_field_error(operator)
        cause = (
            ADVICE
            if error_of_far_field is None
            else f"Its far field has a relative error of {error_of_far_field:.0e}: use KernelProducts(far_field=None)."
        )
        raise NotPositiveDefiniteError(
            f"The kernel matrix with noise is not positive definite, so there are no predictive variances. {cause}"
        ) from error
    return _solve_right_(basis, lower), _solve_right_(product, lower), largest


def _solve_right_(columns: Tensor, lower: Tensor) -> Tensor:
    """Columns [*b, n, r] times L^-T, in place; computed in float64."""
    for rows in columns.split(CHUNK, dim=-2):
        rows.copy_(torch.linalg.solve_triangular(lower, rows.mT.double(), upper=False).mT)
    return columns


def _rounding(operator: LinearOperator) -> Tensor:
    """Error [*b] of |v|_H^2 for v of norm 1, in float64."""
    return product_rounding(operator, torch.finfo(operator.dtype).eps).double()


def _least_variance(prior_variance: Tensor) -> Tensor:
    return torch.finfo(prior_variance.dtype).eps * prior_variance.detach()

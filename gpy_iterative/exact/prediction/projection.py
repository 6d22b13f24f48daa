"""Predictive variances from a few projections of the data, without solves.

The best linear predictor of f(x) from the data y has the weights H^-1 k_x. Any other weights g have the error variance

    E (f(x) - g^T y)^2 = k(x, x) - 2 g^T k_x + g^T H g  =  var(x) + |g - H^-1 k_x|_H^2,

never less than var(x), and off by the square of what is wrong with g. Here g is the best in a space of two parts:

* the span of `rank` vectors C that all x share, from a pivoted Cholesky factor of K: the smooth part of the data. With
  A^T H A = I on that span, its weights are A A^T k_x.
* the `num_neighbours` observations that, past those projections, x is most correlated with: the local part. With
  R = H - H A A^T H and k' = k_x - H A A^T k_x, its weights are R_NN^-1 k'_N, for a set N of x's own. Where there is a far
  field, they are the nearest observations, which a tree finds without a look at all of them.

Nothing is sampled and no system of the size of the data is solved, so small noise and bad conditioning cost nothing.

Galerkin projections of Gaussian processes: Wenger et al. 2022, "Posterior and computational uncertainty in Gaussian
processes". Global plus local: Sang and Huang 2012, "A full scale approximation of covariance functions for large
spatial data sets".
"""

import itertools
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from linear_operator.operators import SumLinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.checks import check_count
from gpy_iterative.exact.prediction import blocks
from gpy_iterative.linear_operators.extensions import far_field_error, in_float64, kernel_inputs
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.cholesky import CholeskyFactor, jittered_cholesky
from gpy_iterative.preconditioners.low_rank_plus_diagonal import kernel_and_noise
from gpy_iterative.preconditioners.neighbours import Tree
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky

#: Rank and neighbours where none were chosen. With a far field neighbours say most: the rank is as large as so many entries
#: of a block [n, rank] allow, between these.
RANK, NUM_NEIGHBOURS = 1024, 128
FAR_FIELD_RANKS, FAR_FIELD_ENTRIES = (64, 256), 2**24
#: Neighbours of all points of one block, up to which their joint covariance is evaluated pair by pair.
MAX_PAIRWISE = 2048
#: Relative jitters, tried in turn on a covariance of neighbours that has no Cholesky factor. In float32, little more than
#: rounding errors may be left past the projections: the last jitters then take little from the neighbours.
JITTERS = (1e-8, 1e-6, 1e-4, 1e-2, 1e-1, 1.0, 10.0, 100.0)
#: The rounding error of an entry of R, in machine epsilons of the largest prior variance.
ROUNDING_ERRORS = 16
#: Rounding errors of a product up to this part of the noise are left to float32.
NEGLIGIBLE = 0.1
#: Rows that are converted to float64 at a time.
CHUNK = 4096


@dataclass(frozen=True)
class LocalPart:
    """The quantities from which a point's neighbours are chosen, for the m observed of n data."""

    operator: LinearOperator  # H [*b, m, m]
    product: Tensor  # H A [*b, m, r]
    deviation: Tensor  # standard deviations of the data past the projections, diag(R)^1/2 [*b, m]
    rounding: Tensor  # of the blocks of R that neighbours need, as a norm [*b]
    num_neighbours: int  # at the most
    observed: Tensor | None  # [n], or None for all
    tree: Tree | None  # of the m points, where the nearest ones are the neighbours

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
        """The local part past the projections with the product H A; its neighbours are the nearest data, or correlated."""
        kernel, diagonal, noise = kernel_and_noise(operator)
        rounding = ROUNDING_ERRORS * torch.finfo(product.dtype).eps * num_neighbours**0.5 * diagonal.amax(-1).double()
        diagonal, noise = (diagonal, diagonal) if noise is None else (diagonal + noise, noise)
        # Of data inside the span only rounding is left, which must not make them neighbours. Norms save memory for squares.
        explained = torch.linalg.vector_norm(product, dim=-1).square()
        deviation = torch.maximum(diagonal - explained, 1e-4 * noise).sqrt()
        # The nearest ones are the most correlated ones of a single kernel, and not of a sum with a weak one that is short.
        is_single = not (operator.batch_shape or isinstance(kernel, SumLinearOperator))
        points = kernel_inputs(operator) if are_nearest and is_single else None
        tree = None if points is None else Tree(points)
        return cls(operator, product, deviation, rounding, num_neighbours, observed, tree)

    def nearest_to(self, test_train: LinearOperator) -> Tensor | None:
        """The nearest data to each of t points, [t, num_neighbours]; None where neighbours are the correlated ones.

        Inputs are centred in each operator for itself: a datum that both have tells how far their centres are apart.
        """
        if self.tree is None or test_train.batch_shape:
            return None
        points, data = kernel_inputs(test_train), kernel_inputs(test_train.mT)
        known = kernel_inputs(self.operator)
        if points is None or data is None or known is None:
            return None
        first = 0 if self.observed is None else int(self.observed.nonzero()[0])
        return self.tree.nearest(points + (known[0] - data[first]), self.num_neighbours)


@dataclass(frozen=True)
class Projection:
    """Predictive covariances from the blocks K(x, x) [*batch, t, t] and K(x, X) of a joint prior.

    K(x, X) is [*batch, t, n], or [batch * t, n] with all points in one list.
    """

    basis: Tensor  # A [*b, n, r], zero where a datum is not observed
    local: LocalPart | None  # None where A is complete: then A A^T = H^-1, and everything is exact

    def variance(self, prior_variance: Tensor, test_train: LinearOperator) -> Tensor:
        """var(x) [*batch, t] from k(x, x), never below its rounding error."""
        coefficients = self._coefficients(test_train)
        # A small variance is the difference of two numbers that may agree in all digits of float32 but the last.
        explained = torch.linalg.vector_norm(coefficients, dim=-1, dtype=torch.float64).square()
        if self.local is not None and explained.numel():
            neighbours = _Neighbours(self.local, test_train, coefficients, coefficients.shape[:-1])
            explained = explained + neighbours.explained_variance()
        variance = prior_variance.double() - explained.reshape(prior_variance.shape)
        return variance.to(prior_variance.dtype).maximum(_least_variance(prior_variance))

    def covariance(self, prior_covariance: Tensor, test_train: LinearOperator) -> Tensor:
        """The covariance [*batch, t, t], semi-definite up to rounding, with `variance` on its diagonal."""
        points = prior_covariance.shape[:-1]
        coefficients = self._coefficients(test_train).reshape(*points, self.basis.shape[-1])
        exact = coefficients.double()
        covariance = prior_covariance.double() - exact @ exact.mT
        if self.local is not None and points.numel():
            covariance = covariance - _Neighbours(self.local, test_train, coefficients, points).explained_covariance()
        variance, least = (matrix.diagonal(dim1=-2, dim2=-1) for matrix in (covariance, prior_covariance))
        raised = (_least_variance(least).double() - variance).clamp_min(0)
        return (covariance + torch.diag_embed(raised)).to(prior_covariance.dtype)

    def _coefficients(self, test_train: LinearOperator) -> Tensor:
        """K(x, X) A [*batch, t, r]; in the precision of A where it is complete, and small variances are differences."""
        if not self.is_exact:
            return blocks.product(test_train, self.basis.to(test_train.dtype))
        if self.basis.dtype == test_train.dtype:
            return blocks.product(test_train, self.basis)
        return blocks.dense(test_train).to(self.basis.dtype) @ self.basis

    @property
    def is_exact(self) -> bool:
        """Whether A is complete."""
        return self.local is None

    def extended(self, operator: LinearOperator, rows: Tensor, observed: Tensor | None) -> "Projection | None":
        """With k new data, whose rows of H are [*b, k, m], in a basis that is not complete: n r k multiply-adds.

        With B = A^T H_Xf the new part of the basis is [-A B; I] L^-T, where L L^T = H_ff - B^T B. None where that has no
        Cholesky factor.
        """
        assert self.local is not None
        size = rows.shape[-1] - rows.shape[-2]
        batch, rank = rows.shape[:-2], self.basis.shape[-1]
        known = self.basis if observed is None else self.basis[..., observed[: self.basis.shape[-2]], :]
        known = known.expand(*batch, size, rank)
        cross = rows[..., :size] @ known  # B^T
        rest = rows[..., size:].double() - cross.double() @ cross.mT.double()
        before = self.local.product.expand(*batch, size, rank)
        rest.diagonal(dim1=-2, dim2=-1).add_(_rounding(before).unsqueeze(-1))
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
        return Projection(scatter_rows(basis, observed), local)

    def numbers_per_point(self, test_train: LinearOperator) -> int:
        """Memory for one test point, to cut many into chunks."""
        rank, num_data = self.basis.shape[-1], test_train.shape[-1]
        if self.local is None:
            return rank
        neighbours = min(self.local.num_neighbours, num_data)
        all_data = 2 * num_data if self.local.tree is None or test_train.batch_shape else 0
        return rank + all_data + neighbours * (2 * neighbours + 2 * rank)


@dataclass(frozen=True)
class ProjectionRecipe:
    """How a projection is made where H is too large to factor.

    Args:
        rank: r, projections that all test points share; clamped at n. None is 1,024; for an operator with a far field it is
            256 up to 65,000 data, and falls to 64.
        num_neighbours: observations in each test point's own part; clamped at n. None is 128.

    Raises:
        ValueError: an option below 1.
    """

    rank: int | None = None
    num_neighbours: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("rank", self.rank), ("num_neighbours", self.num_neighbours)):
            if count is not None:
                check_count(name, count)

    def sizes_for(self, operator: LinearOperator) -> tuple[int, int]:
        """Rank and number of neighbours for this operator."""
        rank, (least, most) = RANK, FAR_FIELD_RANKS
        if _has_far_field(operator):
            rank = min(max(FAR_FIELD_ENTRIES // operator.shape[-1], least), most)
        return self.rank or rank, self.num_neighbours or NUM_NEIGHBOURS

    @torch.no_grad()
    def build(self, operator: LinearOperator, observed: Tensor | None = None) -> Projection:
        """The projection for H [*b, m, m] of the observed data.

        Cost for each batch member: r kernel rows, one product with r columns, and a few times n r^2 multiply-adds.
        Memory: about four blocks [n, r], two of which are kept.
        """
        batch, size = operator.batch_shape, operator.shape[-1]
        rank, num_neighbours = self.sizes_for(operator)
        if batch:
            members = [_galerkin_basis(operator[index], rank) for index in itertools.product(*map(range, batch))]
            # Factors that ended early are filled up with zero columns, which change nothing.
            rank = max(basis.shape[-1] for basis, _ in members)
            basis, product = (
                torch.stack([pad(part, (0, rank - part.shape[-1])) for part in parts]).reshape(*batch, -1, rank)
                for parts in zip(*members, strict=True)
            )
        else:
            basis, product = _galerkin_basis(operator, rank)
        local = None
        if basis.shape[-1] < size:
            count, are_nearest = min(num_neighbours, size), _has_far_field(operator)
            local = LocalPart.of(operator, product, count, observed, are_nearest=are_nearest)
        return Projection(scatter_rows(basis, observed), local)


def exact_projection(factor: CholeskyFactor, observed: Tensor | None = None) -> Projection:
    """A = L^-T of a Cholesky factor: complete, n^2 numbers in its float64."""
    identity = torch.eye(factor.lower.shape[-1], dtype=factor.lower.dtype, device=factor.lower.device)
    basis = factor.whiten(identity.expand(factor.lower.shape)).mT
    return Projection(scatter_rows(basis, observed), None)


def extended_exact_projection(known: Projection, factor: CholeskyFactor, observed: Tensor | None) -> Projection:
    """The complete projection of a factor that extends that of `known`: 2 n^2 multiply-adds a new datum."""
    size, lower = factor.lower.shape[-1], factor.lower
    before = known.basis if observed is None else known.basis[..., observed[: known.basis.shape[-2]], :]
    before = before.expand(*lower.shape[:-2], *before.shape[-2:])
    count = size - before.shape[-1]
    # L^-T is upper triangular: its old columns stay, with zeros below them.
    new = torch.eye(size, dtype=lower.dtype, device=lower.device)[:, size - count :]
    added = torch.linalg.solve_triangular(lower.mT, new.expand(*lower.shape[:-1], count), upper=True)
    basis = torch.cat([pad(before, (0, 0, 0, count)), added], dim=-1)
    return Projection(scatter_rows(basis, observed), None)


def scatter_rows(columns: Tensor, observed: Tensor | None) -> Tensor:
    """[*b, m, s] to [*b, n, s], with zeros for what is not observed: products with K(x, X) then ignore it."""
    if observed is None:
        return columns
    result = columns.new_zeros(*columns.shape[:-2], observed.shape[-1], columns.shape[-1])
    result[..., observed, :] = columns
    return result


class _Neighbours:
    """The local part of test points [*batch, t]: which data, k' there, and their weights, from A^T k_x [*batch, t, r]."""

    def __init__(self, local: LocalPart, test_train: LinearOperator, coefficients: Tensor, points: torch.Size) -> None:
        self.local, self.test_train, self.coefficients, self.points = local, test_train, coefficients, points
        self.product = local.product.to(coefficients.dtype)
        nearest = local.nearest_to(test_train)
        self.rest = self._rest_at_all() if nearest is None else None
        with torch.no_grad():
            self.index = self._most_correlated() if nearest is None else nearest.reshape(*points, -1)
            self.blocks = self._blocks(self.index)
            self.rounding = local.rounding[..., None, None]
            self.blocks.diagonal(dim1=-2, dim2=-1).add_(self.rounding)
            self.lower = jittered_factor(self.blocks)
        self.correlation = self._rest_at(self.index).double()
        self.weights = torch.cholesky_solve(self.correlation.unsqueeze(-1), self.lower).squeeze(-1)

    def _rest_at_all(self) -> Tensor:
        """The k' of each point at all data, [*batch, t, m]."""
        prior, observed = blocks.dense(self.test_train), self.local.observed
        prior = prior if observed is None else prior[..., observed]
        return prior.reshape(*self.points, -1) - self.coefficients @ self.product.mT

    def _most_correlated(self) -> Tensor:
        assert self.rest is not None
        score = self.rest.abs() / self.local.deviation.to(self.rest.dtype).unsqueeze(-2)
        return score.topk(self.local.num_neighbours, dim=-1).indices

    def _rest_at(self, index: Tensor) -> Tensor:
        """The k' of each point at data of its own, [*batch, t, j] for an index of this shape."""
        if self.rest is not None:
            return self.rest.gather(-1, index)
        observed = self.local.observed
        columns = index if observed is None else observed.nonzero().squeeze(-1)[index]
        rows = torch.arange(self.test_train.shape[-2], device=index.device).repeat_interleave(index.shape[-1])
        prior = self.test_train[rows, columns.flatten()].view(index.shape)
        projected = self.product[index] @ self.coefficients.unsqueeze(-1)
        return prior - projected.squeeze(-1)

    def explained_variance(self) -> Tensor:
        """2 g^T k' - g^T R g, [*batch, t]: right also for weights that rounding has touched."""
        covariance = (self.blocks @ self.weights.unsqueeze(-1)).squeeze(-1)
        return (self.weights * (2 * self.correlation - covariance)).sum(-1)

    def explained_covariance(self) -> Tensor:
        """G^T K' + K'^T G - G^T R G, [*batch, t, t]."""
        is_small = self.index.shape[-1] * self.index.shape[-2] <= MAX_PAIRWISE
        cross, square = self._pairwise() if is_small else self._by_products()
        rounding = self.rounding * self.weights.square().sum(-1, keepdim=True)
        return cross + cross.mT - square - torch.diag_embed(rounding.squeeze(-1))

    def _pairwise(self) -> tuple[Tensor, Tensor]:
        """K'^T G and G^T R G through the kernel between all neighbours of all points: (t k)^2 entries."""
        together = self.index.flatten(-2).unsqueeze(-2)
        covariance = self._blocks(together).squeeze(-3)
        # [*batch, t k, t]: the weights of point i in column i, at its own rows.
        weights = torch.diag_embed(self.weights.mT).movedim(-3, -2).flatten(-3, -2)
        rest = self._rest_at(together.expand(*self.points, -1))
        return rest.double() @ weights, weights.mT @ (covariance @ weights)

    def _by_products(self) -> tuple[Tensor, Tensor]:
        """The same through one product with H and one with K(x, X), a column a point."""
        columns = self.product.new_zeros(*self.points, self.product.shape[-2])
        columns = columns.scatter(-1, self.index, self.weights.to(columns.dtype)).mT
        projected = self.product.mT @ columns
        square = columns.mT.double() @ blocks.product(self.local.operator, columns).double()
        square = square - projected.mT.double() @ projected.double()
        columns = scatter_rows(columns, self.local.observed)
        if self.test_train.dim() > len(self.points):
            cross = blocks.product(self.test_train, columns)
        else:  # a list of points for a batch: the blocks on the diagonal are what is wanted
            size = self.points[-1]
            listed = blocks.product(self.test_train, columns.movedim(-2, 0).flatten(1))
            cross = listed.reshape(-1, size, listed.shape[-1] // size, size)
            member = torch.arange(cross.shape[0], device=cross.device)
            cross = cross[member, :, member].reshape(*self.points, size)
        return cross.double() - self.coefficients.double() @ projected.double(), square

    def _blocks(self, index: Tensor) -> Tensor:
        """R at an index [*batch, *b, p, k]: [*batch, *b, p, k, k], in float64."""
        shape = self.product.shape[:-2]
        members = [
            torch.arange(size, device=index.device).view(-1, *[1] * (len(shape) - position + 1))
            for position, size in enumerate(shape)
        ]
        rows = self.product[(*members, index)]
        return (blocks.principal_blocks(self.local.operator, index).to(rows.dtype) - rows @ rows.mT).double()


def _galerkin_basis(operator: LinearOperator, rank: int) -> tuple[Tensor, Tensor]:
    """A with A^T H A = I, in the span of a pivoted Cholesky factor, and H A: [n, r] each."""
    precise = _precise(operator)
    basis = torch.linalg.qr(PivotedCholesky(rank=rank).low_rank(precise)).Q.contiguous()
    product = precise._matmul(basis)
    gram = torch.zeros(basis.shape[-1], basis.shape[-1], dtype=torch.float64, device=basis.device)
    for left, right in zip(basis.split(CHUNK), product.split(CHUNK), strict=True):
        gram += left.mT.double() @ right.double()
    if basis.shape[-1]:
        gram.diagonal().add_(_rounding(product / gram.diagonal().sqrt().to(product)))
    lower = psd_safe_cholesky(0.5 * (gram + gram.mT))
    return _solve_right_(basis, lower).to(operator.dtype), _solve_right_(product, lower).to(operator.dtype)


def _precise(operator: LinearOperator) -> LinearOperator:
    """The operator whose products the basis is made of: in float64 where their rounding errors come near to the noise.

    Those of K's entries are random, and a matrix of them has a norm of some sqrt(n) errors. With a far field the few
    projections are of large eigenvalues, beside which nothing is lost.
    """
    if operator.dtype == torch.float64 or not isinstance(operator, NoisyLinearOperator) or _has_far_field(operator):
        return operator
    largest = float(operator.kernel.diagonal(dim1=-2, dim2=-1).amax())
    rounding = ROUNDING_ERRORS * torch.finfo(operator.dtype).eps * operator.shape[-1] ** 0.5 * largest
    is_seen = rounding > NEGLIGIBLE * float(operator.noise.amin())
    return in_float64(operator, keeps_tiles=False) if is_seen else operator


def _solve_right_(columns: Tensor, lower: Tensor) -> Tensor:
    """The columns [*b, n, r] times L^-T, in place: in float64, rounded once."""
    for rows in columns.split(CHUNK, dim=-2):
        rows.copy_(torch.linalg.solve_triangular(lower, rows.mT.double(), upper=False).mT)
    return columns


def _has_far_field(operator: LinearOperator) -> bool:
    return far_field_error(operator) is not None


def _rounding(product: Tensor) -> Tensor:
    """The rounding error of R, [*b], from H A [*b, n, r]: eps times the largest |H a|^2."""
    norms = torch.linalg.vector_norm(product, dim=-2)
    if not norms.shape[-1]:  # of a prior that is zero
        return norms.double().sum(-1)
    largest = norms.amax(-1).square()
    return (torch.finfo(product.dtype).eps * largest).double()


def _least_variance(prior_variance: Tensor) -> Tensor:
    """The rounding error of prior variances."""
    return torch.finfo(prior_variance.dtype).eps * prior_variance.detach()


def jittered_factor(covariances: Tensor) -> Tensor:
    """Cholesky factors of covariances between data, [*, k, k], each with as much jitter as it needs."""
    return jittered_cholesky(covariances, "The covariance between neighbouring data", JITTERS)[0]

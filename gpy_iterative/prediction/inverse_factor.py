"""H^-1 as a short list of columns, all that a predictive variance needs from the training data.

    H^-1 ~ A A^T + 1/2 (P Q^T + Q P^T),        so        var(x) = k(x, x) - k_x^T H^-1 k_x

costs one product of K(x, X) with [A, P, Q], for any kernel. From a Cholesky factor A A^T is exact and P, Q are empty.
Otherwise two parts share the work:

* A is an exact part. With C the span of a pivoted Cholesky factor of K, A A^T = C (C^T H C)^-1 C^T is the inverse on C.
  Alone it gives the variance of the function after r projections of the data: never too small.
* P, Q estimate what it leaves, M = H^-1 - A A^T, without bias: with Pi = I - A A^T H, M = Pi H^-1 Pi^T, and for probes xi
  of any covariance S, M = E[p q^T] with p = Pi H^-1 xi, q = Pi S^-1 xi. S = L L^T + diag resembles H, which keeps the
  noise of s probes close to that of exact prior samples: relative to the rest var_A - var, sqrt(2 / s). There are no
  random features and therefore no feature error.

The Galerkin part is Wenger et al. 2022, "Posterior and computational uncertainty in Gaussian processes" (with
pivoted Cholesky vectors as actions); the rest is the trace identity of `gpy_iterative.probes` on its complement.
"""

from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.preconditioners import LowRankPlusDiagonal
from gpy_iterative.probes import Preconditioned
from gpy_iterative.solvers import CholeskyFactor, ColumnGroup, ConjugateGradients, Solution

#: A remainder estimate may take this share of the exact part's variance, so that none is ever negative.
MAX_REMAINDER = 0.98


@dataclass(frozen=True)
class InverseFactor:
    """H^-1 ~ A A^T + 1/2 (P Q^T + Q P^T).

    Attributes:
        columns: [A, P, Q], [*b, n, r + 2 s]; sqrt(1 / s) is contained in P and Q.
        rank: r.
    """

    columns: Tensor
    rank: int

    def variance(self, prior_variance: Tensor, projections: Tensor) -> Tensor:
        """var(x), between 0 and the exact part's variance.

        Args:
            prior_variance: k(x, x), [*batch, t].
            projections: K(x, X) columns, [*batch, t, r + 2 s].
        """
        exact, left, right = self._split(projections)
        subspace_variance = (prior_variance - exact.square().sum(-1)).clamp_min(0)
        remainder = (left * right).sum(-1)
        return subspace_variance - torch.minimum(remainder.clamp_min(0), MAX_REMAINDER * subspace_variance)

    def covariance(self, prior_covariance: Tensor, projections: Tensor) -> Tensor:
        """The posterior covariance [*batch, t, t] with the diagonal of `variance`, positive semi-definite.

        The remainder's estimate is taken as far as the matrix stays so: all of it, unless its noise is as large as
        the variance itself.
        """
        exact, left, right = self._split(projections)
        result = prior_covariance - exact @ exact.mT
        if left.shape[-1] == 0:
            return result
        product = left @ right.mT
        remainder = 0.5 * (product + product.mT)
        prior_variance = prior_covariance.diagonal(dim1=-2, dim2=-1)
        result = result - _largest_share(result, remainder, prior_variance) * remainder
        # The same diagonal as `variance`: rows and columns are rescaled where its bounds, or a share, were at work.
        wanted = self.variance(prior_variance, projections)
        diagonal = result.diagonal(dim1=-2, dim2=-1)
        tiny = torch.finfo(result.dtype).tiny
        scale = torch.where(diagonal > tiny, wanted / diagonal.clamp_min(tiny), torch.ones_like(wanted))
        scale = torch.where(wanted == diagonal, torch.ones_like(scale), scale).clamp_min(0).sqrt()
        return scale.unsqueeze(-1) * result * scale.unsqueeze(-2)

    def _split(self, projections: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        samples = (projections.shape[-1] - self.rank) // 2
        return projections.split([self.rank, samples, samples], dim=-1)


def exact_inverse_factor(factor: CholeskyFactor) -> InverseFactor:
    """A = L^-T: exact, n^2 numbers."""
    size = factor.lower.shape[-1]
    identity = torch.eye(size, dtype=factor.lower.dtype, device=factor.lower.device)
    return InverseFactor(factor.whiten(identity.expand(factor.lower.shape)).mT.to(factor.dtype), size)


@dataclass(frozen=True)
class InverseFactorRecipe:
    """How the columns are made where H is too large to factor.

    Args:
        rank: r, columns of the exact part; clamped at n.
        num_samples: s, probes of the remainder.
        tolerance: relative residual of their solves, relative to the probe after projection. The solver's error is
            far below the probes' own noise at 0.1.
        max_epochs: budget of their solves.

    Raises:
        ValueError: an option outside its range.
    """

    rank: int = 1024
    num_samples: int = 128
    tolerance: float = 0.1
    max_epochs: float = 1000

    def __post_init__(self) -> None:
        for name in ("rank", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @torch.no_grad()
    def build(self, operator: LinearOperator, generator: torch.Generator) -> tuple[InverseFactor, list[Solution]]:
        """The columns for H [*b, n, n], and how the solves went (one a batch member).

        Cost for each member: r kernel rows, n r^2 multiply-adds three times, one product with r columns, and one
        solve of s columns by conjugate gradients whose preconditioner is the factor already made. Memory: about six
        blocks [n, r].
        """
        if not operator.batch_shape:
            columns, rank, solution = self._build_one(operator, generator)
            return InverseFactor(columns, rank), [solution]
        flat = [operator[index] for index in _indices(operator.batch_shape)]
        members = [self._build_one(member, generator) for member in flat]
        # Factors that ended early are filled up with zero columns, which change nothing.
        rank = max(member[1] for member in members)
        columns = torch.stack([pad(member, (rank - own, 0)) for member, own, _ in members])
        shaped = columns.reshape(*operator.batch_shape, *columns.shape[1:])
        return InverseFactor(shaped, rank), [member[2] for member in members]

    def _build_one(self, operator: LinearOperator, generator: torch.Generator) -> tuple[Tensor, int, Solution]:
        distribution = Preconditioned(num_probes=self.num_samples, rank=self.rank)
        probes = distribution.probes(operator, None, distribution.draw(operator, None, generator))
        covariance, dual = probes.covariance, probes.dual
        assert covariance is not None
        assert dual is not None
        basis, image = _galerkin_basis(operator, covariance)
        projected = probes.vectors - image @ (basis.mT @ probes.vectors)
        solver = ConjugateGradients(tolerance=self.tolerance, max_epochs=self.max_epochs)
        solution = solver.solve(
            operator,
            projected,
            groups=[ColumnGroup("samples", self.num_samples, self.tolerance)],
            preconditioner=covariance,
        )
        scale = self.num_samples**-0.5
        # Both sides are projected: exact arithmetic would need it for one of them only.
        left, right = (scale * (v - basis @ (image.mT @ v)) for v in (solution.value, dual))
        return torch.cat([basis, left, right], dim=-1), basis.shape[-1], solution


def _galerkin_basis(operator: LinearOperator, covariance: LowRankPlusDiagonal) -> tuple[Tensor, Tensor]:
    """A with A^T H A = I and the span of the covariance's factor, and H A: [n, r] each."""
    basis = torch.linalg.qr(covariance.factor).Q.contiguous()
    image = operator._matmul(basis)
    gram = basis.mT.double() @ image.double()
    gram = 0.5 * (gram + gram.mT)
    lower = psd_safe_cholesky(gram)
    return _solve_right(basis, lower), _solve_right(image, lower)


def _solve_right(columns: Tensor, lower: Tensor) -> Tensor:
    """The columns times L^-T in float64, rounded once."""
    return torch.linalg.solve_triangular(lower, columns.mT.double(), upper=False).mT.to(columns.dtype).contiguous()


@torch.no_grad()
def _largest_share(exact: Tensor, remainder: Tensor, prior_variance: Tensor) -> Tensor:
    """The largest of a few shares of the remainder that leaves the matrix positive semi-definite: [*batch, 1, 1]."""
    # Rounding of prior - exact: what the matrix may lack without being to blame for it.
    rounding = (16 * torch.finfo(exact.dtype).eps * prior_variance).unsqueeze(-1)
    identity = torch.eye(exact.shape[-1], dtype=exact.dtype, device=exact.device)
    share = exact.new_zeros(*exact.shape[:-2], 1, 1)
    for trial in (0.5, 0.75, 0.9, 1.0):
        _, info = torch.linalg.cholesky_ex(exact - trial * remainder + rounding * identity)
        share = torch.where((info == 0)[..., None, None], torch.full_like(share, trial), share)
    return share


def _indices(batch_shape: torch.Size) -> list[tuple[int, ...]]:
    return [tuple(index) for index in torch.ones(batch_shape).nonzero().tolist()]

"""Log-determinant by preconditioned stochastic Lanczos quadrature, with a warm start.

Ubaru et al. 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"; Wenger et al. 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.preconditioners.low_rank_plus_diagonal import NystromFactor
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholeskyFactor
from gpy_iterative.preconditioners.preconditioner import SampledPreconditioner
from gpy_iterative.preconditioners.task_noise import WhitenedTasks
from gpy_iterative.worker_threads import divided

#: Upper (Gauss) and lower (Gauss-Radau) bounds on u^T log(M) u [*b, s].
Bounds = tuple[Tensor, Tensor]

#: Distance of the bounds over the error of their mean.
BRACKET_PARTS = 4
#: Change of that distance over the error of an estimate by positions.
CHANGE_PARTS = 16
#: Largest error of the quadrature, in standard errors of the probes.
WORTH_OF_ERROR = 1.0
#: An error that is always accepted, in nats per datum.
RESOLUTION = 0.003
#: Default maximum of products, and the minimum.
MAX_LOGDET_PRODUCTS = 20
LEAST_PRODUCTS = 2

#: Factor of old positions' error from one iteration to the next.
FALL = 0.46
#: Error of a correction, relative to the correction.
DOUBTED = 0.25
#: Life of a run's first positions, whose drift is unknown.
FIRST_LIFE = 5
#: Kept part of the old drift: a new measurement may be zero by chance.
REMEMBERED = 0.5


@dataclass(frozen=True)
class BracketPositions:
    """Warm start of the log-determinant's quadrature: positions of the limit between the bounds (0 lower, 1 upper).

    They change slowly in training, so later steps estimate the limit from two or three iterations.

    Attributes:
        values: [*b, s, k], by probe and iteration.
        gaps: [*b, k], mean distance of the bounds.
        error: [*b], when learned.
        drift: [*b, k], further error per step; zero if unknown.
        age: [], estimates since then.
        life: [], maximum age.
        surplus: [], products beyond two per estimate.
    """

    values: Tensor
    gaps: Tensor
    error: Tensor
    drift: Tensor
    age: Tensor
    life: Tensor
    surplus: Tensor

    @classmethod
    def learned(
        cls, bounds: Sequence[Bounds], truth: Tensor, error: Tensor, before: "BracketPositions | None"
    ) -> "BracketPositions":
        """Positions of a long quadrature with limit [*b, s] and error [*b]."""
        upper, lower = (torch.stack(rule, dim=-1) for rule in zip(*bounds, strict=True))
        gap = upper - lower
        positions = (truth.unsqueeze(-1) - lower) / torch.where(gap > 0, gap, 1.0)
        values, gaps = torch.where(gap > 0, positions, 0.5).clamp(0, 1), gap.mean(-2)
        zero = torch.zeros((), dtype=torch.int64, device=values.device)
        drift = torch.zeros_like(values[..., 0, :])
        errors = []  # of the old positions
        if before is not None:
            estimates = [before.estimate(bounds[:count]) for count in range(LEAST_PRODUCTS, len(bounds) + 1)]
            errors = [(found[0] - truth).mean(-1).abs() for found in estimates if found is not None]
        if before is None or not errors:
            return cls(values, gaps, error, drift, zero, zero + FIRST_LIFE, zero)
        age = before.age + 1
        # At least the errors of later estimates.
        measured = torch.stack(errors, dim=-1).flip(-1).cummax(-1).values.flip(-1) / age
        for iteration in range(1, len(bounds)):
            now, old = measured[..., min(iteration, len(errors)) - 1], before.drift[..., : iteration + 1][..., -1]
            drift[..., iteration] = now.maximum(REMEMBERED * old)
        return cls(values, gaps, error, drift, zero, 2 * age, zero)

    @property
    def are_worn(self) -> bool:
        """Whether to learn again."""
        return bool(self.age >= self.life) or bool(self.surplus >= self.values.shape[-1] - LEAST_PRODUCTS)

    def used(self, products: int) -> "BracketPositions":
        """After one more estimate."""
        return replace(self, age=self.age + 1, surplus=self.surplus + products - LEAST_PRODUCTS)

    def estimate(self, bounds: Sequence[Bounds]) -> tuple[Tensor, Tensor] | None:
        """The limit [*b, s] and the further error [*b] of its mean; None for too few or many iterations."""
        count = len(bounds)
        if not LEAST_PRODUCTS <= count <= self.values.shape[-1]:
            return None
        last, samples = (
            lower + self.values[..., number] * (upper - lower)
            for number, (upper, lower) in enumerate(bounds[-2:], count - 2)
        )
        correction = (samples - last).mean(-1) * (FALL / (1 - FALL))
        drifted = self.drift[..., count - 1] * (self.age + 1)
        upper, lower = bounds[-1]
        gap = (upper - lower).mean(-1)
        changed = (gap - self.gaps[..., count - 1]).abs().minimum(gap) / CHANGE_PARTS
        return samples + correction.unsqueeze(-1), (DOUBTED * correction.abs()).maximum(drifted).maximum(changed)


@dataclass(frozen=True)
class LogDeterminant:
    """An estimate of log det H [*b] and its standard error.

    Attributes:
        positions: warm start for a similar system.
    """

    mean: Tensor
    sem: Tensor
    positions: BracketPositions


@dataclass(frozen=True)
class _Found:
    samples: Tensor  # u^T log(M) u [*b, s]
    error: Tensor  # of their mean [*b], from the quadrature
    sem: Tensor  # from the probes [*b]


class LogDeterminantQuadrature:
    """Estimates log det H = log det P + E[u^T log(M) u], with M = P^-1/2 H P^-1/2 and u = P^-1/2 xi.

    The estimate is the mean of the Gauss and Gauss-Radau rules, whose error may be as large as the probes' standard error.
    The variance of one probe from random signs is 2 (|log M|_F^2 - (tr log M)^2 / signs). Cost: one product per iteration;
    `SharedProducts` brings those of a solve.

    Args:
        operator: H [*b, n, n].
        probes: xi [*b, n, s] with covariance P, from random signs.
        preconditioner: P.
        max_iterations: at least two.
        positions: of a similar system.

    Attributes:
        wanted: the next vectors to be multiplied by H, [*b, n, s]; None in the end.
    """

    wanted: Tensor | None

    @torch.no_grad()
    @divided()
    def __init__(
        self,
        operator: LinearOperator,
        probes: Tensor,
        preconditioner: SampledPreconditioner,
        *,
        max_iterations: int = MAX_LOGDET_PRODUCTS,
        positions: BracketPositions | None = None,
    ) -> None:
        self._operator, self._preconditioner = operator, preconditioner
        self._size, self._positions = probes.shape[-2], positions
        self._most = min(max(max_iterations, LEAST_PRODUCTS), self._size)
        self._end: tuple[_Found, BracketPositions] | None = None
        # Pivoted Cholesky and Nystrom factors have K >= L L^T, so H >= L L^T + noise >= min(noise / d) P.
        factor, noise = preconditioner, operator.noise if isinstance(operator, NoisyLinearOperator) else None
        if isinstance(factor, WhitenedTasks):
            factor, noise = factor.inner, 1.0
        self._floor: Tensor | None = None
        if noise is not None and isinstance(factor, NystromFactor | PivotedCholeskyFactor):
            self._floor = (noise / factor.diagonal).amin(-1)
        self._bounds: list[Bounds] = []
        self._diagonals: list[Tensor] = []
        self._offdiagonals: list[Tensor] = []
        self._judged: Tensor | None = None  # its change bounds the error
        self._residual, self.wanted = probes, preconditioner.solve(probes)
        self._squared_norm = (probes * self.wanted).sum(-2).clamp_min(0)
        self._beta, self._previous = self._squared_norm.sqrt(), torch.zeros_like(probes)

    @torch.no_grad()
    @divided()
    def finished(self) -> LogDeterminant:
        """The estimate, after products of its own where these are missing."""
        while self._end is None:
            self.take(self._operator._matmul(self.wanted))
        found, positions = self._end
        mean = self._preconditioner.logdet() + found.samples.mean(-1)
        return LogDeterminant(mean, torch.hypot(found.sem, found.error), positions)

    def take(self, product: Tensor) -> None:
        """Goes on with H `wanted`."""
        found, positions = self._advanced(product), self._positions
        allowed = (WORTH_OF_ERROR * found.sem).clamp_min(RESOLUTION * self._size)
        count = len(self._bounds)
        is_last, is_enough = count == self._most, bool((found.error <= allowed).all())
        if positions is not None and not is_enough and (estimate := positions.estimate(self._bounds)) is not None:
            expected, drifted = estimate
            inherited = torch.hypot(drifted, positions.error)
            is_known = not positions.are_worn and bool((drifted <= allowed).all())
            if is_known or (is_last and bool((inherited < found.error).all())):
                self._end, self.wanted = (_Found(expected, inherited, found.sem), positions.used(count)), None
                return
        if is_enough or is_last:
            learned = BracketPositions.learned(self._bounds, found.samples, found.error, positions)
            self._end, self.wanted = (found, learned), None

    def _advanced(self, product: Tensor) -> _Found:
        # Beta is zero when the Krylov space is exhausted.
        inverse = torch.where(self._beta > 0, 1 / torch.where(self._beta > 0, self._beta, 1.0), 0.0)
        vector, product = self._residual * inverse.unsqueeze(-2), product * inverse.unsqueeze(-2)
        alpha = (self.wanted * product).sum(-2) * inverse
        residual = product - alpha.unsqueeze(-2) * vector
        if self._diagonals:
            residual -= self._beta.unsqueeze(-2) * self._previous
            self._offdiagonals.append(self._beta)
        self._diagonals.append(alpha)
        self._residual, self._previous, self.wanted = residual, vector, self._preconditioner.solve(residual)
        beta = (residual * self.wanted).sum(-2).clamp_min(0).sqrt()
        # A beta of rounding size gives no new direction.
        self._beta = torch.where(beta > 10 * torch.finfo(beta.dtype).eps * alpha.abs(), beta, torch.zeros_like(beta))
        rules = _quadratures(self._diagonals, self._offdiagonals, self._beta, self._floor)
        upper, lower, squares = (rule * self._squared_norm for rule in rules)
        self._bounds.append((upper, lower))
        samples = (upper + lower) / 2
        # Without a floor the lower rule may cross the limit.
        before, self._judged = self._judged, upper if self._floor is None else samples
        error = (upper - lower).mean(-1).abs() / BRACKET_PARTS
        # The bounds' distance is too optimistic in hard systems.
        if before is None:
            is_exhausted = (self._beta == 0).all(-1)
            change = torch.where(is_exhausted, torch.zeros_like(error), torch.inf)
        else:
            change = (self._judged - before).mean(-1).abs()
        # The deviation of so few samples is often too small.
        variance = 2 * (squares.mean(-1) - samples.mean(-1).square() / self._preconditioner.num_signs).clamp_min(0)
        sem = (variance / samples.shape[-1]).sqrt()
        return _Found(samples, error.maximum(change), sem)


class SharedProducts(NoisyLinearOperator):
    """H, whose products also serve a quadrature: one pass over the kernel matrix instead of two.

    Copies and parts are plain.
    """

    _quadrature: LogDeterminantQuadrature | None = None

    @classmethod
    def of(cls, operator: LinearOperator, quadrature: LogDeterminantQuadrature) -> LinearOperator:
        """The operator itself if it is not a kernel matrix plus noise."""
        if not isinstance(operator, NoisyLinearOperator):
            return operator
        shared = cls(operator.kernel, operator.noise)
        shared._quadrature = quadrature
        return shared

    def _matmul(self, rhs: Tensor) -> Tensor:
        wanted = None if self._quadrature is None else self._quadrature.wanted
        if wanted is None or wanted.shape[:-1] != rhs.shape[:-1] or wanted.dtype != rhs.dtype:
            return super()._matmul(rhs)
        own, theirs = super()._matmul(torch.cat([rhs, wanted], dim=-1)).split([rhs.shape[-1], wanted.shape[-1]], dim=-1)
        self._quadrature.take(theirs)
        return own


def _quadratures(
    diagonals: list[Tensor], offdiagonals: list[Tensor], beta: Tensor, floor: Tensor | None
) -> list[Tensor]:
    """e_1^T log(T) e_1 by the rules of Gauss and Gauss-Radau (node at the floor), and e_1^T log(T)^2 e_1, all [*b, s]."""
    # Gauss-Radau has one row more than T.
    off = torch.diag_embed(torch.stack([*offdiagonals, beta], dim=-1).double(), offset=1)
    extended = torch.diag_embed(torch.stack([*diagonals, torch.zeros_like(beta)], dim=-1).double()) + off + off.mT
    matrix = extended[..., :-1, :-1]
    values, vectors = torch.linalg.eigh(matrix)
    if floor is None:
        floor = (0.5 * values[..., 0]).maximum(torch.finfo(beta.dtype).eps * values[..., -1])
    else:
        floor = floor.double().unsqueeze(-1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # Below the floor, because rounding may put Ritz values on it.
    node = floor * (1 - 1e-3)
    last = identity[:, -1:].expand(*matrix.shape[:-1], 1)
    shifted = matrix - node[..., None, None] * identity
    corner = node + beta.double().square() * torch.linalg.solve(shifted, last)[..., -1, 0]
    extended[..., -1, -1] = corner.to(beta.dtype)
    radau_values, radau_vectors = torch.linalg.eigh(extended)
    upper, lower = (found.maximum(node.unsqueeze(-1)).log() for found in (values, radau_values))
    weights, radau_weights = (found[..., 0, :].square() for found in (vectors, radau_vectors))
    rules = weights * upper, radau_weights * lower, weights * upper.square()
    return [rule.sum(-1).to(beta.dtype) for rule in rules]

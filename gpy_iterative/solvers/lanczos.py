"""The log-determinant by preconditioned stochastic Lanczos quadrature.

Ubaru, Chen and Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"; Wenger et al. 2022,
"Preconditioning for scalable Gaussian process hyperparameter optimization", for the preconditioner's share.
"""

from dataclasses import dataclass, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.preconditioners import LowRankPlusDiagonal, NystromFactor, PivotedCholeskyFactor

#: The share of the bracket between upper and lower quadrature that counts as the error of their mean. Measured on
#: kernel systems of noise .02 to 1, the error is between a fourth and a thirteenth of the bracket.
BRACKET_SHARE = 8
#: The least share of a correction that counts as its error. Measured as above, one to five training steps after the
#: shares: an eighth at the most.
CORRECTION_SHARE = 4
#: The quadrature stops where its error is so many standard errors of the probes. The reported error counts both.
WORTH_OF_ERROR = 1.0
#: Products of an estimate at the least: the second shows how far the first was off.
LEAST_PRODUCTS = 2
#: Products of an estimate at the most, where nothing else is said.
MAX_LOGDET_PRODUCTS = 20


@dataclass(frozen=True)
class QuadratureShares:
    """Where between its upper and its lower rule the truth of a quadrature was, for estimates of similar systems.

    Attributes:
        values: Gauss' share of the two rules, [*b, k] by iteration.
        surplus: [], products beyond the least that estimates with these shares have taken, all together.
    """

    values: Tensor
    surplus: Tensor

    @property
    def are_worn(self) -> bool:
        """Whether the surplus has come to what learning anew costs: of one that grows evenly, the cheapest moment."""
        return int(self.surplus) >= self.values.shape[-1] - LEAST_PRODUCTS


@dataclass(frozen=True)
class LogDeterminant:
    """An estimate of log det H and its standard error, both [*b].

    The error is that of the probes, and of the quadrature where it stopped.

    Attributes:
        shares: what an estimate for a similar system can start from.
    """

    mean: Tensor
    sem: Tensor
    shares: QuadratureShares


@torch.no_grad()
def stochastic_logdet(
    operator: LinearOperator,
    probes: Tensor,
    preconditioner: LowRankPlusDiagonal,
    *,
    max_iterations: int = MAX_LOGDET_PRODUCTS,
    tolerance: float | None = None,
    shares: QuadratureShares | None = None,
    first_image: Tensor | None = None,
) -> LogDeterminant:
    """An estimate of log det H = log det P + E[u^T log(M) u], with M = P^-1/2 H P^-1/2 and u = P^-1/2 xi.

    Args:
        operator: H [*b, n, n].
        probes: xi [*b, n, s] with covariance P. The standard error is that of their mean.
        preconditioner: P.
        max_iterations: products with H at the most; there are always two.
        tolerance: the quadrature stops when its own error is below `tolerance` a datum; None: when it is comparable
            with the probes' standard error.
        shares: of an earlier estimate for a similar system.
        first_image: H P^-1 xi [*b, n, s], where it is at hand: the first of the products.

    The spectrum of M is bounded from below where P is a pivoted Cholesky factor (by 1 where its diagonal is the
    noise). Then Gauss' rule is an upper and Gauss and Radau's a lower bound; their mean, which is returned, converges
    several times faster than either.

    Where between the two the truth lies depends on the spectrum's shape, hardly on the probes, and changes slowly as
    hyperparameters do. With the shares of an earlier step the first few iterations are as good as all of that step's
    (elevators: 2 to 5 products a training step in place of 8). Whether they still hold shows in the estimates of two
    successive iterations, which agree if they do; where they do not, the quadrature goes on. Shares that are worn are not
    used: they are learned anew.

    Cost: one product with s columns an iteration.
    """
    known = None if shares is None or shares.are_worn else shares.values
    limit = None if tolerance is None else tolerance * operator.shape[-1]
    floor = _smallest_eigenvalue(operator, preconditioner)
    base = preconditioner.logdet()
    solved = preconditioner.solve(probes)
    squared_norm = (probes * solved).sum(-2).clamp_min(0)
    beta = squared_norm.sqrt()
    residual, previous = probes, torch.zeros_like(probes)
    diagonals: list[Tensor] = []
    offdiagonals: list[Tensor] = []
    rules: list[tuple[Tensor, Tensor]] = []
    samples = torch.zeros_like(squared_norm)
    error = torch.zeros_like(base)
    for iteration in range(min(max(max_iterations, LEAST_PRODUCTS), operator.shape[-1])):
        # A beta of 0 means that the Krylov space is exhausted: its column adds zeros of weight zero.
        inverse = torch.where(beta > 0, 1 / torch.where(beta > 0, beta, torch.ones_like(beta)), torch.zeros_like(beta))
        vector, dual = residual * inverse.unsqueeze(-2), solved * inverse.unsqueeze(-2)
        if iteration or first_image is None:
            image = operator._matmul(dual)
        else:
            image = first_image * inverse.unsqueeze(-2)
        alpha = (dual * image).sum(-2)
        diagonals.append(alpha)
        residual = image - alpha.unsqueeze(-2) * vector
        if iteration:
            residual -= beta.unsqueeze(-2) * previous
        solved, previous = preconditioner.solve(residual), vector
        beta = (residual * solved).sum(-2).clamp_min(0).sqrt()
        # What is left by rounding is no new direction.
        beta = torch.where(beta > 10 * torch.finfo(beta.dtype).eps * alpha.abs(), beta, torch.zeros_like(beta))
        upper, lower = _quadratures(diagonals, offdiagonals, beta, floor)
        rules.append(((upper * squared_norm).mean(-1), (lower * squared_norm).mean(-1)))

        # In hard systems the bracket's share is too hopeful, and without a floor there is no bracket.
        change = (sum(rules[-1]) - sum(rules[-2])).abs() / 2 if iteration else torch.full_like(base, torch.inf)
        samples = (upper + lower) / 2 * squared_norm
        error = ((rules[-1][0] - rules[-1][1]).abs() / BRACKET_SHARE).maximum(change)
        if _is_enough(error, samples, limit):
            known = None  # nothing better is known than what this run has found
            break
        if known is not None and 0 < iteration < known.shape[-1]:
            correction, doubt = _drift(rules, known)
            share = known[..., iteration].unsqueeze(-1)
            expected = (lower + share * (upper - lower)) * squared_norm + correction.unsqueeze(-1)
            if _is_enough(doubt, expected, limit):
                samples, error = expected, doubt
                break
        offdiagonals.append(beta)
    mean = samples.mean(-1)
    if shares is None or known is None:
        shares = QuadratureShares(_shares(rules, mean), torch.tensor(0))
    else:
        shares = replace(shares, surplus=shares.surplus + len(rules) - LEAST_PRODUCTS)
    return LogDeterminant(base + mean, torch.hypot(_sem(samples), error), shares)


def _is_enough(error: Tensor, samples: Tensor, limit: float | None) -> bool:
    """Whether an error [*b] is below the limit; None: below what the samples leave uncertain anyway."""
    return bool((error <= (WORTH_OF_ERROR * _sem(samples).nan_to_num(0.0) if limit is None else limit)).all())


def _shares(rules: list[tuple[Tensor, Tensor]], mean: Tensor) -> Tensor:
    """Gauss' share of the two rules in hindsight, [*b, k]."""
    shares = []
    for upper, lower in rules:
        gap = upper - lower
        share = torch.where(gap > 0, (mean - lower) / torch.where(gap > 0, gap, 1.0), 0.5)
        shares.append(share.clamp(0, 1))
    return torch.stack(shares, dim=-1)


def _drift(rules: list[tuple[Tensor, Tensor]], shares: Tensor) -> tuple[Tensor, Tensor]:
    """What to add to the last estimate where the shares no longer quite hold, and the error that is left, both [*b].

    Later shares move less than earlier ones, and the error is about the difference between the last two estimates. If all
    had moved alike, it would be as the gap between the rules, which is what is left in doubt.
    """
    (upper, lower), (last_upper, last_lower) = rules[-1], rules[-2]
    gap, last_gap = upper - lower, last_upper - last_lower
    correction = lower + shares[..., len(rules) - 1] * gap - (last_lower + shares[..., len(rules) - 2] * last_gap)
    closing = last_gap - gap
    alike = torch.where(closing > 0, correction * gap / torch.where(closing > 0, closing, 1.0), torch.inf)
    return correction, (alike - correction).abs().maximum(correction.abs() / CORRECTION_SHARE)


def _smallest_eigenvalue(operator: LinearOperator, preconditioner: LowRankPlusDiagonal) -> Tensor | None:
    """A lower bound on the spectrum of M, [*b]; None where none is known.

    A pivoted Cholesky factor, as Nystrom's, has K >= L L^T, so that H >= L L^T + noise >= min(noise / d) P.
    """
    if isinstance(operator, NoisyLinearOperator) and isinstance(preconditioner, (NystromFactor, PivotedCholeskyFactor)):
        return (operator.noise / preconditioner.diagonal).amin(-1)
    return None


def _sem(samples: Tensor) -> Tensor:
    size = samples.shape[-1]
    if size == 1:
        return torch.full_like(samples[..., 0], torch.nan)  # one sample knows nothing of its own error
    return samples.std(-1) / size**0.5


def _quadratures(
    diagonals: list[Tensor], offdiagonals: list[Tensor], beta: Tensor, floor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """e_1^T log(T) e_1 of the tridiagonal T by Gauss' rule and by Gauss and Radau's with a node at the floor, [*b, s].

    The even derivatives of the logarithm are negative and the odd ones positive, so that the first is above
    and the second below the truth, but for rounding. Below the floor Ritz values are rounding errors, whose logarithms
    run wild. Without one, half the smallest Ritz value takes its place, and the second rule is no bound.
    """
    matrix = _tridiagonal(diagonals, offdiagonals)
    if floor is None:
        values = torch.linalg.eigvalsh(matrix)
        floor = (0.5 * values[..., 0]).maximum(torch.finfo(beta.dtype).eps * values[..., -1])
    else:
        floor = floor.double().unsqueeze(-1)
    size = matrix.shape[-1]
    last = torch.zeros(size, 1, dtype=matrix.dtype, device=matrix.device)
    last[-1] = 1
    # Just below the floor, so that Ritz values which rounding puts on it do no harm.
    node = floor * (1 - 1e-3)
    shifted = matrix - node[..., None, None] * torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    corner = node + beta.double().square() * torch.linalg.solve(shifted, last.expand(*matrix.shape[:-1], 1))[..., -1, 0]
    extended = _tridiagonal([*diagonals, corner.to(beta.dtype)], [*offdiagonals, beta])
    return _log_of_first(matrix, node).to(beta.dtype), _log_of_first(extended, node).to(beta.dtype)


def _tridiagonal(diagonals: list[Tensor], offdiagonals: list[Tensor]) -> Tensor:
    matrix = torch.diag_embed(torch.stack(diagonals, dim=-1).double())
    if offdiagonals:
        off = torch.diag_embed(torch.stack(offdiagonals, dim=-1).double(), offset=1)
        matrix = matrix + off + off.mT
    return matrix


def _log_of_first(matrix: Tensor, floor: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors[..., 0, :].square() * values.maximum(floor.unsqueeze(-1)).log()).sum(-1)

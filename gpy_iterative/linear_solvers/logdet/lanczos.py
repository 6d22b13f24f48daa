"""The log-determinant by preconditioned stochastic Lanczos quadrature.

Ubaru, Chen and Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"; Wenger et al. 2022,
"Preconditioning for scalable Gaussian process hyperparameter optimization", for the preconditioner's share.
"""

from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.base import is_negative
from gpy_iterative.linear_solvers.logdet.quadrature_shares import LEAST_PRODUCTS, QuadratureShares, Rules
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal, NystromFactor
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholeskyFactor
from gpy_iterative.worker_threads import divided

#: The share of the bracket between upper and lower quadrature that counts as the error of their mean. Measured on
#: kernel systems of noise .02 to 1, the error is between a fourth and a thirteenth of the bracket.
BRACKET_SHARE = 8
#: The quadrature stops where its error is so many standard errors of the probes. The reported error counts both.
WORTH_OF_ERROR = 1.0
#: An error of the value, in nats a datum, below which no product is worth taking: four probes may agree by chance.
RESOLUTION = 0.003
#: Products of an estimate at the most, where nothing else is said.
MAX_LOGDET_PRODUCTS = 20


@dataclass(frozen=True)
class LogDeterminant:
    """An estimate of log det H and its standard error, both [*b].

    The error is that of the probes, and of the quadrature where it stopped.

    Attributes:
        shares: what an estimate for a similar system can start from.
        is_indefinite: whether Ritz values were negative beyond rounding; the log-determinant then means nothing.
    """

    mean: Tensor
    sem: Tensor
    shares: QuadratureShares
    is_indefinite: bool = False


@torch.no_grad()
@divided()
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
            with the probes' standard error, or below .003 a datum.
        shares: of an earlier estimate for a similar system.
        first_image: H P^-1 xi [*b, n, s], where it is at hand: the first of the products.

    The spectrum of M is bounded from below where P is a pivoted Cholesky factor (by 1 where its diagonal is the
    noise). Then Gauss' rule is an upper and Gauss and Radau's a lower bound; their mean, which is returned, converges
    several times faster than either.

    With the shares of an earlier step the first few iterations are as good as all of that step's (see
    `quadrature_shares.py`; elevators: 2 or 3 products a training step in place of 8). Where they do not
    hold any more the quadrature goes on, and they are learned anew; where the iterations end before either is enough, the
    better of the two is taken.

    Cost: one product with s columns an iteration.
    """
    size = operator.shape[-1]
    most = min(max(max_iterations, LEAST_PRODUCTS), size)
    floor = _smallest_eigenvalue(operator, preconditioner)
    base = preconditioner.logdet()
    solved = preconditioner.solve(probes)
    squared_norm = (probes * solved).sum(-2).clamp_min(0)
    beta = squared_norm.sqrt()
    residual, previous = probes, torch.zeros_like(probes)
    diagonals: list[Tensor] = []
    offdiagonals: list[Tensor] = []
    rules: list[Rules] = []
    samples = torch.zeros_like(squared_norm)
    error = torch.zeros_like(base)
    for iteration in range(most):
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
        rules.append((upper * squared_norm, lower * squared_norm))

        # In hard systems the bracket's share is too hopeful, and without a floor there is no bracket.
        last, samples = samples, (upper + lower) / 2 * squared_norm
        change = (samples - last).mean(-1).abs() if iteration else torch.full_like(base, torch.inf)
        error = ((upper - lower) * squared_norm).mean(-1).abs().div(BRACKET_SHARE).maximum(change)
        if _is_enough(error, samples, size, tolerance):
            learned = QuadratureShares.learned(rules, samples, error, shares)
            break
        if shares is not None and shares.serve(rules):
            expected, doubt = shares.estimate(rules)
            inherited = torch.hypot(doubt, shares.error)
            counted = doubt if tolerance is None else inherited
            is_enough = not shares.are_worn and _is_enough(counted, expected, size, tolerance)
            is_last = iteration + 1 == most
            if is_enough or (is_last and bool((inherited < error).all())):
                samples, error, learned = expected, inherited, shares.used(len(rules))
                break
        offdiagonals.append(beta)
    else:
        learned = QuadratureShares.learned(rules, samples, error, shares)
    matrix = _tridiagonal(diagonals, offdiagonals[: len(diagonals) - 1])
    # A Ritz value is x^T H x / x^T P x, and P nowhere smaller than its diagonal.
    smallest = torch.linalg.eigvalsh(matrix)[..., 0].amin(-1) * preconditioner.diagonal.amin(-1)
    return LogDeterminant(
        base + samples.mean(-1),
        torch.hypot(_sem(samples), error),
        learned,
        is_negative(float(smallest.min()), operator, torch.finfo(operator.dtype).eps),
    )


def _is_enough(error: Tensor, samples: Tensor, size: int, tolerance: float | None) -> bool:
    """Whether an error [*b] is below the limit; None: below what the samples leave uncertain anyway, or the resolution."""
    if tolerance is not None:
        return bool((error <= tolerance * size).all())
    return bool((error <= (WORTH_OF_ERROR * _sem(samples).nan_to_num(0.0)).clamp_min(RESOLUTION * size)).all())


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

"""The log-determinant by preconditioned stochastic Lanczos quadrature.

Ubaru, Chen and Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature"; Wenger et al. 2022,
"Preconditioning for scalable Gaussian process hyperparameter optimization", for the preconditioner's share.
"""

from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholeskyFactor

#: How much of one change the next one may be, when what is left is forecast as a geometric series.
SLOWEST_PACE = 0.95


@dataclass(frozen=True)
class LogDeterminant:
    """An estimate of log det H and its standard error, both [*b].

    The error is that of the probes, and of what the quadrature had still to gain when it stopped.
    """

    mean: Tensor
    sem: Tensor


@torch.no_grad()
def stochastic_logdet(
    operator: LinearOperator,
    probes: Tensor,
    preconditioner: LowRankPlusDiagonal,
    *,
    max_iterations: int = 30,
    tolerance: float = 1e-4,
) -> LogDeterminant:
    """An estimate of log det H = log det P + E[u^T log(M) u], with M = P^-1/2 H P^-1/2 and u = P^-1/2 xi.

    Args:
        operator: H [*b, n, n].
        probes: xi [*b, n, s] with covariance P. The standard error is that of their mean.
        preconditioner: P.
        max_iterations: products with H at the most.
        tolerance: the quadrature stops when what it has still to gain, by the pace of its last changes, is below
            `tolerance` a datum, or below a fifth of the probes' standard error.

    Cost: one product with s columns an iteration.
    """
    floor = _smallest_eigenvalue(operator, preconditioner)
    base = preconditioner.logdet()
    solved = preconditioner.solve(probes)
    squared_norm = (probes * solved).sum(-2).clamp_min(0)
    beta = squared_norm.sqrt()
    residual, previous = probes, torch.zeros_like(probes)
    diagonals: list[Tensor] = []
    offdiagonals: list[Tensor] = []
    estimate = change = remainder = torch.zeros_like(squared_norm[..., 0])
    samples = torch.zeros_like(squared_norm)
    for iteration in range(min(max_iterations, operator.shape[-1])):
        # A beta of 0 means that the Krylov space is exhausted: its column adds zeros of weight zero.
        inverse = torch.where(beta > 0, 1 / torch.where(beta > 0, beta, torch.ones_like(beta)), torch.zeros_like(beta))
        vector, dual = residual * inverse.unsqueeze(-2), solved * inverse.unsqueeze(-2)
        image = operator._matmul(dual)
        alpha = (dual * image).sum(-2)
        diagonals.append(alpha)
        residual = image - alpha.unsqueeze(-2) * vector
        if iteration:
            residual -= beta.unsqueeze(-2) * previous
        solved, previous = preconditioner.solve(residual), vector
        samples = _quadrature(diagonals, offdiagonals, floor) * squared_norm
        previous_estimate, previous_change = estimate, change
        estimate = samples.mean(-1)
        change = (estimate - previous_estimate).abs()
        pace = (change / previous_change.clamp_min(torch.finfo(change.dtype).tiny)).clamp_max(SLOWEST_PACE)
        remainder = change * pace / (1 - pace)
        enough = (0.2 * _sem(samples)).nan_to_num(0.0).clamp_min(tolerance * operator.shape[-1])
        # The first change is from zero, and says nothing of the pace.
        if iteration > 1 and bool((remainder <= enough).all()):
            break
        beta = (residual * solved).sum(-2).clamp_min(0).sqrt()
        # What is left by rounding is no new direction.
        beta = torch.where(beta > 10 * torch.finfo(beta.dtype).eps * alpha.abs(), beta, torch.zeros_like(beta))
        offdiagonals.append(beta)
    return LogDeterminant(base + estimate, torch.hypot(_sem(samples), remainder))


def _smallest_eigenvalue(operator: LinearOperator, preconditioner: LowRankPlusDiagonal) -> Tensor:
    """A lower bound on the spectrum of M, [*b]: below it Ritz values are rounding errors, whose logarithms run wild.

    A pivoted Cholesky factor has K >= L L^T, so that H >= L L^T + noise >= min(noise / d) P.
    """
    if isinstance(operator, NoisyLinearOperator) and isinstance(preconditioner, PivotedCholeskyFactor):
        return (operator.noise / preconditioner.diagonal).amin(-1)
    diagonal = preconditioner.diagonal
    return torch.full_like(diagonal[..., 0], torch.finfo(diagonal.dtype).eps)


def _sem(samples: Tensor) -> Tensor:
    size = samples.shape[-1]
    if size == 1:
        return torch.full_like(samples[..., 0], torch.nan)  # one sample knows nothing of its own error
    return samples.std(-1) / size**0.5


def _quadrature(diagonals: list[Tensor], offdiagonals: list[Tensor], floor: Tensor) -> Tensor:
    """e_1^T log(T) e_1 of the tridiagonal T, [*b, s]."""
    matrix = torch.diag_embed(torch.stack(diagonals, dim=-1).double())
    if offdiagonals:
        off = torch.diag_embed(torch.stack(offdiagonals, dim=-1).double(), offset=1)
        matrix = matrix + off + off.mT
    values, vectors = torch.linalg.eigh(matrix)
    logs = values.maximum(floor.double().unsqueeze(-1).unsqueeze(-1)).log()
    return (vectors[..., 0, :].square() * logs).sum(-1).to(diagonals[0].dtype)

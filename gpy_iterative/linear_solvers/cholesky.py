"""Cholesky factors of systems and blocks."""

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpy_iterative.checks import has_finite_sum
from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError, float64_first, warn
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.columns import LinearSystem
from gpy_iterative.linear_solvers.exact_factors import structure
from gpy_iterative.linear_solvers.kronecker import KroneckerFactor
from gpy_iterative.linear_solvers.low_rank import LowRankFactor
from gpy_iterative.linear_solvers.solution import Solution, SolveStats, SolveStatus
from gpy_iterative.worker_threads import run

#: Jitters to try in turn, relative to the largest diagonal entry.
JITTERS = (1e-8, 1e-6, 1e-4)
#: Columns of an inverse that a worker computes, and most entries of a factor, which each worker copies.
COLUMNS, MOST_COPIED = 384, 2**24
ADVICE = "Keep the noise away from zero (a noise constraint), use float64, or check the kernel."


@dataclass(frozen=True)
class CholeskyFactor:
    """H = L L^T, of a system in float64 for every dtype of H."""

    lower: Tensor  # L [*b, n, n]
    dtype: torch.dtype  # of results
    curvature: float = math.inf  # smallest eigenvalue of a block that needed jitter

    def dim(self) -> int:
        """The number of dimensions of H."""
        return self.lower.dim()

    def solve(self, rhs: Tensor) -> Tensor:
        """H^-1 rhs for [*b, n, s]."""
        return torch.cholesky_solve(rhs.to(self.lower.dtype), self.lower).to(self.dtype)

    def whiten(self, rhs: Tensor) -> Tensor:
        """L^-1 rhs for [*b, n, s], in float64."""
        return torch.linalg.solve_triangular(self.lower, rhs.double(), upper=False)

    def logdet(self) -> Tensor:
        """The log-determinant of H [*b]."""
        return (2 * self.lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)).to(self.dtype)

    def inverse(self) -> Tensor:
        """H^-1 [*b, n, n]. Cost: n^3 / 3 multiply-adds."""
        lower = self.lower.to(self.dtype)  # rounding matters less here than in H
        if lower.device.type != "cpu" or lower.numel() > MOST_COPIED:
            return torch.cholesky_inverse(lower)
        # LAPACK's threads wait for each other: beside a busy process its inverse takes up to fifty times as long.
        result = torch.empty_like(lower)
        run([partial(_fill_inverse, result, lower, columns) for columns in blocks(lower.shape[-1], COLUMNS)])
        return result

    def score(self, weights: Tensor) -> tuple[Tensor]:
        """Derivative of log N(y; 0, H) by H [*b, n, n], for weights H^-1 y [*b, n, 1]."""
        return (self.inverse().mul_(-0.5).addcmul_(weights, weights.mT, value=0.5),)

    def extended(self, rows: Tensor) -> "CholeskyFactor | None":
        """The factor with new rows [*b, m, n + m]; None if it needs jitter. Cost: n^2 m multiply-adds."""
        batch, size = rows.shape[:-2], self.lower.shape[-1]
        lower = self.lower.expand(*batch, size, size)
        cross, block = rows.double().split([size, rows.shape[-2]], dim=-1)
        below = torch.linalg.solve_triangular(lower, cross.mT, upper=False).mT
        corner, info = torch.linalg.cholesky_ex(block - below @ below.mT)
        if info.any():
            return None
        upper = torch.cat([lower, torch.zeros_like(cross.mT, dtype=lower.dtype)], dim=-1)
        return CholeskyFactor(torch.cat([upper, torch.cat([below, corner], dim=-1)], dim=-2), self.dtype)


ExactFactor = CholeskyFactor | KroneckerFactor | LowRankFactor


def _fill_inverse(result: Tensor, lower: Tensor, columns: slice) -> None:
    """Columns of H^-1 from the diagonal down, which depend on no earlier rows, and their mirror images."""
    start, stop, size = columns.start, columns.stop, lower.shape[-1]
    identity = torch.eye(size - start, stop - start, dtype=lower.dtype, device=lower.device)
    found = torch.cholesky_solve(identity.expand(*lower.shape[:-2], *identity.shape), lower[..., start:, start:])
    corner, below = found.split([stop - start, size - stop], dim=-2)
    result[..., columns, columns] = corner.tril() + corner.tril(-1).mT
    result[..., stop:, columns], result[..., columns, stop:] = below, below.mT


def positive_factor(matrix: Tensor) -> CholeskyFactor:
    """Of a float64 matrix [*b, m, m], without jitter; raises NonFiniteError."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any() or not torch.isfinite(lower).all():
        raise NonFiniteError(
            "A precision or covariance matrix is not finite, or not positive definite to rounding. Check data and "
            "hyperparameters, and keep the noise away from zero, for example with gpytorch.constraints.GreaterThan(1e-4)."
        )
    return CholeskyFactor(lower, lower.dtype)


@dataclass(frozen=True)
class Cholesky(Solver):
    """Exact solver in float64: 8 n^2 bytes, n^3 / 6 multiply-adds; for a kernel with r < n / 2 features 8 n r and n r^2.

    `solve` ignores preconditioner, initial guess, generator and callback. The status is STAGNATED if rounding or jitter
    leaves a residual above the tolerance (.01 for groups without).
    """

    tolerance: ClassVar[float] = 0.01

    @torch.no_grad()
    def factorize(self, operator: LinearOperator | Tensor) -> ExactFactor:
        """The factor of H [*b, n, n], by its structure if that is known.

        Raises:
            NonFiniteError: an entry is not finite.
            NotPositiveDefiniteError: a relative jitter of 1e-4 does not help; less gives a warning.
        """
        found = structure(operator)
        if found is not None:
            factor, parts = found
            return factor(*parts)
        dense = to_dense(operator)
        return CholeskyFactor(warned_cholesky(dense.double(), "The kernel matrix with noise", dense.dtype), dense.dtype)

    def _solve_columns(self, system: LinearSystem) -> Solution:
        start = time.perf_counter()
        value = self.factorize(system.operator).solve(system.rhs)
        residual = system.rhs - system.operator._matmul(value)
        norms = torch.linalg.vector_norm(residual, dim=-2)
        if not torch.isfinite(norms).all():
            raise NonFiniteError("The right-hand side, or its solution, is not finite: check the data.")
        relative = norms / torch.linalg.vector_norm(system.rhs, dim=-2).clamp_min(torch.finfo(value.dtype).tiny)
        groups = system.groups
        parts = relative.split([group.size for group in groups], dim=-1)
        norms = {g.name: float(part.amax()) if g.size else 0.0 for g, part in zip(groups, parts, strict=True)}
        is_within = all(norms[group.name] <= (group.tolerance or self.tolerance) for group in groups)
        status = SolveStatus.CONVERGED if is_within else SolveStatus.STAGNATED
        return Solution(value, residual, status, SolveStats(0, 0.0, 1.0, norms, time.perf_counter() - start))


def jittered_cholesky(matrix: Tensor, name: str) -> tuple[Tensor, float]:
    """Factors of float64 matrices, and the largest jitter; raises like `Cholesky.factorize`."""
    _check_finite(matrix, name)
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().amax(-1).clamp_min(torch.finfo(matrix.dtype).tiny)
    factor, info = torch.linalg.cholesky_ex(matrix)
    added, largest = torch.zeros_like(scale), 0.0
    for jitter in JITTERS:
        if not info.any():
            break
        largest, added = jitter, torch.where(info > 0, jitter * scale, added)
        trial = matrix.clone()
        trial.diagonal(dim1=-2, dim2=-1).add_(added.unsqueeze(-1))
        factor, info = torch.linalg.cholesky_ex(trial)
    if not info.any():
        return factor, largest
    raise NotPositiveDefiniteError(
        f"{name} is not positive definite even with a jitter of {JITTERS[-1]:g} of its diagonal. {ADVICE}"
    )


def warned_cholesky(matrix: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Warns of jitter; `dtype` is the original dtype."""
    factor, jitter = jittered_cholesky(matrix, name)
    if jitter:
        warn(
            f"A jitter of {jitter:g} times the largest diagonal entry was added to factor {name[:1].lower()}{name[1:]}. To "
            f"avoid it {float64_first(dtype)}keep the noise away from zero (a noise constraint), or drop near-duplicates.",
            NumericalWarning,
        )
    return factor


def block_cholesky(block: Tensor) -> CholeskyFactor:
    """In the block's dtype, else in float64, else with jitter. Raises NonFiniteError."""
    for matrix in (block, block.double()):
        lower, info = torch.linalg.cholesky_ex(matrix)
        if not info:
            return CholeskyFactor(lower, block.dtype)
    matrix = block.double()
    _check_finite(matrix, f"A block of {len(block)} rows")
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    jitter = max(-2 * smallest, JITTERS[0] * float(matrix.diagonal().amax()))
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return CholeskyFactor(torch.linalg.cholesky(matrix + jitter * identity), block.dtype, smallest)


def _check_finite(matrix: Tensor, name: str) -> None:
    if not has_finite_sum(matrix):
        raise NonFiniteError(f"{name} has NaN or infinite entries. Check the data and the hyperparameters.")

"""A control variate for the trace in the gradient: the score of the probes' own density.

Probes xi ~ N(0, S) have a mean score, d/dt log N(xi; 0, S) at fixed xi, of zero. Added to the gradient, it replaces the
noise of dH by that of dH - dS:

    1/2 tr(H^-1 dH) ~ 1/2 tr(S^-1 dS) + 1/(2s) sum_j [(H^-1 xi_j)^T dH (S^-1 xi_j) - (S^-1 xi_j)^T dS (S^-1 xi_j)].

Wenger et al. 2022 (arXiv 2107.00243, "Preconditioning for scalable Gaussian process hyperparameter optimization") take low
ranks for S. Here S is also Vecchia's, or a low rank plus Vecchia's; pivots and neighbours are held fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.exact.probes import Probes
from gpy_iterative.linear_operators import extensions
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.preconditioners.low_rank_plus_vecchia import LowRankPlusVecchiaFactor
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholeskyFactor, pivot_factor
from gpy_iterative.preconditioners.sparse_inverse_cholesky import SparseInverseCholesky
from gpy_iterative.preconditioners.vecchia import block_factors
from gpy_iterative.worker_threads import ByDevice, summed

Covariance = LowRankPlusVecchiaFactor | PivotedCholeskyFactor | SparseInverseCholesky

#: Inputs of a kernel up to which the noise falls 2 to 40 times; beyond, 2 or 3 times, at the price of another step.
MOST_INPUTS = 3
#: Entries of blocks at a time.
ENTRIES = ByDevice(cpu=2**18, accelerator=2**24)


@dataclass(frozen=True)
class ControlVariate:
    """The score of probes xi [n, s] with covariance S."""

    vectors: Tensor
    dual: Tensor  # S^-1 xi
    covariance: Covariance

    @classmethod
    def of(cls, probes: Probes, operator: LinearOperator) -> "ControlVariate | None":
        """None where it does not pay, and where derivatives of S are unknown or cost too much."""
        covariance, dual = probes.covariance, probes.dual
        if not isinstance(covariance, Covariance) or dual is None or not isinstance(operator, NoisyLinearOperator):
            return None
        if operator.batch_shape:
            return None
        first = torch.zeros(1, dtype=torch.long, device=operator.device)
        terms = extensions.sum_terms(operator.kernel[first, :])
        is_simple = all(isinstance(term, TiledLinearOperator) for term, _ in terms)
        return cls(probes.vectors, dual, covariance) if is_simple and _most_inputs(operator) <= MOST_INPUTS else None

    @torch.no_grad()
    def mean_score(self, operator: LinearOperator) -> list[Tensor]:
        """Derivatives of the mean of log N(xi_j; 0, S) for constant xi, by the operator's tensors that require a gradient.

        Cost: one or two times that of S.
        """
        system, count = _System.copied(operator), self.vectors.shape[-1]
        if isinstance(self.covariance, PivotedCholeskyFactor):
            return _of_low_rank_plus_noise(system, self.covariance, self.dual)
        if isinstance(self.covariance, SparseInverseCholesky):
            return _of_blocks(system, self.covariance, self.vectors, self.covariance.whiten(self.vectors) / count)[0]
        local, factor, whitened = self.covariance.local, self.covariance.factor, self.covariance.whitened
        # S^-1 = B^T M B with M = (I + W W^T)^-1 and W = B L. As u = B xi moves with B,
        # d(xi^T S^-1 xi) = 2 (M u)^T dB (xi - L along) - 2 (S^-1 xi)^T dL along with along = L^T S^-1 xi.
        solved = whitened.solve(local.whiten(self.vectors))
        along = whitened.factor.mT @ solved
        inner = whitened.solve(whitened.factor)
        of_factor = local.transposed(solved / count) @ along.mT - local.transposed(inner)
        found, q = _of_blocks(system, local, self.vectors - factor @ along, solved / count, factor, inner)
        # The blocks of q and b have L L^T with a minus, and are symmetric.
        other = SparseInverseCholesky(
            local.order, local.neighbours.long(), q[:, :-1].contiguous(), q[:, -1].contiguous()
        )
        of_factor += other.transposed(whitened.factor) + local.transposed(other.whiten(factor))
        more = _of_low_rank(system, self.covariance, of_factor)
        return [one + other for one, other in zip(found, more, strict=True)]


@dataclass(frozen=True)
class _System:
    """H of new leaves, and those that require a gradient."""

    operator: Any
    leaves: list[Tensor]

    @classmethod
    def copied(cls, operator: LinearOperator) -> "_System":
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in operator.representation()]
        return cls(operator.representation_tree()(*tensors), [tensor for tensor in tensors if tensor.requires_grad])

    def pulled_back(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients by the leaves, for those by functions of them."""
        return torch.autograd.grad(outputs, self.leaves, gradients, materialize_grads=True)


def _most_inputs(operator: NoisyLinearOperator) -> int:
    inputs = [extensions.kernel_inputs(term) for term, _ in extensions.sum_terms(operator.kernel)]
    return max(points.shape[-1] for points in inputs if points is not None)


def _of_blocks(
    system: _System,
    local: SparseInverseCholesky,
    vectors: Tensor,
    left: Tensor,
    factor: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Derivatives through B of a function with df = -sum_ij (left vectors^T + inner L^T)_ij dB_ij + d log|B|.

    With b = B_i and the block C of H - L L^T at row i and its neighbours, C b = e_i / b_i. So for g = df/db the derivative
    by C is -q b^T with C q = g - (g^T b) e_i / (2 b_i). Also returns q, as B's entries.
    """
    order, (size, width) = local.order, local.neighbours.shape
    own = torch.arange(size, device=order.device)
    sets = torch.cat([local.neighbours.long(), own.unsqueeze(-1)], dim=-1)
    b = torch.cat([local.weights, local.diagonal.unsqueeze(-1)], dim=-1)
    q = torch.empty_like(b)

    def of_rows(rows: slice) -> Sequence[Tensor]:
        picked = order[sets[rows]]
        with torch.enable_grad():
            entries = extensions.principal_blocks(system.operator, picked)
        block, row = entries.detach().double(), b[rows].double()
        gradient = -(vectors[picked] @ left[rows].unsqueeze(-1))
        if factor is not None and inner is not None:
            near = factor[picked]
            block -= near @ near.mT
            gradient -= near @ inner[rows].unsqueeze(-1)
        gradient = gradient.squeeze(-1).double()
        if rows.start < width:  # unused places
            is_used = torch.arange(width + 1, device=order.device) < own[rows].unsqueeze(-1)
            is_used[:, -1] = True
            gradient *= is_used
            is_unused = ~(is_used.unsqueeze(-1) & is_used.unsqueeze(-2))
            block.masked_fill_(is_unused, 0).diagonal(dim1=-2, dim2=-1).masked_fill_(~is_used, 1)
        gradient[:, -1] += 1 / row[:, -1]
        gradient[:, -1] -= (gradient * row).sum(-1) / (2 * row[:, -1])
        q[rows] = torch.cholesky_solve(gradient.unsqueeze(-1), block_factors(block)).squeeze(-1).to(q.dtype)
        return system.pulled_back([entries], [-q[rows].unsqueeze(-1) * b[rows].unsqueeze(-2)])

    def of_share(share: Sequence[slice]) -> list[Tensor]:
        found = list(map(torch.zeros_like, system.leaves))
        for rows in share:
            for known, part in zip(found, of_rows(rows), strict=True):
                known += part
        return found

    parts = blocks(size, max(ENTRIES.on(b.device) // (width + 1) ** 2, 1))
    return summed(of_share, parts, b.device), q


def _of_low_rank_plus_noise(system: _System, covariance: PivotedCholeskyFactor, dual: Tensor) -> list[Tensor]:
    """Of log N(xi; 0, L L^T + noise): its derivative by S is half the mean of dual dual^T - S^-1."""
    factor = covariance.factor
    solved = covariance.solve(factor)
    of_factor = dual @ (dual.mT @ factor) / dual.shape[-1] - solved
    inverse = (1 - (solved * factor).sum(-1)) / covariance.diagonal  # diag(S^-1)
    found = _of_low_rank(system, covariance, of_factor)
    noise = system.operator.noise
    if not noise.requires_grad:
        return list(found)
    more = system.pulled_back([noise], [0.5 * (dual.square().mean(-1) - inverse)])
    return [one + other for one, other in zip(found, more, strict=True)]


def _of_low_rank(
    system: _System, covariance: LowRankPlusVecchiaFactor | PivotedCholeskyFactor, of_factor: Tensor
) -> Sequence[Tensor]:
    """Derivatives of a function of L L^T with df = tr(of_factor^T dL).

    With L = C R^-T, for columns C of K and R R^T its block on the pivots plus jitter: by C it is of_factor R^-1,
    by the block -1/2 R^-T (L^T of_factor) R^-1.
    """
    factor, pivots, kernel = covariance.factor, covariance.pivots, system.operator.kernel
    rank = factor.shape[-1]
    block = extensions.dense_rows(kernel, pivots)[:, pivots].double()
    if not (block.diagonal() > 0).any():  # a zero kernel
        return list(map(torch.zeros_like, system.leaves))
    lower = pivot_factor(block, factor.dtype)
    pivots, lower = pivots[:rank], lower[:rank, :rank]
    by_columns = torch.linalg.solve_triangular(lower, of_factor.double(), upper=False, left=False)
    cross = factor.double().mT @ by_columns
    by_block = torch.linalg.solve_triangular(lower.mT, cross, upper=True)
    weights = by_columns.mT.contiguous()
    weights[:, pivots] -= (by_block + by_block.mT) / 4
    with torch.enable_grad():
        rows = kernel[pivots, :]
    derivatives = extensions.matrix_derivative(rows, weights.to(factor.dtype))
    moving = [tensor for tensor, part in zip(rows.representation(), derivatives, strict=True) if part is not None]
    return system.pulled_back(moving, [part for part in derivatives if part is not None])

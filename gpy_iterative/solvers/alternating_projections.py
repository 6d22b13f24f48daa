"""Alternating projections: block coordinate descent that takes the block with the largest residual.

Wu et al. 2024, "Large-scale Gaussian processes via alternating projection"; Lin et al. 2024, algorithm 2, with blocks
scored by the squares of their residuals.
"""

import warnings
from dataclasses import dataclass

import torch
from linear_operator import LinearOperator
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.errors import NotPositiveDefiniteError
from gpy_iterative.linear_operators import columns_matmul, principal_block
from gpy_iterative.preconditioners import LowRankPlusDiagonal
from gpy_iterative.solvers.base import Iterate, IterativeSolver

#: Relative jitters, tried in turn on a block that has no Cholesky factor.
JITTERS = (0.0, 1e-6, 1e-5, 1e-4)


@dataclass(frozen=True)
class _State:
    blocks: list[slice]
    factors: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class AlternatingProjections(IterativeSolver[_State]):
    """One block of rows solved exactly an iteration, n / block_size iterations an epoch.

    Args:
        block_size: rows of a block; clamped at n. Blocks of the tile size are served from kept tiles.

    Further options are those of `IterativeSolver`. Memory: two blocks [n, s], and n block_size numbers for the
    Cholesky factors, which live as long as the solve.
    """

    block_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}.")

    def init(
        self,
        operator: LinearOperator,
        iterate: Iterate,
        preconditioner: LowRankPlusDiagonal | None,
        generator: torch.Generator | None,
    ) -> _State:
        size = operator.shape[-1]
        blocks = [slice(start, min(start + self.block_size, size)) for start in range(0, size, self.block_size)]
        return _State(blocks, [_factor(principal_block(operator, block)) for block in blocks])

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        chosen = self._worst_block(iterate.residual)
        block = state.blocks[chosen]
        update = torch.cholesky_solve(iterate.residual[block], state.factors[chosen])
        iterate.value[block] += update
        iterate.residual -= columns_matmul(operator, block, update)
        return state

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return state

    def work_per_step(self, operator: LinearOperator) -> float:
        return min(self.block_size / operator.shape[-1], 1.0)

    def work_of_init(self, operator: LinearOperator) -> float:
        return self.work_per_step(operator)

    def _worst_block(self, residual: Tensor) -> int:
        rows = residual.square().sum(-1)
        missing = -rows.shape[0] % self.block_size
        return int(pad(rows, (0, missing)).view(-1, self.block_size).sum(-1).argmax())


def _factor(block: Tensor) -> Tensor:
    """The lower Cholesky factor, with as much jitter as the arithmetic needs."""
    scale = block.diagonal().max().clone()
    added = 0.0
    for jitter in JITTERS:
        block.diagonal().add_((jitter - added) * scale)
        added = jitter
        factor, info = torch.linalg.cholesky_ex(block)
        if not info:
            if jitter:
                warnings.warn(
                    f"A block of the system needed a jitter of {jitter:g} times its diagonal: its noise is within "
                    "rounding of zero. The solution is still that of the system without jitter.",
                    NumericalWarning,
                    stacklevel=2,
                )
            return factor
    raise NotPositiveDefiniteError(
        f"A block of {len(block)} rows is not positive definite even with a jitter of {JITTERS[-1]:g} of its diagonal. "
        "Keep the noise away from zero (a noise constraint), or use float64."
    )

"""Alternating projections: block coordinate descent that takes the block with the largest residual.

Wu et al. 2024, "Large-scale Gaussian processes via alternating projection"; Lin et al. 2024, algorithm 2, with blocks
scored by the squares of their residuals.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from linear_operator import LinearOperator
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.checks import check_count, check_instance
from gpy_iterative.linear_operators.extensions import columns_matmul, principal_block
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs
from gpy_iterative.linear_solvers.cholesky import BlockFactor, block_cholesky
from gpy_iterative.linear_solvers.columns import Iterate, reads_every
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky

#: Rows of a block: on a CPU, whose time for a factor grows with the cube of them, and on an accelerator.
CPU_BLOCK, ACCELERATOR_BLOCK = 512, 1024
#: The pace is taken over this many epochs. The fallback takes over when it promises more than `PATIENCE` further ones:
#: about the cost of the fallback with its preconditioner.
EPOCHS_PER_LOOK = 1.0
PATIENCE = 3.0
#: Bytes of all factors together. Systems whose blocks need more have products that cost far more than a factor.
MAX_FACTOR_BYTES = 2**29


@dataclass(frozen=True)
class _State:
    """State of the projections; then that of the fallback, which is None before."""

    block_size: int
    share: float  # epochs of a projection
    inputs: SolveInputs
    shortfall: float  # at the last look at the pace
    steps: int = 0  # since then
    factors: dict[int, BlockFactor] = field(default_factory=dict)  # by number of the block
    chosen: tuple[int, ...] = ()  # the next blocks
    fallback: Any = None
    curvature: float = math.inf  # the lowest of all blocks


@dataclass(frozen=True, kw_only=True)
class AlternatingProjections(IterativeSolver[_State]):
    """One block of rows solved an iteration, n / block_size iterations an epoch.

    The first digits come fast, and a warm start often needs a fraction of an epoch; but along the smooth directions of
    a large kernel matrix with little noise the iteration crawls. Preconditioned conjugate gradients do not: when the
    pace of an epoch promises more than three further ones, they solve the columns that are left.

    Args:
        block_size: rows of a block; clamped at n. None is 512 on a CPU and 1024 on an accelerator.
        fallback: takes over, with its preconditioner, where projections crawl (its tolerances and budget do not count);
            None never does, as in the papers.

    Further options are those of `IterativeSolver`. Memory: eleven blocks [n, s]; [n, rank] for the fallback; and n
    block_size numbers, but no more than half a gigabyte, for the Cholesky factors, which live as long as the projections;
    blocks beyond that are factored at every visit. A block is factored in float64 where float32 finds no factor.

    Raises (from `solve`):
        NonFiniteError: as every solver, or a block has entries that are not finite.

    A block that has no Cholesky factor gets as much jitter as it needs, which changes how the solution is approached and
    not the solution; where that is beyond rounding, the status is INDEFINITE.

    Examples:
        >>> solver = gpi.solvers.AlternatingProjections(max_epochs=10)  # a budget; `mll.report` says what it leaves
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver)
    """

    block_size: int | None = None
    fallback: ConjugateGradients | None = field(
        default=ConjugateGradients(preconditioner=RandomlyPivotedCholesky(rank=500))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            check_count("block_size", self.block_size)
        check_instance("fallback", self.fallback, ConjugateGradients, "ConjugateGradients()")

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> _State:
        block_size = self.block_size or (CPU_BLOCK if operator.device.type == "cpu" else ACCELERATOR_BLOCK)
        return _State(block_size, min(block_size / operator.shape[-1], 1.0), inputs, iterate.shortfall)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        if self.fallback is not None and state.fallback is not None:
            return replace(state, fallback=self.fallback.restart(iterate, state.fallback))
        return replace(state, shortfall=iterate.shortfall, steps=0, chosen=())

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        if self.fallback is not None and state.fallback is not None:
            return replace(state, fallback=self.fallback.step(operator, iterate, state.fallback))
        chosen, *later = state.chosen or _worst_blocks(iterate.residual, state.block_size)
        block = slice(chosen * state.block_size, min((chosen + 1) * state.block_size, operator.shape[-1]))
        factor, kept = state.factors.get(chosen), state.factors
        if factor is None:
            factor = block_cholesky(principal_block(operator, block))
            if sum(other.lower.nbytes for other in kept.values()) + factor.lower.nbytes <= MAX_FACTOR_BYTES:
                kept[chosen] = factor
        update = factor.solve(iterate.residual[block])
        iterate.value[block] += update
        iterate.residual -= columns_matmul(operator, block, update)
        curvature = min(state.curvature, factor.curvature)
        return replace(state, steps=state.steps + 1, chosen=tuple(later), curvature=curvature)

    def after_step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        epochs = state.steps * state.share
        if self.fallback is None or state.fallback is not None or epochs < EPOCHS_PER_LOOK:
            return state
        gained, remaining = math.log(state.shortfall / iterate.shortfall), math.log(iterate.shortfall)
        if remaining * epochs > PATIENCE * gained:
            return replace(state, fallback=self.fallback.init(operator, iterate, state.inputs), factors={})
        return replace(state, shortfall=iterate.shortfall, steps=0)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        if self.fallback is not None and state.fallback is not None:
            return replace(state, fallback=self.fallback.narrow(state.fallback, columns))
        return state

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return state.share if state.fallback is None else 1.0

    def work_of_setup(self, state: _State) -> float:
        # The blocks on the diagonal, as if all of them had been visited.
        if self.fallback is None or state.fallback is None:
            return state.share
        return state.share + self.fallback.work_of_setup(state.fallback)

    def curvature(self, state: _State) -> float:
        if self.fallback is None or state.fallback is None:
            return state.curvature
        return min(state.curvature, self.fallback.curvature(state.fallback))


def _worst_blocks(residual: Tensor, block_size: int) -> list[int]:
    """The block with the largest sum of squares; where the host waits for the answer, also the next few of them."""
    rows = residual.square().sum(-1)
    scores = pad(rows, (0, -len(rows) % block_size)).view(-1, block_size).sum(-1)
    count = min(reads_every(residual.device), max(len(scores) // 2, 1))
    return [int(scores.argmax())] if count == 1 else scores.topk(count).indices.tolist()

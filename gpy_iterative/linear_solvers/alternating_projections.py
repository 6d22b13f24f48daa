"""Alternating projections: block coordinate descent that takes the block with the largest residual.

Wu et al. 2024, "Large-scale Gaussian processes via alternating projection"; Lin et al. 2024, algorithm 2, with blocks
scored by the squares of their residuals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from linear_operator import LinearOperator
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.checks import check_count, check_instance
from gpy_iterative.linear_operators.extensions import columns_matmul, principal_block
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, SolverState
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


@dataclass(frozen=True, kw_only=True)
class _State(SolverState):
    block_size: int
    share: float  # epochs of a projection
    shortfall: float  # at the last look at the pace
    steps: int = 0  # since then
    factors: dict[int, BlockFactor] = field(default_factory=dict)  # by number of the block
    chosen: Sequence[int] = ()  # the next blocks


@dataclass(frozen=True, kw_only=True)
class AlternatingProjections(IterativeSolver[_State]):
    """One block of rows solved an iteration, n / block_size iterations an epoch.

    The first digits come fast, but along the smooth directions of a large kernel matrix with little noise the iteration
    is slow: when the pace of an epoch promises more than three further ones, conjugate gradients solve the columns left.

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
        share = min(block_size / len(iterate.residual), 1.0)
        # The set-up is the blocks on the diagonal, as if all of them had been visited.
        return _State(block_size=block_size, share=share, shortfall=iterate.shortfall, setup=share)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return replace(state, shortfall=iterate.shortfall, steps=0, chosen=())

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        size, chosen = len(iterate.residual), state.chosen
        if not chosen:  # the blocks with the largest sums of squares; a sum over columns must not let them cancel
            rows = pad(iterate.residual.square().sum(-1), (0, -size % state.block_size))
            scores = rows.view(-1, state.block_size).sum(-1)
            # Where the host waits for the answer it takes the next few as well, of no more than half of all blocks.
            count = min(reads_every(rows.device), max(len(scores) // 2, 1))
            chosen = [int(scores.argmax())] if count == 1 else scores.topk(count).indices.tolist()
        number, *later = chosen
        block = slice(number * state.block_size, min((number + 1) * state.block_size, size))
        factor, kept = state.factors.get(number), state.factors
        if factor is None:
            factor = block_cholesky(principal_block(operator, block))
            if sum(other.lower.nbytes for other in kept.values()) + factor.lower.nbytes <= MAX_FACTOR_BYTES:
                kept[number] = factor
        update = factor.solve(iterate.residual[block])
        iterate.value[block] += update
        iterate.residual -= columns_matmul(operator, block, update)
        curvature = min(state.curvature, factor.curvature)
        return replace(state, steps=state.steps + 1, chosen=later, curvature=curvature)

    def after_step(self, iterate: Iterate, state: _State) -> tuple[_State, ConjugateGradients | None]:
        epochs = state.steps * state.share
        if epochs < EPOCHS_PER_LOOK:
            return state, None
        gained, remaining = math.log(state.shortfall / iterate.shortfall), math.log(iterate.shortfall)
        is_slow = remaining * epochs > PATIENCE * gained
        return replace(state, shortfall=iterate.shortfall, steps=0), self.fallback if is_slow else None

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return state

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return state.share

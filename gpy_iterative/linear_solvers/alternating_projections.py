"""Alternating projections: block coordinate descent on the block with the largest residual.

Wu et al. 2024, "Large-scale Gaussian processes via alternating projection"; Lin et al. 2024, algorithm 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from linear_operator import LinearOperator
from torch.nn.functional import pad

from gpy_iterative.checks import check_count, check_instance
from gpy_iterative.linear_operators.extensions import columns_matmul, principal_block
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, SolverState
from gpy_iterative.linear_solvers.cholesky import CholeskyFactor, block_cholesky
from gpy_iterative.linear_solvers.columns import READS_EVERY, Iterate
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.worker_threads import ByDevice

BLOCK = ByDevice(cpu=512, accelerator=1024)
#: Epochs over which the pace is measured; predicted epochs above which the fallback takes over.
EPOCHS_PER_LOOK = 1.0
PATIENCE = 3.0
#: Bytes of all kept factors.
MAX_FACTOR_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class _State(SolverState):
    block_size: int
    shortfall: float  # at the last look
    steps: int = 0  # since then
    factors: dict[int, CholeskyFactor] = field(default_factory=dict)  # by block
    chosen: Sequence[int] = ()  # next blocks


@dataclass(frozen=True, kw_only=True)
class AlternatingProjections(IterativeSolver[_State]):
    """Alternating projections; an iteration solves one block, an epoch is n / block_size iterations.

    Other options: `IterativeSolver`. Memory: eleven blocks [n, s]; [n, rank] for the fallback; n block_size numbers, at
    most half a gigabyte, for Cholesky factors.

    Args:
        block_size: rows of a block, at most n; None: 512 on a CPU, 1024 on an accelerator.
        fallback: takes over when the pace predicts more than three further epochs; only its preconditioner is used.
            None: never.

    Examples:
        >>> solver = gpi.solvers.AlternatingProjections(max_epochs=10)
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver)
    """

    block_size: int | None = None
    fallback: ConjugateGradients | None = field(default=ConjugateGradients())

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_size, optional=True)
        check_instance("fallback", self.fallback, ConjugateGradients, "ConjugateGradients()")

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> _State:
        block_size = self.block_size or BLOCK.on(operator.device)
        share = min(block_size / len(iterate.residual), 1.0)
        # `setup` counts all diagonal blocks.
        return _State(block_size=block_size, share=share, shortfall=iterate.shortfall, setup=share)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return replace(state, shortfall=iterate.shortfall, steps=0, chosen=())

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        size, chosen = len(iterate.residual), state.chosen
        if not chosen:  # squares, because a sum of residuals would cancel
            rows = pad(iterate.residual.square().sum(-1), (0, -size % state.block_size))
            scores = rows.view(-1, state.block_size).sum(-1)
            # Several at once if the host waits for an accelerator.
            count = min(READS_EVERY.on(rows.device), max(len(scores) // 2, 1))
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

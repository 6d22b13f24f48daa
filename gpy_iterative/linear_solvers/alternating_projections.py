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
from gpy_iterative.linear_solvers.base import IterativeSolver
from gpy_iterative.linear_solvers.block_cholesky import BlockFactor
from gpy_iterative.linear_solvers.columns import Iterate, reads_every
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.linear_system import Given
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky

#: The pace is taken over this many epochs; when it promises more than `PATIENCE` further ones, about what the finish with
#: its preconditioner takes, the finish takes over. (Measured on training steps: elevators, pol, protein, 6,000 rows.)
EPOCHS_PER_LOOK = 1.0
PATIENCE = 3.0
#: Bytes that the factors of blocks may take together. Where there are so many blocks that these do not suffice, a step's
#: products cost a hundred times what another factor does.
MAX_FACTOR_BYTES = 2**29


@dataclass(frozen=True)
class _State:
    """What the finish begins with, block factors by their number, blocks already chosen, the pace; then its own state.

    `curvature` is the lowest of all blocks'.
    """

    size: int
    given: Given
    shortfall: float
    steps: int = 0
    factors: dict[int, BlockFactor] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()
    finishing: Any = None
    curvature: float = math.inf


@dataclass(frozen=True, kw_only=True)
class AlternatingProjections(IterativeSolver[_State]):
    """One block of rows solved an iteration, n / block_size iterations an epoch.

    The first digits come fast, and a warm start often needs a fraction of an epoch; but along the smooth directions of
    a large kernel matrix with little noise the iteration crawls. Preconditioned conjugate gradients do not: when the
    pace of an epoch promises more than three further ones, they finish the columns that are left.

    Args:
        block_size: rows of a block; clamped at n. Blocks of the tile size are served from kept tiles. On a CPU a block of
            more than 512 rows is solved by its halves, forth and back.
        finish: what takes over, with its preconditioner (its tolerances and budget do not count); None never does, as
            in the papers.

    Further options are those of `IterativeSolver`. Memory: eleven blocks [n, s]; [n, rank] for the finish; and n block_size
    numbers, but no more than half a gigabyte, for the Cholesky factors, which live as long as the projections; blocks
    beyond that are factored at every visit. A block is factored in float64 where float32 finds no factor.

    Raises (from `solve`):
        NonFiniteError: as every solver, or a block has entries that are not finite.

    A block that has no Cholesky factor gets as much jitter as it needs, which changes how the solution is approached and
    not the solution; where that is beyond rounding, the status is INDEFINITE.

    Examples:
        >>> solver = gpi.solvers.AlternatingProjections(max_epochs=10)  # a budget: what it leaves is in `mll.report`
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=solver)
    """

    block_size: int = 1024
    finish: ConjugateGradients | None = field(
        default=ConjugateGradients(preconditioner=RandomlyPivotedCholesky(rank=500))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_size)
        check_instance("finish", self.finish, ConjugateGradients, "ConjugateGradients()")

    def init(self, operator: LinearOperator, iterate: Iterate, given: Given) -> _State:
        return _State(operator.shape[-1], given, iterate.shortfall)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        if self.finish is not None and state.finishing is not None:
            return replace(state, finishing=self.finish.restart(iterate, state.finishing))
        return replace(state, shortfall=iterate.shortfall, steps=0, chosen=())

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        if self.finish is not None and state.finishing is not None:
            return replace(state, finishing=self.finish.step(operator, iterate, state.finishing))
        chosen, *later = state.chosen or self._worst_blocks(iterate.residual)
        block = slice(chosen * self.block_size, min((chosen + 1) * self.block_size, state.size))
        factor = self._factor(operator, chosen, block, state.factors)
        update = factor.solve(iterate.residual[block])
        iterate.value[block] += update
        iterate.residual -= columns_matmul(operator, block, update)
        curvature = min(state.curvature, factor.curvature)
        return replace(state, steps=state.steps + 1, chosen=tuple(later), curvature=curvature)

    def after_step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        share = self._share(state)
        if self.finish is None or state.finishing is not None or state.steps * share < EPOCHS_PER_LOOK:
            return state
        gained, remaining = math.log(state.shortfall / iterate.shortfall), math.log(iterate.shortfall)
        if remaining * state.steps * share > PATIENCE * gained:
            finishing = self.finish.init(operator, iterate, state.given)
            return replace(state, finishing=finishing, factors={})
        return replace(state, shortfall=iterate.shortfall, steps=0)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        if self.finish is not None and state.finishing is not None:
            return replace(state, finishing=self.finish.narrow(state.finishing, columns))
        return state

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return self._share(state) if state.finishing is None else 1.0

    def work_of_setup(self, state: _State) -> float:
        # The blocks on the diagonal, as if all of them had been visited.
        work = self._share(state)
        if self.finish is not None and state.finishing is not None:
            work += self.finish.work_of_setup(state.finishing)
        return work

    def curvature(self, state: _State) -> float:
        if self.finish is None or state.finishing is None:
            return state.curvature
        return min(state.curvature, self.finish.curvature(state.finishing))

    def _factor(
        self, operator: LinearOperator, number: int, block: slice, factors: dict[int, BlockFactor]
    ) -> BlockFactor:
        """The factor of a block: the kept one, or a new one that is kept where there is room for it."""
        if number in factors:
            return factors[number]
        factor = BlockFactor.of(principal_block(operator, block))
        if sum(kept.nbytes for kept in factors.values()) + factor.nbytes <= MAX_FACTOR_BYTES:
            factors[number] = factor
        return factor

    def _share(self, state: _State) -> float:
        return min(self.block_size / state.size, 1.0)

    def _worst_blocks(self, residual: Tensor) -> list[int]:
        """The block with the largest sum of squares (a sum over columns must not let them cancel).

        Where the host has to wait for the answer: the next few of them as well, of no more than half of all blocks.
        """
        rows = residual.square().sum(-1)
        missing = -len(rows) % self.block_size
        scores = pad(rows, (0, missing)).view(-1, self.block_size).sum(-1)
        count = min(reads_every(residual.device), max(len(scores) // 2, 1))
        return [int(scores.argmax())] if count == 1 else scores.topk(count).indices.tolist()

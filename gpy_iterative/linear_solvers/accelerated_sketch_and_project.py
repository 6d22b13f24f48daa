"""Accelerated sketch-and-project.

Rathore et al. 2024, "Have ASkotch"; Rathore et al. 2025, "Turbocharging Gaussian process inference"; Gower et al. 2018,
"Accelerated stochastic matrix inversion".
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, SolverState, lowest_curvature
from gpy_iterative.linear_solvers.cholesky import block_cholesky
from gpy_iterative.linear_solvers.columns import Iterate
from gpy_iterative.linear_solvers.stochastic_descent import WayBack, largest_eigenvalue
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankPlusDiagonal
from gpy_iterative.preconditioners.nystrom import Nystrom
from gpy_iterative.random_numbers import given_or_seeded, permutation

#: Mu over its maximum, block_size / n. Iterates oscillate if it is too small.
CONVEXITY = 1 / 3


@dataclass(frozen=True, kw_only=True)
class _State(SolverState):
    by_column: ClassVar[tuple[str, ...]] = ("ahead", "ahead_residual", "momentum", "momentum_residual", "way_back")

    ahead: Tensor  # z [n, s], where a block is solved
    ahead_residual: Tensor
    momentum: Tensor  # v [n, s]
    momentum_residual: Tensor
    way_back: WayBack
    is_accelerated: bool
    generator: torch.Generator


@dataclass(frozen=True, kw_only=True)
class AcceleratedSketchAndProject(IterativeSolver[_State]):
    """Accelerated sketch-and-project; an iteration solves one random block, an epoch is n / block_size iterations.

    A diverging solve restarts without acceleration. Other options: `IterativeSolver`. Memory: fourteen blocks [n, s] and
    block_size rows.

    Args:
        block_size: rows of a block, at most n.
        rank: of a damped Nystrom approximation of the block; None: exact solves.
    """

    block_size: int = 512
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("block_size", self.block_size)
        check_count("rank", self.rank, optional=True)

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> _State:
        generator = given_or_seeded(inputs.generator)
        return self._begin(iterate, generator, is_accelerated=True)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        begun = self._begin(iterate, state.generator, is_accelerated=state.is_accelerated)
        return replace(begun, curvature=state.curvature)

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        rows = permutation(operator.shape[-1], state.generator, operator.device)[: self.block_size]
        matrix = dense_rows(operator, rows)
        update, curvature = self._solve_block(matrix[:, rows], state.ahead_residual[rows], state.generator)
        product = matrix.mT @ update
        if self.rank is not None:  # an approximation gives the curvature along its update
            curvature = min(curvature, float(lowest_curvature(update, (update * product[rows]).sum(0))))
        state = replace(state, curvature=min(state.curvature, curvature))
        iterate.value.copy_(state.ahead)
        iterate.value[rows] += update
        torch.sub(state.ahead_residual, product, out=iterate.residual)
        self._look_ahead(iterate, state, rows, update, product)
        return state if state.way_back.growth(iterate.residual) <= 1 else self._give_up(iterate, state)

    def _look_ahead(self, iterate: Iterate, state: _State, rows: Tensor, update: Tensor, product: Tensor) -> None:
        blocks = max(len(state.ahead) / self.block_size, 1.0)
        convexity = CONVEXITY / blocks
        keep = 1 - math.sqrt(convexity / blocks)
        stride = 1 / math.sqrt(convexity * blocks)
        share = 1 / (1 + stride * blocks) if state.is_accelerated else 0.0
        state.momentum.lerp_(state.ahead, 1 - keep)
        state.momentum[rows] += stride * update
        state.momentum_residual.lerp_(state.ahead_residual, 1 - keep).sub_(product, alpha=stride)
        torch.lerp(iterate.value, state.momentum, share, out=state.ahead)
        torch.lerp(iterate.residual, state.momentum_residual, share, out=state.ahead_residual)

    def _solve_block(self, block: Tensor, residual: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
        if self.rank is None or self.rank >= len(block):
            factor = block_cholesky(block)
            return factor.solve(residual), factor.curvature
        approximation = Nystrom(self.rank).build(DenseLinearOperator(block), generator=generator)
        left = block - approximation.factor @ approximation.factor.mT
        largest, _ = largest_eigenvalue(DenseLinearOperator(left), generator)
        damping = max(largest, torch.finfo(block.dtype).eps * float(block.diagonal().max()))
        damped = LowRankPlusDiagonal(approximation.factor, torch.full_like(residual[:, 0], damping))
        return damped.solve(residual), math.inf

    def _begin(self, iterate: Iterate, generator: torch.Generator, *, is_accelerated: bool) -> _State:
        return _State(
            ahead=iterate.value.clone(),
            ahead_residual=iterate.residual.clone(),
            momentum=iterate.value.clone(),
            momentum_residual=iterate.residual.clone(),
            way_back=WayBack.to(iterate),
            share=min(self.block_size / len(iterate.residual), 1.0),
            is_accelerated=is_accelerated,
            generator=generator,
        )

    def _give_up(self, iterate: Iterate, state: _State) -> _State:
        state.way_back.take(iterate)
        begun = self._begin(iterate, state.generator, is_accelerated=False)
        return replace(begun, has_diverged=not state.is_accelerated, curvature=state.curvature)

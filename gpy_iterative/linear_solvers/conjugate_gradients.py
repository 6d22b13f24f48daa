"""Preconditioned conjugate gradients on a block of columns, each with its own step sizes.

Gardner et al. 2018 (batched, with a pivoted Cholesky preconditioner); random pivots: Diaz et al. 2023. The recurrence is in
`conjugate_directions`.
"""

from dataclasses import dataclass, field, replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_instance
from gpy_iterative.linear_solvers.base import IterativeSolver
from gpy_iterative.linear_solvers.columns import Iterate
from gpy_iterative.linear_solvers.conjugate_directions import ConjugateDirections
from gpy_iterative.linear_solvers.curvature import lowest_curvature
from gpy_iterative.linear_solvers.linear_system import Given
from gpy_iterative.preconditioners.low_rank_plus_diagonal import PreconditionerRecipe
from gpy_iterative.preconditioners.pivoted_cholesky import RandomlyPivotedCholesky


@dataclass(frozen=True)
class _State:
    """The recurrence, how much of the matrix it took to build its preconditioner here, and the lowest curvature so far."""

    directions: ConjugateDirections
    setup: float
    curvature: Tensor


@dataclass(frozen=True, kw_only=True)
class ConjugateGradients(IterativeSolver[_State]):
    """One product with the matrix an iteration, one iteration an epoch.

    Args:
        preconditioner: the recipe that `solve` builds when it is given none; None for no preconditioner. Random recipes
            draw from the generator of `solve`. Random pivots, the default, take half to all of the epochs of greedy
            ones.

    Further options are those of `IterativeSolver`. Memory: eight blocks [n, s], and [n, rank].

    Examples:
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        >>> system = gpi.kernels.MatrixFreeKernel(kernel)(train_x).evaluate_kernel().add_jitter(0.1)
        >>> solution = gpi.solvers.ConjugateGradients(tolerance=1e-3).solve(system, train_y.unsqueeze(-1))
        >>> solution.status.name
        'CONVERGED'
        >>> bool((system @ solution.value - train_y.unsqueeze(-1)).norm() < 2e-3 * train_y.norm())
        True
    """

    preconditioner: PreconditionerRecipe | None = field(default=RandomlyPivotedCholesky(rank=100))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance("preconditioner", self.preconditioner, PreconditionerRecipe, "RandomlyPivotedCholesky(rank=100)")

    def init(self, operator: LinearOperator, iterate: Iterate, given: Given) -> _State:
        preconditioner, setup = given.preconditioner, 0.0
        if preconditioner is None and self.preconditioner is not None:
            preconditioner = self.preconditioner.build(operator, generator=given.generator)
            setup = preconditioner.build_epochs
        curvature = torch.full_like(iterate.residual[0, 0], torch.inf)
        return _State(ConjugateDirections.begin(iterate.residual, preconditioner), setup, curvature)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return replace(state, directions=ConjugateDirections.begin(iterate.residual, state.directions.preconditioner))

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        direction = state.directions.direction
        following, length, energy = state.directions.advance(operator, iterate.residual)
        iterate.value.addcmul_(direction, length)
        curvature = torch.minimum(state.curvature, lowest_curvature(direction, energy))
        return replace(state, directions=following, curvature=curvature)

    def narrow(self, state: _State, columns: Tensor) -> _State:
        return replace(state, directions=state.directions.narrow(columns))

    def work_per_step(self, operator: LinearOperator, state: _State) -> float:
        return 1.0

    def work_of_setup(self, state: _State) -> float:
        return state.setup

    def curvature(self, state: _State) -> float:
        return float(state.curvature)

"""Preconditioned conjugate gradients.

Gardner et al. 2018; Diaz et al. 2023 (random pivots); Lin et al. 2024, algorithm 1.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_instance
from gpy_iterative.linear_solvers.base import IterativeSolver, SolveInputs, SolverState, lowest_curvature
from gpy_iterative.linear_solvers.columns import Iterate
from gpy_iterative.preconditioners.low_rank_plus_vecchia import LowRankPlusVecchia
from gpy_iterative.preconditioners.preconditioner import Preconditioner, PreconditionerRecipe
from gpy_iterative.preconditioners.task_noise import build_whitened


@dataclass(frozen=True)
class ConjugateDirections:
    direction: Tensor  # d [n, s]
    product: Tensor  # r^T P^-1 r [s]
    preconditioner: Preconditioner | None  # P; None is the identity

    @classmethod
    def begin(cls, residual: Tensor, preconditioner: Preconditioner | None) -> Self:
        # Algorithm 1 does not precondition here, and diverges. Cloned, because a step overwrites the residual.
        direction = (residual if preconditioner is None else preconditioner.solve(residual)).clone()
        return cls(direction, (residual * direction).sum(0), preconditioner)

    def advance(self, operator: LinearOperator, residual: Tensor) -> tuple[Self, Tensor, Tensor]:
        """The next state, the step length along d, and d^T H d [s]. Overwrites the residual."""
        along = operator._matmul(self.direction)
        energy = (self.direction * along).sum(0)
        length = _ratio(self.product, energy)
        residual.addcmul_(along, -length)
        preconditioned = residual if self.preconditioner is None else self.preconditioner.solve(residual)
        product = (residual * preconditioned).sum(0)
        direction = torch.addcmul(preconditioned, _ratio(product, self.product), self.direction)
        return type(self)(direction, product, self.preconditioner), length, energy

    def narrow(self, columns: Tensor) -> Self:
        return type(self)(self.direction[:, columns], self.product[columns], self.preconditioner)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Zero for 0 / 0 (an exact column); NaN stays NaN."""
    is_zero = denominator == 0
    return torch.where(is_zero, torch.zeros_like(numerator), numerator / denominator.masked_fill(is_zero, 1))


@dataclass(frozen=True, kw_only=True)
class _State(SolverState):
    by_column: ClassVar[tuple[str, ...]] = ("directions",)

    directions: ConjugateDirections


@dataclass(frozen=True, kw_only=True)
class ConjugateGradients(IterativeSolver[_State]):
    """Conjugate gradients; an iteration is one epoch.

    Other options: `IterativeSolver`. Memory: eight blocks [n, s], and [n, rank].

    Args:
        preconditioner: used if `solve` gets none; None: the identity.

    Examples:
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        >>> system = gpi.kernels.MatrixFreeKernel(kernel)(train_x).evaluate_kernel().add_jitter(0.1)
        >>> solution = gpi.solvers.ConjugateGradients(tolerance=1e-3).solve(system, train_y.unsqueeze(-1))
        >>> solution.status.name
        'CONVERGED'
    """

    preconditioner: PreconditionerRecipe | None = field(default=LowRankPlusVecchia())

    def __post_init__(self) -> None:
        super().__post_init__()
        check_instance("preconditioner", self.preconditioner, PreconditionerRecipe, "LowRankPlusVecchia()")

    def init(self, operator: LinearOperator, iterate: Iterate, inputs: SolveInputs) -> _State:
        preconditioner, setup = inputs.preconditioner, 0.0
        if preconditioner is None and self.preconditioner is not None:
            preconditioner = build_whitened(partial(self.preconditioner.build, generator=inputs.generator), operator)
            setup = preconditioner.build_epochs
        directions = ConjugateDirections.begin(iterate.residual, preconditioner)
        return _State(directions=directions, setup=setup, preconditioner=preconditioner)

    def restart(self, iterate: Iterate, state: _State) -> _State:
        return replace(state, directions=ConjugateDirections.begin(iterate.residual, state.preconditioner))

    def step(self, operator: LinearOperator, iterate: Iterate, state: _State) -> _State:
        direction = state.directions.direction
        following, length, energy = state.directions.advance(operator, iterate.residual)
        iterate.value.addcmul_(direction, length)
        curvature = lowest_curvature(direction, energy).clamp_max(state.curvature)
        return replace(state, directions=following, curvature=curvature)

"""The mode from dense factors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR, CurvatureFloor
from gpy_iterative.laplace.newton.base import Iterate, LaplaceSolver, Problem, StepSolver
from gpy_iterative.laplace.newton.whitened import dense_factor


class _DenseSteps(StepSolver):
    """dv = e - R (I + R^T K R)^-1 R^T K e with e = g - v: v itself would cancel for a large W."""

    def __init__(self, problem: Problem) -> None:
        self.dtype = problem.prior.operator.dtype
        self.kernel = problem.prior.operator.to_dense().detach().double()
        if not torch.isfinite(self.kernel).all():
            raise NonFiniteError("The kernel matrix is not finite: check inputs and hyperparameters, or use float64.")

    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        inner = curvature.root_t((self.kernel @ iterate.error).unsqueeze(-1))
        solved = torch.cholesky_solve(inner, dense_factor(self.kernel, curvature, self.dtype))
        dv = iterate.error - curvature.root(solved).squeeze(-1)
        return dv, self.kernel @ dv

    def finish(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor, Tensor]:
        # Q = R L^-T.
        identity = torch.eye(curvature.num_columns, dtype=self.kernel.dtype, device=self.kernel.device)
        inverse = torch.linalg.solve_triangular(dense_factor(self.kernel, curvature, self.dtype), identity, upper=False)
        root = curvature.root(inverse.mT)
        return root, self.kernel @ root, torch.eye(root.shape[-1], dtype=torch.float64, device=root.device)


@dataclass(frozen=True, kw_only=True)
class LaplaceCholesky(LaplaceSolver):
    """Newton's method with exact steps: (n C)^3 per step, a few times 8 (n C)^2 bytes.

    Options: see `LaplaceSolver`; the default tolerance is 1e-10 (float32 kernels: 1e-5).
    """

    max_outer: int = 100

    _tolerances: ClassVar[tuple[float, float]] = (1e-10, 1e-5)
    _floors: ClassVar[tuple[CurvatureFloor, CurvatureFloor]] = (NO_FLOOR, NO_FLOOR)
    _step_floor: ClassVar[CurvatureFloor] = NO_FLOOR  # a floor slows steps, and these need no W^+

    def _step_solver(self, problem: Problem) -> StepSolver:
        return _DenseSteps(problem)

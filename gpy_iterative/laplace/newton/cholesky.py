"""The mode from dense factors."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR, CurvatureFloor
from gpy_iterative.laplace.newton.base import Iterate, LaplaceSolver, Problem, StepSolver
from gpy_iterative.laplace.newton.dense import DenseKernel
from gpy_iterative.laplace.newton.inverse import Inverse


class _DenseSteps(StepSolver):
    """dv = e - P K e with e = g - v: v itself would cancel for a large W."""

    def __init__(self, problem: Problem) -> None:
        self.kernel = DenseKernel(problem.prior.operator)

    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        dv = iterate.error - self.kernel.inverse(curvature).matmul(self.kernel.matmul(iterate.error))
        return dv, self.kernel.matmul(dv)

    def finish(self, iterate: Iterate, curvature: Curvature) -> Inverse:
        return self.kernel.inverse(curvature)


@dataclass(frozen=True, kw_only=True)
class LaplaceCholesky(LaplaceSolver):
    """Newton's method with exact steps: (n C)^3 per step, a few times 8 (n C)^2 bytes.

    For a softmax without mixing weights and independent functions a step costs C n^3.

    Options: see `LaplaceSolver`; the default tolerance is 1e-10 (float32 kernels: 1e-5).
    """

    max_outer: int = 100

    _tolerances: ClassVar[tuple[float, float]] = (1e-10, 1e-5)
    _floors: ClassVar[tuple[CurvatureFloor, CurvatureFloor]] = (NO_FLOOR, NO_FLOOR)
    _step_floor: ClassVar[CurvatureFloor] = NO_FLOOR  # a floor slows steps, and these need no W^+

    def _step_solver(self, problem: Problem) -> StepSolver:
        return _DenseSteps(problem)

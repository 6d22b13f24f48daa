"""The mode from dense factors of P = R (I + R^T K R)^-1 R^T with W = R R^T.

For C functions that are independent under the prior, and a softmax, W = D - p p^T per point, class by class (Rasmussen and
Williams 2006, section 3.5): with B_c = I + D_c^1/2 K_c D_c^1/2, E_c = D_c^1/2 B_c^-1 D_c^1/2 and M = sum_c E_c,

    P = E - E 1 M^-1 1^T E,   log det (I + R^T K R) = sum_c log det B_c + log det M,

where 1 stacks C identities. Its cost is C n^3, that of other factors (C n)^3.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import has_finite_sum
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.curvature import Curvature, SoftmaxCurvature
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR, CurvatureFloor
from gpy_iterative.laplace.newton.base import (
    Inverse,
    Iterate,
    LaplaceSolver,
    Problem,
    StepSolver,
    gains_by_float64,
    in_double,
)
from gpy_iterative.linear_operators.latent import LatentPrior, function_kernels
from gpy_iterative.linear_solvers.cholesky import CholeskyFactor, warned_cholesky

#: Of the stationarity in a step, after which the next one keeps the factors.
FALL = 0.25

Found = TypeVar("Found")


def _kept(compute: Callable[[Any], Found]) -> "cached_property[Found]":
    """A property computed once, as a constant: who asks first may be in inference mode, or record a graph."""
    return cached_property(torch.inference_mode(False)(torch.no_grad()(compute)))


class DenseKernel(StepSolver):
    """K [n C, n C] as matrices in float64, and steps by dense factors. Raises NonFiniteError."""

    def __init__(self, operator: LinearOperator) -> None:
        self.operator = operator
        self._earlier: tuple[DenseInverse, float] | None = None  # of the last step, and the stationarity before it

    @_kept
    def joint(self) -> Tensor:
        kernels = self.by_class
        if kernels is None:
            return _finite(self.operator)
        size = kernels.shape[-1]
        count = self.operator.shape[-1] // size
        joint = kernels.new_zeros(size, count, size, count)
        joint.diagonal(dim1=1, dim2=3).copy_(kernels.movedim(0, -1))
        return joint.flatten(2).flatten(0, 1)

    @_kept
    def by_class(self) -> Tensor | None:
        """Kernels [C, n, n] or, if shared, [1, n, n] of independent functions; else None."""
        kernels = function_kernels(self.operator)
        return None if kernels is None else _finite(kernels).view(-1, *kernels.matrix_shape)

    def matmul(self, column: Tensor) -> Tensor:
        """K x [n C]."""
        kernels = self.by_class
        if kernels is None:
            return self.joint @ column
        return (kernels @ column.view(kernels.shape[-1], -1).mT.unsqueeze(-1)).squeeze(-1).mT.flatten()

    def inverse(self, curvature: Curvature) -> "DenseInverse":
        if isinstance(curvature, SoftmaxCurvature) and self.by_class is not None:
            return ClassInverse(self, curvature, self.by_class)
        return JointInverse(self, curvature)

    def step(self, iterate: Iterate, curvature: Curvature) -> tuple[Tensor, Tensor]:
        # While W hardly changes, a step by earlier factors, for n^2, leaves as little.
        inverse, before = self._earlier or (self.inverse(curvature), math.inf)
        if iterate.stationarity > FALL * before:
            inverse = self.inverse(curvature)
        self._earlier = inverse, iterate.stationarity
        # dv = e - P K e with e = g - v: v itself would cancel for a large W.
        dv = iterate.error - inverse.matmul(self.matmul(iterate.error))
        return dv, self.matmul(dv)

    def finish(self, iterate: Iterate, curvature: Curvature) -> Inverse:
        self._earlier = None  # else a solution, which holds this kernel, would keep two sets of factors
        return self.inverse(curvature)


@dataclass(frozen=True)
class DenseInverse(Inverse):
    """P, whose factors are computed when needed."""

    kernel: DenseKernel
    curvature: Curvature

    @property
    def rank(self) -> int:
        return self.curvature.num_columns

    @property
    def root(self) -> Tensor:
        return self.actions

    @property
    def image_of_root(self) -> Tensor:
        return self.images

    def _factored(self, matrix: Tensor) -> CholeskyFactor:
        lower = warned_cholesky(matrix, "I + R^T K R at the mode", self.kernel.operator.dtype)
        return CholeskyFactor(lower, torch.float64)

    @abstractmethod
    def logdet(self) -> Tensor:
        """Of I + R^T K R, []."""

    @abstractmethod
    def matmul(self, column: Tensor) -> Tensor:
        """P x [n C]."""

    @abstractmethod
    def weights(self, left: Tensor, right: Tensor) -> Tensor:
        """Of the entries of dK in left^T dK right - tr(P dK) / 2, symmetric: [n C, n C] or, by class, [C, n, n]."""


@dataclass(frozen=True)
class JointInverse(DenseInverse):
    @_kept
    def _factor(self) -> CholeskyFactor:
        inner = self.curvature.root_t(self.curvature.root_t(self.kernel.joint).mT)
        return self._factored(_plus_identity(inner))

    def logdet(self) -> Tensor:
        return self._factor.logdet()

    def matmul(self, column: Tensor) -> Tensor:
        solved = self._factor.solve(self.curvature.root_t(column.unsqueeze(-1)))
        return self.curvature.root(solved).squeeze(-1)

    def weights(self, left: Tensor, right: Tensor) -> Tensor:
        half = self.curvature.root(self._factor.inverse())
        return _weights(left, right, self.curvature.root(half.mT))

    @_kept
    def actions(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Q = R L^-T.
        return self.curvature.root(self._factor.whiten(_identity_like(self._factor)).mT)

    @_kept
    def images(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._factor.whiten(self.curvature.root_t(self.kernel.joint)).mT.contiguous()


@dataclass(frozen=True)
class ClassInverse(DenseInverse):
    """By the formulas above, class by class [C, n, n]."""

    curvature: SoftmaxCurvature
    kernels: Tensor  # [C, n, n] or [1, n, n]

    @_kept
    def _scale(self) -> Tensor:
        """D^1/2 [C, n, 1]."""
        return self.curvature.probabilities.mT.sqrt().unsqueeze(-1).contiguous()

    @_kept
    def _factors(self) -> CholeskyFactor:
        """L_c of B_c."""
        return self._factored(_plus_identity(self._scale * self.kernels * self._scale.mT))

    @_kept
    def _parts(self) -> Tensor:
        """E_c."""
        return self._scale * self._factors.inverse() * self._scale.mT

    @_kept
    def _shared(self) -> CholeskyFactor:
        """Factor L [n, n] of M."""
        return self._factored(self._parts.sum(0))

    @_kept
    def _coupling(self) -> Tensor:
        """L^-1 E_c."""
        return self._shared.whiten(self._parts)

    def logdet(self) -> Tensor:
        return self._factors.logdet().sum() + self._shared.logdet()

    def matmul(self, column: Tensor) -> Tensor:
        own = self._parts @ column.view(self.kernels.shape[-1], -1).mT.unsqueeze(-1)
        return (own - self._parts @ self._shared.solve(own.sum(0))).squeeze(-1).mT.flatten()

    def weights(self, left: Tensor, right: Tensor) -> Tensor:
        columns = (column.view(self.kernels.shape[-1], -1).mT for column in (left, right))
        return _weights(*columns, torch.baddbmm(self._parts, self._coupling.mT, self._coupling, alpha=-1))

    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        known = self._factors.whiten(self._scale * self.kernels)  # L_c^-1 D^1/2 K
        own = prior.point_blocks().double() - torch.diag_embed(known.square().sum(-2).mT)
        coupled = (self._coupling @ self.kernels).permute(2, 0, 1).contiguous()
        return own + coupled @ coupled.mT

    @_kept
    def actions(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        # P = A (I - Y Y^T) A^T with a projector, A_c = D_c^1/2 L_c^-T, Y = A^T 1 L^-T.
        roots = self._scale * self._factors.whiten(_identity_like(self._shared)).mT
        across = self._shared.whiten(torch.cat(list(roots), -1))
        actions = torch.block_diag(*roots) - self._coupling.mT.flatten(0, 1) @ across
        return _by_point(actions.view(len(roots), self.kernels.shape[-1], -1))

    @_kept
    def images(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _by_point(self.kernels @ self.actions.view(self.kernels.shape[-1], -1, self.rank).transpose(0, 1))


def _weights(left: Tensor, right: Tensor, precision: Tensor) -> Tensor:
    columns = torch.stack([left, right], dim=-1)
    return (columns @ columns.flip(-1).mT).sub_(precision).div_(2)


def _by_point(classes: Tensor) -> Tensor:
    """[n C, b] from [C, n, b]."""
    return classes.transpose(0, 1).flatten(0, 1)


def _finite(operator: LinearOperator) -> Tensor:
    kernel = operator.to_dense().detach().double()
    if not has_finite_sum(kernel):
        raise NonFiniteError("The kernel matrix is not finite: check inputs and hyperparameters, or use float64.")
    return (kernel + kernel.mT).div_(2)  # a large W makes much of the rounding by which the two triangles differ


def _plus_identity(matrix: Tensor) -> Tensor:
    matrix.diagonal(dim1=-2, dim2=-1).add_(1)
    return matrix


def _identity_like(factor: CholeskyFactor) -> Tensor:
    return torch.eye(factor.lower.shape[-1], dtype=torch.float64, device=factor.lower.device)


@dataclass(frozen=True, kw_only=True)
class LaplaceCholesky(LaplaceSolver):
    """Newton's method with dense factors: (n C)^3 for each, a few times 8 (n C)^2 bytes. Near the mode, steps share them.

    For a softmax without mixing weights and independent functions factors cost C n^3. A float32 model is
    computed in float64.

    Options: see `LaplaceSolver`; the default tolerance is 1e-10 (matrices evaluated in float32: 1e-5).
    """

    _tolerances: ClassVar[tuple[float, float]] = (1e-10, 1e-5)
    _floors: ClassVar[tuple[CurvatureFloor, CurvatureFloor]] = (NO_FLOOR, NO_FLOOR)

    def prior_for(self, prior: LatentPrior) -> LatentPrior:
        # Beside the factors, entries in float64 cost little; a large W would magnify the rounding of float32.
        return in_double(prior) if gains_by_float64(prior) else prior

    def _step_solver(self, problem: Problem) -> StepSolver:
        return DenseKernel(problem.prior.operator)

    def _step_floor(self, problem: Problem) -> CurvatureFloor:
        return NO_FLOOR  # a floor slows steps, and these need no W^+

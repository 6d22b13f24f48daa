"""P = R (I + R^T K R)^-1 R^T with W = R R^T, from dense factors.

For C functions that are independent under the prior, and a softmax, W = D - p p^T per point, class by class (Rasmussen and
Williams 2006, section 3.5): with B_c = I + D_c^1/2 K_c D_c^1/2, E_c = D_c^1/2 B_c^-1 D_c^1/2 and M = sum_c E_c,

    P = E - E 1 M^-1 1^T E,   log det (I + R^T K R) = sum_c log det B_c + log det M,

where 1 stacks C identities. Its cost is C n^3, that of other factors (C n)^3.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from linear_operator import LinearOperator
from linear_operator.operators import BlockInterleavedLinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.curvature import Curvature, SoftmaxCurvature
from gpy_iterative.laplace.newton.inverse import Inverse
from gpy_iterative.linear_operators.latent import LatentPrior, RepeatedKernelLinearOperator
from gpy_iterative.linear_solvers.cholesky import warned_cholesky

FACTORED = "I + R^T K R at the mode"

Found = TypeVar("Found")


def _kept(compute: Callable[[Any], Found]) -> "cached_property[Found]":
    """A property computed once, as a constant: who asks first may be in inference mode, or record a graph."""
    return cached_property(torch.inference_mode(False)(torch.no_grad()(compute)))


@dataclass(frozen=True)
class DenseKernel:
    """K [n C, n C] as matrices, in float64. Raises NonFiniteError."""

    operator: LinearOperator

    @_kept
    def joint(self) -> Tensor:
        return _finite(self.operator)

    @_kept
    def by_class(self) -> Tensor | None:
        """Kernels [C, n, n] or, if shared, [1, n, n] of independent functions; else None."""
        if isinstance(self.operator, RepeatedKernelLinearOperator):
            return _finite(self.operator.kernel).unsqueeze(0)
        if isinstance(self.operator, BlockInterleavedLinearOperator):
            return _finite(self.operator.base_linear_op)
        return None

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


class DenseInverse(Inverse):
    """P, whose factors are computed when needed."""

    kernel: DenseKernel
    curvature: Curvature

    @property
    def rank(self) -> int:
        return self.curvature.num_columns

    @property
    def transform(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.eye(self.rank, dtype=torch.float64, device=self.actions.device)

    @property
    def root(self) -> Tensor:
        return self.actions

    @property
    def image_of_root(self) -> Tensor:
        return self.images

    @abstractmethod
    def logdet(self) -> Tensor:
        """Of I + R^T K R, []."""

    @abstractmethod
    def matmul(self, column: Tensor) -> Tensor:
        """P x [n C]."""

    @abstractmethod
    def precision(self) -> Tensor:
        """P [n C, n C], zero where K is by structure."""


@dataclass(frozen=True)
class JointInverse(DenseInverse):
    kernel: DenseKernel
    curvature: Curvature

    @_kept
    def _factor(self) -> Tensor:
        inner = self.curvature.root_t(self.curvature.root_t(self.kernel.joint).mT)
        return warned_cholesky(_plus_identity(inner), FACTORED, self.kernel.operator.dtype)

    def logdet(self) -> Tensor:
        return _logdet(self._factor)

    def matmul(self, column: Tensor) -> Tensor:
        solved = torch.cholesky_solve(self.curvature.root_t(column.unsqueeze(-1)), self._factor)
        return self.curvature.root(solved).squeeze(-1)

    def precision(self) -> Tensor:
        half = self.curvature.root(torch.cholesky_inverse(self._factor))
        return self.curvature.root(half.mT)

    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        known = self.images.view(*prior.mean.shape, -1)
        return prior.point_blocks().double() - known @ known.mT

    @_kept
    def actions(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Q = R L^-T.
        identity = torch.eye(len(self._factor), dtype=self._factor.dtype, device=self._factor.device)
        return self.curvature.root(torch.linalg.solve_triangular(self._factor, identity, upper=False).mT)

    @_kept
    def images(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        whitened = self.curvature.root_t(self.kernel.joint)
        return torch.linalg.solve_triangular(self._factor, whitened, upper=False).mT.contiguous()


@dataclass(frozen=True)
class ClassInverse(DenseInverse):
    """By the formulas above, class by class [C, n, n]."""

    kernel: DenseKernel
    curvature: SoftmaxCurvature
    kernels: Tensor  # [C, n, n] or [1, n, n]

    @_kept
    def _scale(self) -> Tensor:
        """D^1/2 [C, n, 1]."""
        return self.curvature.probabilities.mT.sqrt().unsqueeze(-1).contiguous()

    @_kept
    def _factors(self) -> Tensor:
        """L_c of B_c."""
        inner = self._scale * self.kernels * self._scale.mT
        return warned_cholesky(_plus_identity(inner), FACTORED, self.kernel.operator.dtype)

    @_kept
    def _parts(self) -> Tensor:
        """E_c."""
        return self._scale * torch.cholesky_inverse(self._factors) * self._scale.mT

    @_kept
    def _shared(self) -> Tensor:
        """Factor L [n, n] of M."""
        total = self._parts.sum(0)
        return warned_cholesky((total + total.mT) / 2, FACTORED, self.kernel.operator.dtype)

    @_kept
    def _coupling(self) -> Tensor:
        """L^-1 E_c."""
        return torch.linalg.solve_triangular(self._shared, self._parts, upper=False)

    def logdet(self) -> Tensor:
        return _logdet(self._factors).sum() + _logdet(self._shared)

    def matmul(self, column: Tensor) -> Tensor:
        own = self._parts @ column.view(len(self._shared), -1).mT.unsqueeze(-1)
        return (own - self._parts @ torch.cholesky_solve(own.sum(0), self._shared)).squeeze(-1).mT.flatten()

    def precision(self) -> Tensor:
        blocks = self._parts - self._coupling.mT @ self._coupling
        count, size = blocks.shape[:2]
        joint = blocks.new_zeros(size, count, size, count)
        joint.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(0, -1))
        return joint.view(size * count, size * count)

    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        known = torch.linalg.solve_triangular(self._factors, self._scale * self.kernels, upper=False)  # L_c^-1 D^1/2 K
        own = prior.point_blocks().double() - torch.diag_embed(known.square().sum(-2).mT)
        images = self._scale * torch.linalg.solve_triangular(self._factors.mT, known, upper=True)  # E_c K_c
        coupled = torch.linalg.solve_triangular(self._shared, images, upper=False).permute(2, 0, 1).contiguous()
        return own + coupled @ coupled.mT

    @_kept
    def actions(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        # P = A (I - Y Y^T) A^T with a projector, A_c = D_c^1/2 L_c^-T, Y = A^T 1 L^-T.
        identity = torch.eye(len(self._shared), dtype=self._shared.dtype, device=self._shared.device)
        roots = self._scale * torch.linalg.solve_triangular(self._factors, identity, upper=False).mT
        across = torch.linalg.solve_triangular(self._shared, torch.cat(list(roots), -1), upper=False)
        actions = torch.block_diag(*roots) - self._coupling.mT.flatten(0, 1) @ across
        return _by_point(actions.view(len(roots), len(identity), -1))

    @_kept
    def images(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _by_point(self.kernels @ self.actions.view(len(self._shared), -1, self.rank).transpose(0, 1))


def _by_point(classes: Tensor) -> Tensor:
    """[n C, b] from [C, n, b]."""
    return classes.transpose(0, 1).flatten(0, 1)


def _finite(operator: LinearOperator) -> Tensor:
    kernel = operator.to_dense().detach().double()
    if not torch.isfinite(kernel).all():
        raise NonFiniteError("The kernel matrix is not finite: check inputs and hyperparameters, or use float64.")
    return kernel


def _plus_identity(matrix: Tensor) -> Tensor:
    matrix = (matrix + matrix.mT) / 2
    matrix.diagonal(dim1=-2, dim2=-1).add_(1)
    return matrix


def _logdet(factor: Tensor) -> Tensor:
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

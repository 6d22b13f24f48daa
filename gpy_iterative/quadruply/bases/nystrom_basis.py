"""Nystrom eigenfeatures, and random features of the residual."""

from collections.abc import Callable

import torch
from gpytorch import kernels
from torch import Tensor
from torch.nn import functional

from gpy_iterative.checks import check_count
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.kernel_functions import kernel_diagonal, kernel_matrix
from gpy_iterative.quadruply.bases.feature_basis import check_columns
from gpy_iterative.quadruply.bases.inducing_point_basis import KeptAt, KernelFunctionBasis, gram_matrix
from gpy_iterative.quadruply.bases.random_fourier_basis import FourierGroups

#: Relative to the largest; the tail has smaller eigenvalues.
SMALLEST_EIGENVALUE = 1e-6


class NystromBasis(KernelFunctionBasis):
    """Nystrom eigenfeatures phi(x) = diag(l)^-1/2 U^T k(Z, x), K_ZZ = U diag(l) U^T, and a random tail; S = I.

    phi^T phi is nearly diagonal, so independent posterior deviations are nearly exact. With tail features
    psi(x) = phi_rff(x) - phi_rff(Z) K_ZZ^-1 k(Z, x), both sum to the kernel. Without a tail the objective is that of
    Titsias 2009 for diagonal posterior covariance.

    Args:
        kernel: any without batch shape.
        inducing_points: Z [h, d], random training inputs or cluster centres.
        num_tail_features: 0, or a multiple of 2 for each summand of the kernel.
        seed: as in `RandomFourierBasis`.

    Raises:
        ValueError: unfit or non-finite points, an odd tail.
        SpectralDensityMissingError: no random Fourier features for the tail.

    Cost: n h (d + h) for n rows of head or h tail features; h^3 per evaluation, or once with fixed hyperparameters.
    """

    exchangeable = True

    def __init__(
        self,
        kernel: kernels.Kernel,
        inducing_points: Tensor,
        num_tail_features: int = 0,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(kernel, inducing_points)
        self.fourier = None
        self.num_groups = 0
        check_count("num_tail_features", num_tail_features, least=0)
        if num_tail_features:
            self.fourier = FourierGroups(
                kernel, num_tail_features, num_dims=self.points.shape[-1], seed=seed, stored=True
            )
            self.num_groups, self.group_size = self.fourier.num_groups, self.fourier.group_size
        # Those of omitted eigenvalues are zero.
        self.num_head_features = len(inducing_points)
        self._rotation_at, self._projection_at = KeptAt(), KeptAt()
        # Float64, also after a conversion of the model, since columns differ by orders of magnitude.
        self.register_buffer("rotation", self._rotation_at.get(kernel, [self.points], self._new_rotation))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NystromBasis":
        rotation = self.rotation
        super()._apply(fn, recurse)
        self.rotation = rotation.to(self.rotation.device)
        return self

    def settle(self) -> None:
        self.rotation = self._rotation_at.get(self.kernel, [self.points], self._new_rotation)

    def head_features(self, x: Tensor) -> Tensor:
        check_columns(x, self.points.shape[-1])
        head = kernel_matrix(self.kernel, x, self.points) @ self._projection().to(x.dtype)
        return functional.pad(head, (0, self.num_head_features - head.shape[-1]))

    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        own = self.fourier.features(self.kernel, x, groups)
        at_points = self.fourier.features(self.kernel, self.points, groups)
        projected = self._projection().to(x.dtype).mT @ at_points
        return own - head[:, : len(projected)] @ projected

    def group_prior_variance(self, x: Tensor, head: Tensor) -> Tensor:
        return (kernel_diagonal(self.kernel, x) - head.square().sum(-1)).clamp_min(0)

    def group_prior_covariance(self, x: Tensor, head: Tensor) -> Tensor:
        covariance = kernel_matrix(self.kernel, x, x) - head @ head.mT
        return covariance + torch.diag((-covariance.diagonal()).clamp_min(0))

    def omitted_variance(self) -> float:
        """Mean prior variance at the points that the head lacks."""
        gram = gram_matrix(self.kernel, self.points)
        return float(gram.diagonal().mean() - (gram @ self._projection()).square().sum(-1).mean())

    def _projection(self) -> Tensor:
        """P [h, r], head(x) = k(x, Z) P: rotation L^-T, L L^T = rotation^T K_ZZ rotation, so that the prior stays exact."""
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.kernel.parameters()):
            return self._new_projection()
        return self._projection_at.get(self.kernel, [self.points, self.rotation], self._new_projection)

    def _new_rotation(self) -> Tensor:
        """U diag(l)^-1/2 [h, h], zero for omitted eigenvalues."""
        values, vectors = torch.linalg.eigh(gram_matrix(self.kernel, self.points))
        values, vectors = values.flip(0), vectors.flip(1)
        kept = values > SMALLEST_EIGENVALUE * values[0]
        return torch.where(kept, vectors * values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), 0)

    def _new_projection(self) -> Tensor:
        rotation = self.rotation[:, self.rotation.any(0)]
        lower, info = torch.linalg.cholesky_ex(rotation.mT @ gram_matrix(self.kernel, self.points) @ rotation)
        if info:
            raise NonFiniteError(
                "The kernel matrix of the inducing points is not positive definite at these hyperparameters, which are too "
                "far from those of the basis' eigenvectors. Call basis.settle() or make a new basis."
            )
        return torch.linalg.solve_triangular(lower, rotation.mT, upper=False).mT

"""What a mode solver answers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.linear_solvers.solution import Solution, SolveStatus


@dataclass(frozen=True)
class LaplaceSolution(Solution):
    """The mode of p(f | y), and as much of the inverse of K + W^+ as was computed. All tensors are float64.

    `value` [n, C] are the representer weights v, with f = m + K v; `residual` [n, C] is d log p(y | f) / df - v, zero at
    the mode; `stats.epochs` counts kernel products, `stats.iterations` Newton steps, `stats.residual_norms["mode"]` is
    the norm of the residual over that of the gradient.

    Attributes:
        latent: f at the training points, [n, C].
        curvature: W at the mode.
        actions: S [n C, B].
        images: T = K S.
        transform: A [B, r] with A A^T = (S^T (K + W^+) S)^-1.
        log_joint: sum log p(y | f) - v^T (f - m) / 2.
    """

    latent: Tensor
    curvature: Curvature
    actions: Tensor
    images: Tensor
    transform: Tensor
    log_joint: float

    @property
    def root(self) -> Tensor:
        """Q = S A [n C, r]: the covariance is K(x, x) - K(x, X) Q Q^T K(X, x). Made anew at each call."""
        return self.actions @ self.transform

    @property
    def image_of_root(self) -> Tensor:
        """K Q = T A [n C, r]. Made anew at each call."""
        return self.images @ self.transform

    @property
    def converged(self) -> bool:
        """Whether this is a mode."""
        return self.status is SolveStatus.CONVERGED

    @property
    def num_outer(self) -> int:
        """Newton steps."""
        return self.stats.iterations

    @property
    def num_kernel_products(self) -> int:
        """Products with one column for each latent function; one with several actions at a time counts once."""
        return round(self.stats.epochs)

    @property
    def stationarity(self) -> float:
        """Norm of the gradient of the log joint density over that of the log likelihood's."""
        return self.stats.residual_norms["mode"]


def empty_columns(size: int, like: Tensor) -> Tensor:
    """[size, 0], float64."""
    return torch.empty(size, 0, dtype=torch.float64, device=like.device)

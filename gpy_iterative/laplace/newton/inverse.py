"""What a solver has computed of (K + W^+)^-1."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.linear_operators.latent import LatentPrior


class Inverse:
    """Q Q^T with Q = S A [n C, r], A A^T = (S^T (K + W^+) S)^-1; float64."""

    actions: Tensor  # S [n C, B]
    images: Tensor  # T = K S
    transform: Tensor  # A [B, r]

    @property
    def rank(self) -> int:
        """Number of actions, B."""
        return self.actions.shape[-1]

    @property
    def root(self) -> Tensor:
        """Q [n C, r]."""
        return self.actions @ self.transform

    @property
    def image_of_root(self) -> Tensor:
        """K Q [n C, r]."""
        return self.images @ self.transform

    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        """Blocks [n, C, C] of K - K Q Q^T K."""
        known = self.image_of_root.view(*prior.mean.shape, -1)
        return prior.point_blocks().double() - known @ known.mT


@dataclass(frozen=True)
class Subspace(Inverse):
    """In the span of few actions."""

    actions: Tensor
    images: Tensor
    transform: Tensor

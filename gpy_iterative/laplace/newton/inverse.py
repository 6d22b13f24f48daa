"""What a solver has computed of (K + W^+)^-1."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.linear_operators.latent import LatentPrior

CHUNK_POINTS = 4096


class Inverse(ABC):
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

    @abstractmethod
    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        """Blocks [n, C, C] of K - K Q Q^T K."""


@dataclass(frozen=True)
class Subspace(Inverse):
    """In the span of few actions."""

    actions: Tensor
    images: Tensor
    transform: Tensor

    def covariance_blocks(self, prior: LatentPrior) -> Tensor:
        blocks = prior.point_blocks().double().clone()
        images = self.images.view(*prior.mean.shape, self.rank)
        for start in range(0, prior.num_points, CHUNK_POINTS):
            known = images[start : start + CHUNK_POINTS] @ self.transform
            blocks[start : start + CHUNK_POINTS] -= known @ known.mT
        return blocks

"""The curvature of a likelihood that factorises over points: W, a C x C block for each of n points.

Columns are [n C, b], points first and a point's latents next to one another. W = R R^T, with a root R whose own columns
are n r. A singular W (a softmax does not see what all classes have in common) has the pseudo-inverse W^+.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Curvature(ABC):
    """W [n C, n C], positive semi-definite, block diagonal.

    Attributes:
        num_points: n.
        num_latents: C.
        root_size: r, columns of the root a point.
    """

    num_points: int
    num_latents: int
    root_size: int

    @abstractmethod
    def matmul(self, columns: Tensor) -> Tensor:
        """W x for x [n C, b]."""

    @abstractmethod
    def pinv(self, columns: Tensor) -> Tensor:
        """W^+ x for x [n C, b]."""

    @abstractmethod
    def root(self, columns: Tensor) -> Tensor:
        """R x: [n r, b] gives [n C, b]."""

    @abstractmethod
    def root_t(self, columns: Tensor) -> Tensor:
        """R^T x: [n C, b] gives [n r, b]."""

    @abstractmethod
    def project(self, columns: Tensor) -> Tensor:
        """W W^+ x, the part of x [n C, b] in the range of W."""

    @abstractmethod
    def blocks(self) -> Tensor:
        """W as [n, C, C]."""

    @abstractmethod
    def at(self, points: Tensor) -> "Curvature":
        """The curvature of some points, by their indices."""


@dataclass(frozen=True)
class DiagonalCurvature(Curvature):
    """One latent a point: W = diag(w), w [n] positive (zeros are taken for a W that a point does not have)."""

    values: Tensor

    num_latents = 1
    root_size = 1

    @property
    def num_points(self) -> int:
        """Points: n."""
        return len(self.values)

    def matmul(self, columns: Tensor) -> Tensor:
        return self.values.unsqueeze(-1) * columns

    def pinv(self, columns: Tensor) -> Tensor:
        inverse = torch.where(self.values > 0, 1 / self.values, torch.zeros_like(self.values))
        return inverse.unsqueeze(-1) * columns

    def root(self, columns: Tensor) -> Tensor:
        return self.values.sqrt().unsqueeze(-1) * columns

    root_t = root

    def project(self, columns: Tensor) -> Tensor:
        return columns * (self.values > 0).unsqueeze(-1)

    def blocks(self) -> Tensor:
        return self.values.view(-1, 1, 1)

    def at(self, points: Tensor) -> "DiagonalCurvature":
        return DiagonalCurvature(self.values[points])


@dataclass(frozen=True)
class BlockCurvature(Curvature):
    """Blocks U diag(lambda) U^T by their eigenvalues.

    Attributes:
        eigenvalues: [n, r], not negative.
        eigenvectors: [n, C, r], orthonormal columns: the range of each block.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor

    @property
    def num_points(self) -> int:
        """Points: n."""
        return self.eigenvectors.shape[0]

    @property
    def num_latents(self) -> int:
        """Latent functions: C."""
        return self.eigenvectors.shape[1]

    @property
    def root_size(self) -> int:
        """Columns of the root a point: r."""
        return self.eigenvectors.shape[2]

    def matmul(self, columns: Tensor) -> Tensor:
        return self._scaled(columns, self.eigenvalues)

    def pinv(self, columns: Tensor) -> Tensor:
        values = self.eigenvalues
        return self._scaled(columns, torch.where(values > 0, 1 / values, torch.zeros_like(values)))

    def root(self, columns: Tensor) -> Tensor:
        whitened = columns.reshape(self.num_points, self.root_size, -1) * self.eigenvalues.sqrt().unsqueeze(-1)
        return (self.eigenvectors @ whitened).flatten(0, 1)

    def root_t(self, columns: Tensor) -> Tensor:
        coordinates = self._coordinates(columns) * self.eigenvalues.sqrt().unsqueeze(-1)
        return coordinates.flatten(0, 1)

    def project(self, columns: Tensor) -> Tensor:
        return self._scaled(columns, (self.eigenvalues > 0).to(self.eigenvalues))

    def blocks(self) -> Tensor:
        return (self.eigenvectors * self.eigenvalues.unsqueeze(-2)) @ self.eigenvectors.mT

    def at(self, points: Tensor) -> "BlockCurvature":
        return BlockCurvature(self.eigenvalues[points], self.eigenvectors[points])

    def _coordinates(self, columns: Tensor) -> Tensor:
        return self.eigenvectors.mT @ columns.reshape(self.num_points, self.num_latents, -1)

    def _scaled(self, columns: Tensor, factors: Tensor) -> Tensor:
        return (self.eigenvectors @ (self._coordinates(columns) * factors.unsqueeze(-1))).flatten(0, 1)


@dataclass(frozen=True)
class SoftmaxCurvature(Curvature):
    """W_n = diag(p) - p p^T, in closed form: O(n C) a product.

    Attributes:
        probabilities: p [n, C], positive, rows of sum 1.

    R_n = diag(sqrt p) - p sqrt(p)^T; W_n^+ = J diag(1/p) J with J = I - 1 1^T / C.
    """

    probabilities: Tensor

    @property
    def num_points(self) -> int:
        """Points: n."""
        return self.probabilities.shape[0]

    @property
    def num_latents(self) -> int:
        """Latent functions: C."""
        return self.probabilities.shape[1]

    @property
    def root_size(self) -> int:
        """Columns of the root a point: r."""
        return self.num_latents

    def matmul(self, columns: Tensor) -> Tensor:
        p, x = self.probabilities.unsqueeze(-1), self._by_point(columns)
        return (p * (x - (p * x).sum(1, keepdim=True))).flatten(0, 1)

    def pinv(self, columns: Tensor) -> Tensor:
        x = self._by_point(columns)
        x = (x - x.mean(1, keepdim=True)) / self.probabilities.unsqueeze(-1)
        return (x - x.mean(1, keepdim=True)).flatten(0, 1)

    def root(self, columns: Tensor) -> Tensor:
        p, x = self.probabilities.unsqueeze(-1), self._by_point(columns)
        weighted = p.sqrt() * x
        return (weighted - p * weighted.sum(1, keepdim=True)).flatten(0, 1)

    def root_t(self, columns: Tensor) -> Tensor:
        p, x = self.probabilities.unsqueeze(-1), self._by_point(columns)
        return (p.sqrt() * (x - (p * x).sum(1, keepdim=True))).flatten(0, 1)

    def project(self, columns: Tensor) -> Tensor:
        x = self._by_point(columns)
        return (x - x.mean(1, keepdim=True)).flatten(0, 1)

    def blocks(self) -> Tensor:
        p = self.probabilities
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)

    def at(self, points: Tensor) -> "SoftmaxCurvature":
        return SoftmaxCurvature(self.probabilities[points])

    def _by_point(self, columns: Tensor) -> Tensor:
        return columns.reshape(*self.probabilities.shape, -1)


def curvature_of_blocks(blocks: Tensor, *, floor: float, basis: Tensor | None = None) -> Curvature:
    """The curvature with these blocks, every eigenvalue raised to `floor` times the largest of all.

    Args:
        blocks: [n, C, C], symmetric.
        floor: relative; 0 keeps eigenvalues as they are, but for negative ones of rounding size.
        basis: [C, r], orthonormal: the range of all blocks. The rest stays without curvature.
    """
    if blocks.shape[-1] == 1 and basis is None:
        values = blocks[:, 0, 0]
        return DiagonalCurvature(values.clamp_min(floor * values.max().clamp_min(0)))
    reduced = blocks if basis is None else basis.mT @ blocks @ basis
    values, vectors = torch.linalg.eigh((reduced + reduced.mT) / 2)
    values = values.clamp_min(floor * values.max().clamp_min(0))
    return BlockCurvature(values, vectors if basis is None else basis @ vectors)

"""The curvature W of a likelihood, n blocks C x C, perhaps singular, with pseudo-inverse W^+."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

#: Matrices per factorisation: cuSOLVER refuses very large batches.
CHUNK_POINTS = 4096


class Curvature(ABC):
    """W = R R^T [n C, n C], positive semi-definite, block diagonal, with R [n C, n r].

    Methods take x [n C, b], `root` x [n r, b]; the latents of a point are adjacent.
    """

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """Columns of R, n r."""

    def matmul(self, columns: Tensor) -> Tensor:
        """W x."""
        return self.root(self.root_t(columns))

    @abstractmethod
    def pinv(self, columns: Tensor) -> Tensor:
        """W^+ x."""

    @abstractmethod
    def root(self, columns: Tensor) -> Tensor:
        """R x."""

    @abstractmethod
    def root_t(self, columns: Tensor) -> Tensor:
        """R^T x."""

    @abstractmethod
    def project(self, columns: Tensor) -> Tensor:
        """W W^+ x."""

    @abstractmethod
    def blocks(self) -> Tensor:
        """W as [n, C, C]."""


@dataclass(frozen=True)
class BlockCurvature(Curvature):
    """Blocks U diag(lambda) U^T: eigenvalues [n, r] >= 0, eigenvectors [n, C, r]; None is U = I."""

    eigenvalues: Tensor
    eigenvectors: Tensor | None = None

    @property
    def num_columns(self) -> int:
        return self.eigenvalues.numel()

    def pinv(self, columns: Tensor) -> Tensor:
        inverse = torch.where(self.eigenvalues > 0, 1 / self.eigenvalues, 0.0)
        return self._rotated(self._coordinates(columns) * inverse.unsqueeze(-1))

    def root(self, columns: Tensor) -> Tensor:
        return self._rotated(columns.reshape(*self.eigenvalues.shape, -1) * self.eigenvalues.sqrt().unsqueeze(-1))

    def root_t(self, columns: Tensor) -> Tensor:
        return (self._coordinates(columns) * self.eigenvalues.sqrt().unsqueeze(-1)).flatten(0, 1)

    def project(self, columns: Tensor) -> Tensor:
        return self._rotated(self._coordinates(columns) * (self.eigenvalues > 0).unsqueeze(-1))

    def blocks(self) -> Tensor:
        if self.eigenvectors is None:
            return torch.diag_embed(self.eigenvalues)
        return (self.eigenvectors * self.eigenvalues.unsqueeze(-2)) @ self.eigenvectors.mT

    def _coordinates(self, columns: Tensor) -> Tensor:
        by_point = columns.unflatten(0, (len(self.eigenvalues), -1))
        return by_point if self.eigenvectors is None else self.eigenvectors.mT @ by_point

    def _rotated(self, coordinates: Tensor) -> Tensor:
        return (coordinates if self.eigenvectors is None else self.eigenvectors @ coordinates).flatten(0, 1)


@dataclass(frozen=True)
class SoftmaxCurvature(Curvature):
    """W_n = diag(p) - p p^T for positive p [n, C].

    R_n = diag(sqrt p) - p sqrt(p)^T; W_n^+ = J diag(1/p) J with J = I - 1 1^T / C.
    """

    probabilities: Tensor

    @property
    def num_columns(self) -> int:
        return self.probabilities.numel()

    def pinv(self, columns: Tensor) -> Tensor:
        centred = self._by_point(self.project(columns)) / self.probabilities.unsqueeze(-1)
        return self.project(centred.flatten(0, 1))

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

    def _by_point(self, columns: Tensor) -> Tensor:
        return columns.reshape(*self.probabilities.shape, -1)


def curvature_of_blocks(
    blocks: Tensor, *, floor: float, most: float = math.inf, basis: Tensor | None = None
) -> Curvature:
    """Blocks [n, C, C] in the span of a `basis` [C, r], with eigenvalues >= `floor` times the largest, or >= `most`."""
    if blocks.shape[-1] == 1 and basis is None:
        return BlockCurvature(_floored(blocks[:, 0], floor, most))
    reduced = blocks if basis is None else basis.mT @ blocks @ basis
    values, vectors = block_eigh(reduced)
    return BlockCurvature(_floored(values, floor, most), vectors if basis is None else basis @ vectors)


def block_eigh(blocks: Tensor) -> tuple[Tensor, Tensor]:
    parts = [torch.linalg.eigh((part + part.mT) / 2) for part in blocks.split(CHUNK_POINTS)]
    values, vectors = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(vectors)


def _floored(values: Tensor, floor: float, most: float) -> Tensor:
    return values.clamp_min((floor * values.max()).clamp(0, most))

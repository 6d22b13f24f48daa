"""Sparse inverse Cholesky factor."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gpy_iterative.preconditioners.preconditioner import SampledPreconditioner
from gpy_iterative.worker_threads import run, shares

#: Indices up to this have 32 bits.
LARGEST = 2**31 - 1


class SparseInverseCholesky(SampledPreconditioner):
    """S = (B^T B)^-1 with a sparse B, lower triangular in the order of elimination.

    A solve costs 2 n (m + 1) s multiply-adds. Memory: B and its transpose.

    Args:
        order: [n], the system's rows in the order of elimination.
        neighbours: [n, m], columns of B's off-diagonal entries; unused: 0, with weight 0.
        weights: [n, m], these entries.
        diagonal: [n], diagonal of B, positive.
    """

    def __init__(self, order: Tensor, neighbours: Tensor, weights: Tensor, diagonal: Tensor) -> None:
        size, width = neighbours.shape
        self.order, self.weights, self.diagonal, self.num_signs = order, weights, diagonal, size
        self.build_epochs = (width + 1) ** 2 / size
        kind = torch.int32 if neighbours.numel() <= LARGEST else torch.int64
        self.neighbours = neighbours.to(kind)
        self._rank = torch.empty_like(order)
        self._rank[order] = torch.arange(size, device=order.device)
        self._starts = torch.arange(size + 1, device=order.device, dtype=kind) * width
        columns, place = neighbours.flatten().sort(stable=True)
        self._transposed_rows = (place // width).to(kind)
        self._transposed_weights = weights.flatten()[place]
        counted = torch.bincount(columns, minlength=size).cumsum(0)
        self._transposed_starts = torch.cat([counted.new_zeros(1), counted]).to(kind)

    def __getitem__(self, index: int | tuple[int, ...]) -> Self:
        if index != ():
            raise IndexError("A sparse inverse Cholesky factor is of one system, not of a batch.")
        return self

    def solve(self, rhs: Tensor) -> Tensor:
        """B^T B rhs for [n, s]."""
        return self.transposed(self.whiten(rhs))

    def whiten(self, rhs: Tensor) -> Tensor:
        """B rhs for [n, s], in the order of elimination."""
        vectors = rhs[self.order]
        beside = _weighted_sums(self.neighbours.flatten(), self._starts, self.weights.flatten(), vectors)
        return beside.addcmul_(self.diagonal.unsqueeze(-1), vectors)

    def logdet(self) -> Tensor:
        return (-2 * self.diagonal.double().log().sum(-1)).to(self.diagonal.dtype)

    def sample(self, base: Tensor) -> tuple[Tensor, Tensor]:
        """See `SampledPreconditioner.sample`: B^-1 e and B^T e for white e [n, s]."""
        return self.unwhiten(base), self.transposed(base)

    def unwhiten(self, base: Tensor) -> Tensor:
        """B^-1 base for [n, s] in the order of elimination."""
        result = torch.zeros_like(base)
        for rows in self._levels:
            known = embedding_bag(self.neighbours[rows], result, per_sample_weights=self.weights[rows], mode="sum")
            result[rows] = (base[rows] - known).div_(self.diagonal[rows].unsqueeze(-1))
        return result[self._rank]

    def transposed(self, base: Tensor) -> Tensor:
        """B^T base for [n, s] in the order of elimination."""
        beside = _weighted_sums(self._transposed_rows, self._transposed_starts, self._transposed_weights, base)
        return beside.addcmul_(self.diagonal.unsqueeze(-1), base)[self._rank]

    @cached_property
    def _levels(self) -> tuple[Tensor, ...]:
        """Rows by level, with neighbours in lower levels."""
        neighbours, level = self.neighbours.cpu().numpy(), np.zeros(len(self.order), dtype=np.int32)
        for start, stop in _independent_ranges(neighbours.max(-1)):
            level[start:stop] = level[neighbours[start:stop]].max(-1) + 1
        rows = torch.from_numpy(level.argsort(kind="stable")).to(self.order.device)
        return rows.split(np.bincount(level)[1:].tolist())


def _independent_ranges(last: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are not each other's neighbours."""
    start, size = 0, len(last)
    while start < size:
        stop, length = start + 1, 64
        while stop < size:
            depends = last[stop : stop + length] >= start
            if depends.any():
                stop += int(depends.argmax())
                break
            stop, length = min(stop + length, size), 2 * length
        yield start, stop
        start = stop


def _weighted_sums(index: Tensor, starts: Tensor, weights: Tensor, vectors: Tensor) -> Tensor:
    """Row i is the sum of weights_e vectors[index_e] for starts_i <= e < starts_{i+1}."""
    vectors, rows = vectors.contiguous(), range(len(starts) - 1)
    if vectors.device.type != "cpu":  # reading starts would wait for it
        return _bags(index, starts, weights, vectors)

    def part(share: Sequence[int]) -> Tensor:
        first, offsets = int(starts[share[0]]), starts[share[0] : share[-1] + 2]
        entries = slice(first, int(offsets[-1]))
        return _bags(index[entries], offsets - first, weights[entries], vectors)

    return torch.cat(run([partial(part, share) for share in shares(rows)]))


def _bags(index: Tensor, starts: Tensor, weights: Tensor, vectors: Tensor) -> Tensor:
    return embedding_bag(index, vectors, starts, per_sample_weights=weights, mode="sum", include_last_offset=True)

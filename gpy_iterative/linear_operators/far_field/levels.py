"""A kernel matrix as a sum over the levels of a tree, K ~ sum_l E_l^T K_l E_l, and its products.

E_0 maps a vector to the leaves, K_0 are the near blocks; E_(l+1) = U_l^T E_l maps it to skeletons, K_(l+1) are the
blocks of far pairs. Vectors are [nodes, s, points of a node], which products read contiguously.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.entries import Inputs, ScaledInputs
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.worker_threads import ByDevice, run, summed

#: Entries multiplied at a time: they stay in a CPU's cache.
BATCH_ENTRIES = ByDevice(cpu=2**18, accelerator=2**25)
BATCH_NODES = ByDevice(cpu=512, accelerator=2**16)
#: Columns multiplied at a time; they bound the memory of sums.
MOST_COLUMNS = 64


@dataclass(frozen=True)
class PairBlocks:
    """Blocks of pairs of nodes i <= j.

    Attributes:
        points: the nodes' row numbers, [nodes, size].
        inputs: of these points.
        pairs: [2, p], all with i = j or all with i < j.
        step: l of K_l.
    """

    points: Tensor
    inputs: Inputs
    pairs: Tensor
    is_diagonal: bool
    step: int

    def batches(self) -> list[slice]:
        entries = BATCH_ENTRIES.on(self.points.device)
        return blocks(self.pairs.shape[1], max(entries // self.points.shape[1] ** 2, 1))


@dataclass(frozen=True)
class Batch:
    """Blocks [b, size, size] that are evaluated together."""

    part: PairBlocks
    pairs: slice
    key: tuple[int, int]

    @property
    def left(self) -> Tensor:
        return self.part.pairs[0, self.pairs]

    @property
    def right(self) -> Tensor:
        return self.part.pairs[1, self.pairs]

    def inputs(self, number: int) -> tuple[ScaledInputs, ScaledInputs]:
        """A factor's inputs of both sides."""
        factor = self.part.inputs[number]
        return factor.of(self.left), factor.of(self.right)

    @property
    def shape(self) -> torch.Size:
        size = self.part.points.shape[1]
        return torch.Size((self.pairs.stop - self.pairs.start, size, size))


@dataclass(frozen=True)
class Levels:
    """The sum over the levels.

    Attributes:
        rows: row numbers of the leaves, [leaves, leaf].
        is_own: which slots of the leaves do not repeat a row.
        interpolations: U_l^T, [nodes, rank, points of a node].
        parts: blocks of K_l.
    """

    rows: Tensor
    is_own: Tensor
    interpolations: list[Tensor]
    parts: list[PairBlocks]

    @cached_property
    def batches(self) -> list[Batch]:
        """Batches of all parts, with keys that no tile has."""
        numbered = enumerate(self.parts)
        return [Batch(part, pairs, (-1 - i, j)) for i, part in numbered for j, pairs in enumerate(part.batches())]

    def matmul(self, rhs: Tensor, values: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> Tensor:
        """Some batches times rhs [n, s]; `values` evaluates one, valid until the thread's next call."""
        parts = []
        for columns in rhs.split(MOST_COLUMNS, dim=1):
            share = partial(self._share, self.up(columns), values)
            parts.append(self.down(summed(share, batches, self.rows.device)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _share(self, given: list[Tensor], values: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> list[Tensor]:
        sums = [torch.zeros_like(vectors) for vectors in given]
        for batch in batches:
            vectors, total, left, right = given[batch.part.step], sums[batch.part.step], batch.left, batch.right
            block = values(batch)
            total.index_add_(0, left, torch.bmm(vectors.index_select(0, right), block.mT))
            if not batch.part.is_diagonal:
                total.index_add_(0, right, torch.bmm(vectors.index_select(0, left), block))
        return sums

    def up(self, rhs: Tensor) -> list[Tensor]:
        """E_l rhs [nodes, s, points] for every l and rhs [n, s]."""
        vectors = rhs.new_empty(len(self.rows), rhs.shape[1], self.rows.shape[1])

        def gather(leaves: slice) -> None:
            rows = self.rows[leaves]
            taken = rhs.index_select(0, rows.flatten()).view(*rows.shape, -1)
            vectors[leaves] = taken.mul_(self.is_own[leaves].unsqueeze(-1)).mT

        self._in_blocks(gather, len(vectors))
        found = [vectors]
        for weights in self.interpolations:
            found.append(self._product(vectors, weights.mT))
            vectors = found[-1].unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) if len(found[-1]) > 1 else found[-1]
        return found

    def down(self, sums: list[Tensor]) -> Tensor:
        """sum_l E_l^T sums_l [n, s]; overwrites `sums`."""
        for step in range(len(self.interpolations), 1, -1):
            pulled = self._product(sums[step], self.interpolations[step - 1])
            sums[step - 1] += pulled.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
        total, size = sums[0], self.rows.shape[1]
        by_row = total.view(len(total), size, -1)

        def finish(leaves: slice) -> None:
            if self.interpolations:
                total[leaves].baddbmm_(sums[1][leaves], self.interpolations[0][leaves])
            by_row[leaves] = total[leaves].mT.clone(memory_format=torch.contiguous_format)

        self._in_blocks(finish, len(total))
        return by_row.flatten(0, 1).index_select(0, self.position)

    def _product(self, vectors: Tensor, matrices: Tensor) -> Tensor:
        result = vectors.new_empty(*vectors.shape[:2], matrices.shape[2])
        self._in_blocks(lambda nodes: torch.bmm(vectors[nodes], matrices[nodes], out=result[nodes]), len(vectors))
        return result

    def _in_blocks(self, compute: Callable[[slice], object], nodes: int) -> None:
        """Computes for some nodes at a time: their memory is used again, where that of all would be new pages."""
        device = self.rows.device
        run([partial(compute, block) for block in blocks(nodes, BATCH_NODES.on(device))], device)

    @cached_property
    def position(self) -> Tensor:
        """Each row's slot in the leaves, [n]."""
        own = self.is_own.flatten().nonzero().squeeze(-1)
        return torch.empty_like(own).scatter_(0, self.rows.flatten()[own], own)

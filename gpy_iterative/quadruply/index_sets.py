"""Random sets of rows and of groups of features, drawn in time and memory that know nothing of how many there are."""

from typing import Literal

import torch
from torch import Tensor

#: Sets beyond this part of all are taken from a permutation.
LARGE_PART = 0.25

IndexSets = Literal["ring", "uniform"]


def ring_block(total: int, size: int, generator: torch.Generator) -> Tensor:
    """Neighbours on the ring of 0, ..., total - 1 from a uniform start: each is in it with probability size / total."""
    start = torch.randint(total, (), generator=generator, device=generator.device)
    return (start + torch.arange(size, device=generator.device)) % total


def uniform_subset(total: int, size: int, generator: torch.Generator) -> Tensor:
    """A uniform draw of distinct numbers below total, [size].

    The first distinct numbers of a stream of independent ones: O(size log size) where size is a small part of total.
    """
    if size > LARGE_PART * total:
        return torch.randperm(total, generator=generator, device=generator.device)[:size]
    found = torch.empty(0, dtype=torch.int64, device=generator.device)
    while len(found) < size:
        more = torch.randint(total, (2 * size,), generator=generator, device=generator.device)
        found = _distinct(torch.cat([found, more]))
    return found[:size]


def draw_set(kind: IndexSets, total: int, size: int, generator: torch.Generator) -> Tensor:
    """A set of `size` of `total`, by kind; all of them, in order, where size is total."""
    if size == total:
        return torch.arange(total, device=generator.device)
    return (ring_block if kind == "ring" else uniform_subset)(total, size, generator)


def _distinct(stream: Tensor) -> Tensor:
    """The stream's distinct numbers in the order of their first appearance."""
    order = torch.argsort(stream, stable=True)
    ordered = stream[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return stream[order[first].sort().values]

"""A balanced tree over data: medians split every node along its widest side."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Boxes:
    """Bounding boxes of nodes: corners `low` and `high`, [nodes, d]."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, points: Tensor) -> "Boxes":
        """Boxes of points [nodes, size, d]."""
        return cls(points.amin(1), points.amax(1))

    def diameters(self) -> Tensor:
        """Lengths of the diagonals, [nodes]."""
        return (self.high - self.low).norm(dim=-1)

    def gaps(self, left: Tensor, right: Tensor) -> Tensor:
        """Distances between boxes, for pairs of node numbers [p]; 0 where they touch."""
        first, last = torch.maximum(self.low[left], self.low[right]), torch.minimum(self.high[left], self.high[right])
        return (first - last).clamp_min_(0).norm(dim=-1)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one level. Node i has the children 2 i and 2 i + 1.

    Attributes:
        rows: row numbers, [nodes, size]; a smaller node repeats its first row in the last slot.
        counts: rows of each node, [nodes]: size or size - 1.
        boxes: bounding boxes.
    """

    rows: Tensor
    counts: Tensor
    boxes: Boxes

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        """Slots of a node."""
        return self.rows.shape[1]

    def is_own(self) -> Tensor:
        """Which slots do not repeat a row, [nodes, size]."""
        return torch.arange(self.size, device=self.rows.device) < self.counts.unsqueeze(-1)


def balanced_tree(x: Tensor, depth: int) -> Iterator[Nodes]:
    """The levels of a tree over points x [n, d], the root first, up to level `depth`; level l has 2^l nodes.

    Each is made on demand. Cost: one sort of n numbers; memory: n row numbers.

    Raises:
        ValueError: fewer points than leaves.
    """
    if len(x) < 2**depth:
        raise ValueError(f"A tree of depth {depth} has {2**depth} leaves, and there are {len(x)} points.")
    rows, points = torch.arange(len(x), device=x.device).unsqueeze(0), x.unsqueeze(0)
    nodes = Nodes(rows, torch.tensor([len(x)], device=x.device), Boxes.around(points))
    yield nodes
    for _ in range(depth):
        nodes, points = _halved(nodes, points)
        yield nodes


def _halved(nodes: Nodes, points: Tensor) -> tuple[Nodes, Tensor]:
    """Both halves of every node, the first with the middle row, and their points."""
    first = (nodes.counts + 1) // 2
    counts = torch.stack([first, nodes.counts - first], dim=1)
    starts = torch.stack([torch.zeros_like(first), first], dim=1).unsqueeze(-1)
    slots = torch.arange((nodes.size + 1) // 2, device=points.device)
    position = starts + torch.where(slots < counts.unsqueeze(-1), slots, 0)
    order = _order_along_widest_side(nodes, points).gather(1, position.flatten(1))
    # Sorted points, so that a node's are contiguous.
    halves = [part.gather(1, order).view(2 * len(nodes), -1) for part in (nodes.rows, *points.unbind(-1))]
    points = torch.stack(halves[1:], dim=-1)
    return Nodes(halves[0], counts.flatten(), Boxes.around(points)), points


def _order_along_widest_side(nodes: Nodes, points: Tensor) -> Tensor:
    """Slots [nodes, size], sorted along the widest side; repeated rows come last."""
    widest = (nodes.boxes.high - nodes.boxes.low).argmax(-1)
    along = points.gather(2, widest.view(-1, 1, 1).expand(-1, nodes.size, 1)).squeeze(2)
    return along.masked_fill_(~nodes.is_own(), torch.inf).argsort(dim=1, stable=True)

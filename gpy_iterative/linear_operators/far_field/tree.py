"""A balanced tree over the rows of a data set: medians cut every node in two along its widest side."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Boxes:
    """The smallest boxes around the points of some nodes: corners `low` and `high`, [nodes, d]."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, points: Tensor) -> "Boxes":
        """Around points [nodes, size, d]."""
        return cls(points.amin(1), points.amax(1))

    def diameters(self) -> Tensor:
        """The diagonals' lengths, [nodes]."""
        return (self.high - self.low).norm(dim=-1)

    def gaps(self, left: Tensor, right: Tensor) -> Tensor:
        """The distance between two boxes, for pairs of node numbers [p]; 0 where they touch."""
        first, last = torch.maximum(self.low[left], self.low[right]), torch.minimum(self.high[left], self.high[right])
        return (first - last).clamp_min_(0).norm(dim=-1)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one level of a tree. Node i has the children 2 i and 2 i + 1 on the next level.

    Attributes:
        rows: the rows of the data in each node, [nodes, size]. Nodes have equal sizes: one that has a row less repeats its
            first row in the last slot.
        counts: how many slots of each node are its own, [nodes]: size or size - 1.
        boxes: the boxes around the nodes.
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
        """Which slots are the node's own rows, [nodes, size]: every row of the data once."""
        return torch.arange(self.size, device=self.rows.device) < self.counts.unsqueeze(-1)


def balanced_tree(x: Tensor, depth: int) -> Iterator[Nodes]:
    """The levels of a tree over the points x [n, d], the root first: 2^level nodes each, the last at level `depth`.

    Each level is made when it is asked for. Cost: one sort of n numbers for each. Memory: n row numbers for each.

    Raises:
        ValueError: fewer points than the last level has nodes.
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
    """Both halves of every node, the first of which has the middle row where their number is odd; and their points."""
    first = (nodes.counts + 1) // 2
    counts = torch.stack([first, nodes.counts - first], dim=1)
    starts = torch.stack([torch.zeros_like(first), first], dim=1).unsqueeze(-1)
    slots = torch.arange((nodes.size + 1) // 2, device=points.device)
    position = starts + torch.where(slots < counts.unsqueeze(-1), slots, 0)
    order = _order_along_widest_side(nodes, points).gather(1, position.flatten(1))
    # The points move along, so that those of a node lie together in memory.
    halves = [part.gather(1, order).view(2 * len(nodes), -1) for part in (nodes.rows, *points.unbind(-1))]
    points = torch.stack(halves[1:], dim=-1)
    return Nodes(halves[0], counts.flatten(), Boxes.around(points)), points


def _order_along_widest_side(nodes: Nodes, points: Tensor) -> Tensor:
    """The slots of each node, [nodes, size], sorted by the coordinate of its widest side; repeated rows come last."""
    widest = (nodes.boxes.high - nodes.boxes.low).argmax(-1)
    along = points.gather(2, widest.view(-1, 1, 1).expand(-1, nodes.size, 1)).squeeze(2)
    return along.masked_fill_(~nodes.is_own(), torch.inf).argsort(dim=1, stable=True)

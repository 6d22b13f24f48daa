"""A balanced tree over data, with near and far pairs of nodes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Smallest gap between far nodes, in larger diameters.
SEPARATION = 0.7
#: A tree is not refined with more near pairs per row.
MAX_NEAR_PAIRS = 1.0
#: Nor with so large a part of all pairs near, between so many nodes: there are too many dimensions.
MOST_NEAR, MANY_NODES = 0.95, 128


@dataclass(frozen=True)
class Nodes:
    """The nodes of one level. Node i has the children 2 i and 2 i + 1.

    Attributes:
        rows: row numbers, [nodes, size]; a node with one row less repeats its first row in the last slot.
        counts: rows of each node, [nodes].
        low, high: corners of bounding boxes, [nodes, d].
    """

    rows: Tensor
    counts: Tensor
    low: Tensor
    high: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        return self.rows.shape[1]

    def is_own(self) -> Tensor:
        return torch.arange(self.size, device=self.rows.device) < self.counts.unsqueeze(-1)

    def diameters(self) -> Tensor:
        return (self.high - self.low).norm(dim=-1)

    def gaps(self, left: Tensor, right: Tensor) -> Tensor:
        return box_gaps(self.low[left], self.high[left], self.low[right], self.high[right])


def box_gaps(low: Tensor, high: Tensor, other_low: Tensor, other_high: Tensor) -> Tensor:
    """Distances between boxes with corners [..., d]; 0 if they touch."""
    return (torch.maximum(low, other_low) - torch.minimum(high, other_high)).clamp_min_(0).norm(dim=-1)


def balanced_tree(x: Tensor, depth: int) -> Iterator[Nodes]:
    """The levels of a tree over n >= 2^depth points x [n, d], from the root, split at medians of widest sides."""
    rows, points = torch.arange(len(x), device=x.device).unsqueeze(0), x.unsqueeze(0)
    nodes = Nodes(rows, torch.tensor([len(x)], device=x.device), points.amin(1), points.amax(1))
    yield nodes
    for _ in range(depth):
        nodes, points = _halved(nodes, points)
        yield nodes


def _halved(nodes: Nodes, points: Tensor) -> tuple[Nodes, Tensor]:
    first = (nodes.counts + 1) // 2
    counts = torch.stack([first, nodes.counts - first], dim=1)
    starts = torch.stack([torch.zeros_like(first), first], dim=1).unsqueeze(-1)
    slots = torch.arange((nodes.size + 1) // 2, device=points.device)
    position = starts + torch.where(slots < counts.unsqueeze(-1), slots, 0)
    order = _order_along_widest_side(nodes, points).gather(1, position.flatten(1))
    halves = [part.gather(1, order).view(2 * len(nodes), -1) for part in (nodes.rows, *points.unbind(-1))]
    points = torch.stack(halves[1:], dim=-1)
    return Nodes(halves[0], counts.flatten(), points.amin(1), points.amax(1)), points


def _order_along_widest_side(nodes: Nodes, points: Tensor) -> Tensor:
    """Slots [nodes, size]; repeated rows come last."""
    widest = (nodes.high - nodes.low).argmax(-1)
    along = points.gather(2, widest.view(-1, 1, 1).expand(-1, nodes.size, 1)).squeeze(2)
    return along.masked_fill_(~nodes.is_own(), torch.inf).argsort(dim=1, stable=True)


@dataclass(frozen=True)
class LevelPairs:
    """Pairs of node numbers i <= j of one level, [2, p], in order.

    Attributes:
        near: split on the next level.
        far: their parents are near.
        gaps: distances between boxes of far pairs.
    """

    near: Tensor
    far: Tensor
    gaps: Tensor


def level_pairs(
    tree: Iterable[Nodes], is_negligible: Callable[[Tensor], Tensor]
) -> tuple[list[Nodes], list[LevelPairs]]:
    """The levels of a tree and their pairs, from the root; they end where near pairs are too many, or nearly all.

    Every pair of rows is in one far pair, in one near pair of the last level, or has an entry that counts as zero.
    """
    levels: list[Nodes] = []
    found: list[LevelPairs] = []
    for nodes in tree:
        pairs = _of_children(found[-1].near, len(nodes)) if found else nodes.rows.new_zeros(2, 1)
        levels.append(nodes)
        found.append(_divided(nodes, pairs, is_negligible))
        num_near, num_nodes = found[-1].near.shape[1], len(nodes)
        are_nearly_all = num_nodes >= MANY_NODES and num_near > MOST_NEAR * num_nodes * (num_nodes + 1) / 2
        if are_nearly_all or num_near > MAX_NEAR_PAIRS * levels[0].size:
            break
    return levels, found


def _divided(nodes: Nodes, pairs: Tensor, is_negligible: Callable[[Tensor], Tensor]) -> LevelPairs:
    left, right = pairs
    gaps, diameters = nodes.gaps(left, right), nodes.diameters()
    # Equal points have diameter and gap 0, and are near.
    is_far = (gaps >= SEPARATION * torch.maximum(diameters[left], diameters[right])) & (gaps > 0)
    is_seen = ~is_negligible(gaps)
    far = is_far & is_seen
    return LevelPairs(pairs[:, ~is_far & is_seen], pairs[:, far], gaps[far])


def _of_children(pairs: Tensor, num_children: int) -> Tensor:
    left, right = 2 * pairs
    children = torch.cat([torch.stack([left + a, right + b]) for a in (0, 1) for b in (0, 1)], dim=1)
    children = children[:, children[0] <= children[1]]
    return children[:, (children[0] * num_children + children[1]).argsort()]

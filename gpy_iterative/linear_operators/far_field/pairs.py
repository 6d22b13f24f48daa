"""Near and far pairs of nodes of a tree, found from the root downwards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.tree import Nodes

#: Two nodes are far from one another where the gap between their boxes is so many times the larger diameter.
SEPARATION = 0.7
#: Near pairs of a level, for each row of the data, up to which a tree is refined. Trees of least cost have fewer, in up to
#: four dimensions; in many dimensions nearly all pairs are near, and would take memory for nothing.
MAX_NEAR_PAIRS = 1.0
#: On a level of so many nodes some pairs are far in up to four dimensions. Where more than this part is near, there are too
#: many dimensions.
COARSE_NODES, MOST_NEAR = 64, 0.95


@dataclass(frozen=True)
class LevelPairs:
    """Pairs of node numbers i <= j of one level, [2, p], sorted by i and then by j.

    Attributes:
        near: too close to one another. The next level has the pairs of their children.
        far: far from one another, and in no far pair of a level above.
        gaps: the distances between the boxes of far pairs.
    """

    near: Tensor
    far: Tensor
    gaps: Tensor


def level_pairs(
    tree: Iterable[Nodes], is_negligible: Callable[[Tensor], Tensor], separation: float = SEPARATION
) -> tuple[list[Nodes], list[LevelPairs]]:
    """The levels of a tree and the pairs of each, from the root on. They end early where nearly all pairs are near.

    Every pair of rows is in one far pair of some level, or in one near pair of the last; or its entry is negligible.

    Args:
        tree: its levels, the root first.
        is_negligible: of gaps [p], whether the kernel is so small at this distance, and beyond, that it may count as zero.
        separation: gap of far nodes in diameters of the larger one.
    """
    levels: list[Nodes] = []
    found: list[LevelPairs] = []
    for nodes in tree:
        pairs = (
            _of_children(found[-1].near, len(nodes)) if found else torch.zeros(2, 1, dtype=torch.int64).to(nodes.rows)
        )
        levels.append(nodes)
        found.append(_divided(nodes, pairs, is_negligible, separation))
        if _are_too_many(found[-1].near.shape[1], len(nodes), levels[0].size):
            break
    return levels, found


def _are_too_many(near: int, nodes: int, rows: int) -> bool:
    """Whether near pairs of a level with so many nodes, of data with so many rows, are not worth refining."""
    return near > MAX_NEAR_PAIRS * rows or (nodes == COARSE_NODES and near > MOST_NEAR * nodes * (nodes + 1) / 2)


def _divided(nodes: Nodes, pairs: Tensor, is_negligible: Callable[[Tensor], Tensor], separation: float) -> LevelPairs:
    left, right = pairs
    gaps, diameters = nodes.boxes.gaps(left, right), nodes.boxes.diameters()
    # Boxes of equal points have no diameter: a gap of 0 is near all the same.
    is_far = (gaps >= separation * torch.maximum(diameters[left], diameters[right])) & (gaps > 0)
    is_seen = ~is_negligible(gaps)
    far = is_far & is_seen
    return LevelPairs(pairs[:, ~is_far & is_seen], pairs[:, far], gaps[far])


def _of_children(pairs: Tensor, num_children: int) -> Tensor:
    """The pairs i <= j of children, for pairs of parents."""
    left, right = 2 * pairs
    children = torch.cat([torch.stack([left + a, right + b]) for a in (0, 1) for b in (0, 1)], dim=1)
    children = children[:, children[0] <= children[1]]
    return children[:, (children[0] * num_children + children[1]).argsort()]

"""Near and far pairs of nodes of a tree, from the root down."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.tree import Nodes, balanced_tree

#: Nodes are far apart from this gap on, in larger diameters.
SEPARATION = 0.7
#: Most near pairs per row for which a tree is refined. Cheapest trees have fewer, in up to four dimensions; in many
#: dimensions nearly all pairs are near.
MAX_NEAR_PAIRS = 1.0
#: Sampled rows, tree depth, and the part of near leaf pairs that means too many dimensions: below .7 with three, 1 with
#: ten.
SAMPLE_SIZE, SAMPLE_DEPTH, MOST_NEAR = 2048, 7, 0.95


@dataclass(frozen=True)
class LevelPairs:
    """Pairs of node numbers i <= j of one level, [2, p], sorted by i and then by j.

    Attributes:
        near: close pairs, split on the next level.
        far: far pairs whose parents are near.
        gaps: distances between boxes of far pairs.
    """

    near: Tensor
    far: Tensor
    gaps: Tensor


def are_nearly_all_near(x: Tensor, is_negligible: Callable[[Tensor], Tensor]) -> bool:
    """Whether points x [n, d] have too many dimensions for far pairs.

    Cost: a tree of a sample, much less than that of all points.
    """
    sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:SAMPLE_SIZE].to(x.device)
    if len(sample) < SAMPLE_SIZE:
        return False
    levels, pairs = level_pairs(balanced_tree(x[sample], SAMPLE_DEPTH), is_negligible)
    nodes = len(levels[-1])
    return pairs[-1].near.shape[1] > MOST_NEAR * nodes * (nodes + 1) / 2


def level_pairs(
    tree: Iterable[Nodes], is_negligible: Callable[[Tensor], Tensor]
) -> tuple[list[Nodes], list[LevelPairs]]:
    """The levels of a tree and their pairs, from the root; they end where near pairs are too many.

    Every pair of rows is in one far pair of a level, in one near pair of the last, or has a negligible entry.

    Args:
        tree: its levels, the root first.
        is_negligible: of gaps [p], whether the kernel counts as zero from this distance on.
    """
    levels: list[Nodes] = []
    found: list[LevelPairs] = []
    for nodes in tree:
        pairs = (
            _of_children(found[-1].near, len(nodes)) if found else torch.zeros(2, 1, dtype=torch.int64).to(nodes.rows)
        )
        levels.append(nodes)
        found.append(_divided(nodes, pairs, is_negligible))
        if found[-1].near.shape[1] > MAX_NEAR_PAIRS * levels[0].size:
            break
    return levels, found


def _divided(nodes: Nodes, pairs: Tensor, is_negligible: Callable[[Tensor], Tensor]) -> LevelPairs:
    left, right = pairs
    gaps, diameters = nodes.boxes.gaps(left, right), nodes.boxes.diameters()
    # Boxes of equal points have diameter 0: a gap of 0 is still near.
    is_far = (gaps >= SEPARATION * torch.maximum(diameters[left], diameters[right])) & (gaps > 0)
    is_seen = ~is_negligible(gaps)
    far = is_far & is_seen
    return LevelPairs(pairs[:, ~is_far & is_seen], pairs[:, far], gaps[far])


def _of_children(pairs: Tensor, num_children: int) -> Tensor:
    """Pairs i <= j of children of pairs of parents."""
    left, right = 2 * pairs
    children = torch.cat([torch.stack([left + a, right + b]) for a in (0, 1) for b in (0, 1)], dim=1)
    children = children[:, children[0] <= children[1]]
    return children[:, (children[0] * num_children + children[1]).argsort()]

"""Proxies: far rows on which a node's skeleton is chosen.

Most are near the node, where blocks of smooth kernels have the highest rank; of uniformly drawn rows, few would be.
"""

import math

import torch
from torch import Tensor

from gpy_iterative import random_numbers
from gpy_iterative.linear_operators.far_field.tree import SEPARATION, LevelPairs, Nodes

#: Gap added between boxes, in diameters.
SMALLEST_GAP = 0.1
#: Most dimensions that count for weights: large powers leave only the nearest boxes, or overflow.
MOST_DIMENSIONS = 3
#: Rows of a far node, of which the nearest becomes a proxy.
CANDIDATES = 3
#: Slots, odd ones, whose candidates are the far node's outermost rows, too.
OUTERMOST = slice(1, None, 8)
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def level_proxies(positions: Tensor, levels: list[Nodes], pairs: list[LevelPairs], counts: list[int]) -> list[Tensor]:
    """Rows [nodes, p] by level, from the root; `counts` must not grow towards the leaves.

    Half come from far nodes on the node's level, half from its parent. Any first part of them may be used alone.
    """
    generator = torch.Generator().manual_seed(2)
    found = [levels[0].rows.new_zeros(1, counts[0])]
    have = torch.zeros_like(found[0][0, :1], dtype=torch.bool)  # which nodes have proxies
    for nodes, level, count in zip(levels[1:], pairs[1:], counts[1:], strict=False):
        own, has_own = _drawn(positions, nodes, level, count, generator)
        slots = torch.arange(count, device=positions.device)
        inherited, had = (of_parents.repeat_interleave(2, 0) for of_parents in (found[-1], have))
        # Odd slots are own ones, even ones the parent's first half.
        mixed = torch.where(slots % 2 == 1, own, inherited[:, slots // 2])
        is_mixed, is_own = (has_own & had).unsqueeze(-1), (has_own & ~had).unsqueeze(-1)
        found.append(torch.where(is_mixed, mixed, torch.where(is_own, own, inherited[:, :count])))
        have = has_own | had
    return found


def _drawn(
    positions: Tensor, nodes: Nodes, level: LevelPairs, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows [nodes, count] from far nodes, and which nodes have any."""
    device = nodes.rows.device
    node, partner = torch.cat([level.far, level.far.flip(0)], dim=1)
    diameters = nodes.diameters()
    weights = _weights(nodes, level.gaps.repeat(2), diameters[node])
    order = node.argsort(stable=True)
    partner, weights = partner[order], weights[order]
    sizes = torch.bincount(node, minlength=len(nodes))
    ends = sizes.cumsum(0)
    totals = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    low, high = totals[ends - sizes].unsqueeze(-1), totals[ends].unsqueeze(-1)
    # Any first part of multiples of the golden ratio gives every far node its share.
    start = random_numbers.uniform((len(nodes), 1), generator, device)
    uniform = (start + GOLDEN_RATIO * torch.arange(count, device=device)) % 1
    drawn = torch.searchsorted(totals, low + uniform * (high - low), right=True) - 1
    has_own = sizes > 0
    if not len(partner):
        return nodes.rows[:, :1].expand(-1, count), has_own
    last = (ends - 1).clamp_min(0).unsqueeze(-1)
    drawn = torch.minimum(drawn, last).clamp_min_(0)
    chosen = partner[torch.maximum(drawn, torch.minimum((ends - sizes).unsqueeze(-1), last))]
    return _nearest(positions, nodes, chosen, generator), has_own


def _nearest(positions: Tensor, nodes: Nodes, chosen: Tensor, generator: torch.Generator) -> Tensor:
    columns = positions.mT.contiguous()
    found, least = torch.zeros_like(chosen), positions.new_full(chosen.shape, torch.inf)

    def compare(rows: Tensor, slots: slice) -> None:
        squares = torch.zeros_like(least[:, slots])
        for column, low, high in zip(columns, nodes.low.unbind(1), nodes.high.unbind(1), strict=True):
            values = column[rows]
            outside = values - torch.clamp(values, low.unsqueeze(1), high.unsqueeze(1))
            squares.addcmul_(outside, outside)
        is_nearer = squares < least[:, slots]
        found[:, slots] = torch.where(is_nearer, rows, found[:, slots])
        least[:, slots] = torch.where(is_nearer, squares, least[:, slots])

    for _ in range(CANDIDATES):
        place = random_numbers.uniform(chosen.shape, generator, chosen.device) * nodes.counts[chosen]
        compare(nodes.rows[chosen, place.long()], slice(None))
    # Random rows miss one that lies apart: by far the nearest, it has the largest entries.
    for column in columns:
        inside = column[nodes.rows]
        for place in (inside.argmin(1), inside.argmax(1)):
            rows = nodes.rows.gather(1, place.unsqueeze(1)).squeeze(1)
            compare(rows[chosen[:, OUTERMOST]], OUTERMOST)
    return found


def sampled_proxies(nodes: Nodes, chosen: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows by the gaps to all nodes, of chosen nodes that have any, and which do."""
    device, total = nodes.rows.device, len(nodes)
    other = torch.arange(total, device=device)
    gaps = nodes.gaps(chosen.repeat_interleave(total), other.repeat(len(chosen))).view(-1, total)
    diameters = nodes.diameters()
    own = diameters[chosen].unsqueeze(-1)
    is_far = (gaps >= SEPARATION * torch.maximum(own, diameters)) & (gaps > 0)
    weights = _weights(nodes, gaps, own).masked_fill_(~is_far, 0.0)
    have = is_far.any(1)
    if not have.any():
        return nodes.rows[:0, :1], have
    partner = torch.multinomial(weights[have].cpu(), count, replacement=True, generator=generator).to(device)
    slot = random_numbers.uniform(partner.shape, generator, device) * nodes.counts[partner]
    return nodes.rows[partner, slot.long()], have


def _weights(nodes: Nodes, gaps: Tensor, diameters: Tensor) -> Tensor:
    """Weights of boxes by their gaps: all distances count alike."""
    return (gaps + SMALLEST_GAP * diameters).double() ** -min(nodes.low.shape[1], MOST_DIMENSIONS)

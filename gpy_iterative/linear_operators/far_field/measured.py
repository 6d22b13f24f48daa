"""The measured error of a far field.

Few entries, where far boxes nearly touch, have the largest errors, and uniform samples miss them. So half of the samples
are drawn by the squared entries at the gaps; all are divided by their probability.
"""

import math

import torch
from torch import Tensor

from gpy_iterative import random_numbers
from gpy_iterative.linear_operators.far_field.entries import ProductEntries
from gpy_iterative.linear_operators.far_field.levels import Levels, PairBlocks
from gpy_iterative.linear_operators.far_field.plan import Plan
from gpy_iterative.linear_operators.far_field.tree import box_gaps

#: Errors may be those of a few rows of a node; so many cost hardly more than four.
MEASURED_PAIRS, MEASURED_ROWS = 384, 16


def measured_error(plan: Plan, levels: Levels, entries: ProductEntries) -> float:
    """Root mean square error of all entries over `Plan.size`, from random far entries."""
    generator = torch.Generator().manual_seed(3)
    double, total = entries.double(), 0.0
    for part in levels.parts:
        if part.step:
            depth = len(plan.levels) - part.step
            samples = _Samples(plan, depth, double, generator)
            squares = _errors(levels, part, double, samples).square()
            total += (
                2 * part.pairs.shape[1] * plan.levels[depth].size ** 2 * float((squares * samples.weights()).mean())
            )
    return math.sqrt(total) / (len(entries) * plan.size)


class _Samples:
    """Random far entries of a level.

    Attributes:
        nodes: of both sides, [2, p].
        leaves: of both sides, [p], counted from the node's first.
        slots: of both sides, [p, rows].
    """

    def __init__(self, plan: Plan, depth: int, entries: ProductEntries, generator: torch.Generator) -> None:
        self._generator = generator
        own, leaves, pairs, x = plan.levels[depth], plan.levels[-1], plan.pairs[depth], entries.positions
        closeness = lambda *boxes: entries.at_distances(box_gaps(*boxes)).square_()
        pair, odds = self._drawn(entries.at_distances(pairs.gaps).square_().unsqueeze(0), MEASURED_PAIRS)
        self.nodes, self.leaves, self.slots = pairs.far[:, pair.squeeze(0)], [], []
        self._odds = odds.view(-1, 1, 1)
        num = len(leaves) // len(own)
        for side, (nodes, others) in enumerate((self.nodes, self.nodes.flip(0))):
            low, high = own.low[others].unsqueeze(1), own.high[others].unsqueeze(1)
            below = nodes.unsqueeze(1) * num + torch.arange(num, device=nodes.device)
            leaf, odds = self._drawn(closeness(leaves.low[below], leaves.high[below], low, high))
            points = x[leaves.rows[nodes * num + leaf.squeeze(1)]]
            slot, of_slot = self._drawn(closeness(points, points, low, high), MEASURED_ROWS)
            self.leaves.append(leaf.squeeze(1))
            self.slots.append(slot)
            self._odds = self._odds * (odds * of_slot).unsqueeze(2 - side)

    def weights(self) -> Tensor:
        """The uniform probability of each entry over its own, [p, rows, rows]."""
        return 2 / (1 + self._odds)

    def _drawn(self, closeness: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
        """Columns [b, count] of closeness [b, m], drawn in turn uniformly and by closeness, and their odds."""
        closeness = closeness.clamp_min(torch.finfo(closeness.dtype).tiny)
        shape, num, device = (len(closeness), count), closeness.shape[1], closeness.device
        uniform, sums = random_numbers.uniform(shape, self._generator, device), closeness.cumsum(1)
        by_closeness = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
        is_uniform = torch.arange(MEASURED_PAIRS, device=device).view(-1, 1) % 2 == 0
        is_uniform = is_uniform.mT if len(closeness) == 1 else is_uniform
        found = torch.where(is_uniform, (uniform * num).long(), by_closeness).clamp_max_(num - 1)
        return found, num * closeness.gather(1, found) / sums[:, -1:]


def _errors(levels: Levels, part: PairBlocks, entries: ProductEntries, samples: _Samples) -> Tensor:
    sides = zip(samples.nodes, samples.leaves, samples.slots, strict=True)
    (left, first), (right, second) = (_weights(levels, part.step, *side) for side in sides)
    at_skeletons = entries.blocks(*(entries.inputs(part.points[nodes]) for nodes in samples.nodes))
    return first.mT @ at_skeletons @ second - entries.blocks(entries.inputs(left), entries.inputs(right))


def _weights(levels: Levels, step: int, nodes: Tensor, leaf: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers [p, rows], and their weights [p, rank, rows] at the node's skeleton."""
    leaves = nodes * 2 ** (step - 1) + leaf
    at_leaves = levels.interpolations[0].index_select(0, leaves)
    rows = levels.rows[leaves].gather(1, slots)
    weights = at_leaves.gather(2, slots.unsqueeze(1).expand(-1, at_leaves.shape[1], -1)).double()
    for above, interpolation in enumerate(levels.interpolations[1:step], 1):
        rank, size = interpolation.shape[1:]
        half = 2 * rank * (leaves >> above) + (leaves >> (above - 1)) % 2
        halves = half.unsqueeze(1) + 2 * torch.arange(rank, device=half.device)
        of_half = interpolation.reshape(-1, size // 2).index_select(0, halves.flatten()).view(len(half), rank, -1)
        weights = of_half.double() @ weights
    return rows, weights

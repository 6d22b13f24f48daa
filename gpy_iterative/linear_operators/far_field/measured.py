"""The measured error of a far field.

Errors are largest where two far boxes nearly touch, in a few of a hundred thousand entries: uniform samples miss them.
Half of the samples are drawn by the squared entries at the gaps, and all are divided by their probability, so that the
mean square has no bias.
"""

import math

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.entries import RadialEntries
from gpy_iterative.linear_operators.far_field.levels import Levels, PairBlocks
from gpy_iterative.linear_operators.far_field.plan import Plan
from gpy_iterative.linear_operators.far_field.tree import box_gaps

#: Entries per level whose errors are measured.
MEASURED_ENTRIES = 512


def measured_error(plan: Plan, levels: Levels, entries: RadialEntries) -> float:
    """Root mean square error of all entries over `Plan.size`, estimated from a few far entries of each level."""
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
        leaves, slots: of both sides, [p]; leaves are counted from the node's first.
    """

    def __init__(self, plan: Plan, depth: int, entries: RadialEntries, generator: torch.Generator) -> None:
        self._generator, self._odds = generator, torch.ones(())
        own, leaves, pairs, x = plan.levels[depth], plan.levels[-1], plan.pairs[depth], entries.positions
        closeness = lambda *boxes: entries.at_distances(box_gaps(*boxes)).square_()
        pair = self._drawn(entries.at_distances(pairs.gaps).square_().unsqueeze(0), MEASURED_ENTRIES).squeeze(0)
        self.nodes, self.leaves, self.slots = pairs.far[:, pair], [], []
        num = len(leaves) // len(own)
        for nodes, others in (self.nodes, self.nodes.flip(0)):
            low, high = own.low[others].unsqueeze(1), own.high[others].unsqueeze(1)
            below = nodes.unsqueeze(1) * num + torch.arange(num, device=nodes.device)
            leaf = self._drawn(closeness(leaves.low[below], leaves.high[below], low, high)).squeeze(1)
            points = x[leaves.rows[nodes * num + leaf]]
            self.leaves.append(leaf)
            self.slots.append(self._drawn(closeness(points, points, low, high)).squeeze(1))

    def weights(self) -> Tensor:
        """The uniform probability over that of each sample, [p]: at most 2."""
        return 2 / (1 + self._odds)

    def _drawn(self, closeness: Tensor, count: int = 1) -> Tensor:
        """Columns [b, count] of closeness [b, m]: every second sample's uniformly, the others' by it."""
        closeness = closeness.clamp_min(torch.finfo(closeness.dtype).tiny)
        shape, num, device = (len(closeness), count), closeness.shape[1], closeness.device
        uniform = torch.rand(shape, generator=self._generator, device=self._generator.device, dtype=torch.float64)
        uniform, sums = uniform.to(device), closeness.cumsum(1)
        by_closeness = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
        is_uniform = torch.arange(uniform.numel(), device=device).view(shape) % 2 == 0
        found = torch.where(is_uniform, (uniform * num).long(), by_closeness).clamp_max_(num - 1)
        self._odds = self._odds.to(device) * (num * closeness.gather(1, found) / sums[:, -1:]).flatten()
        return found


def _errors(levels: Levels, part: PairBlocks, entries: RadialEntries, samples: _Samples) -> Tensor:
    """Errors of far entries of one step, [p]."""
    sides = zip(samples.nodes, samples.leaves, samples.slots, strict=True)
    (left, first), (right, second) = (_weights(levels, part.step, *side) for side in sides)
    at_skeletons = entries.blocks(*(entries.inputs(part.points[nodes]) for nodes in samples.nodes))
    found = (first.unsqueeze(1) @ at_skeletons @ second.unsqueeze(2)).flatten()
    return found - entries.blocks(*(entries.inputs(rows.unsqueeze(1)) for rows in (left, right))).flatten()


def _weights(levels: Levels, step: int, nodes: Tensor, leaf: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [p] by leaf and slot, and their weights [p, rank] at the node's skeleton."""
    leaves = nodes * 2 ** (step - 1) + leaf
    rows, weights = levels.rows[leaves, slot], levels.interpolations[0][leaves, :, slot].double()
    for above, interpolation in enumerate(levels.interpolations[1:step], 1):
        rank, size = interpolation.shape[1:]
        # index_select of halves of rows is several times as fast as indexing.
        half = 2 * rank * (leaves >> above) + (leaves >> (above - 1)) % 2
        halves = half.unsqueeze(1) + 2 * torch.arange(rank, device=half.device)
        of_half = interpolation.reshape(-1, size // 2).index_select(0, halves.flatten()).view(len(half), rank, -1)
        weights = (of_half.double() @ weights.unsqueeze(2)).squeeze(2)
    return rows, weights

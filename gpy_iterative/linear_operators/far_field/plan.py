"""The plan of a far field: tree and ranks for a tolerance."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpy_iterative.linear_operators.far_field.entries import ProductEntries
from gpy_iterative.linear_operators.far_field.proxies import sampled_proxies
from gpy_iterative.linear_operators.far_field.skeletons import needed_rank
from gpy_iterative.linear_operators.far_field.tree import LevelPairs, Nodes, balanced_tree, level_pairs
from gpy_iterative.random_numbers import integers, permutation
from gpy_iterative.worker_threads import run

SMALLEST_LEAF = 32
#: Overhead per point of a pair, in entries.
POINT_COST = 12
SAMPLED_NODES, SAMPLED_ROWS, SAMPLED_PROXIES = 12, 192, 384
SAMPLED_ENTRIES = 2**14
#: Rounding error relative to the root mean square entry.
LEAST_ERROR = {torch.float32: 1e-6, torch.float64: 1e-12}
#: Parts of the allowed error: of a level's ranks, and of negligible entries.
AIM, NEGLIGIBLE = 0.08, 0.03
#: Ranks are multiples of this, for fast products.
RANK_STEP = 8


@dataclass(frozen=True)
class Plan:
    """A tree with its pairs and ranks.

    Attributes:
        levels, pairs, ranks: by level, from the root.
        size: from `entries_size`.
        error: root mean square error of skeletons.
    """

    levels: list[Nodes]
    pairs: list[LevelPairs]
    ranks: list[int]
    size: float
    error: float

    @property
    def cost(self) -> float:
        """Of a product, in evaluated entries."""
        near = _cost(self.pairs[-1].near.shape[1], self.levels[-1].size)
        return near + sum(_cost(level.far.shape[1], rank) for level, rank in zip(self.pairs, self.ranks, strict=True))

    @property
    def top(self) -> int:
        """The first level with far pairs, or the number of levels."""
        return next((level for level, pairs in enumerate(self.pairs) if pairs.far.shape[1]), len(self.pairs))

    def cheapest(self) -> "Plan":
        cut = lambda n: replace(self, levels=self.levels[:n], pairs=self.pairs[:n], ranks=self.ranks[:n])
        return min(map(cut, range(1, len(self.levels) + 1)), key=lambda plan: plan.cost)


def _cost(pairs: int, size: int) -> float:
    return pairs * size * (size + POINT_COST)


def make_plan(entries: ProductEntries, tolerance: float, limit: float) -> Plan | None:
    """The cheapest plan; None if its cost must exceed the limit, in entries of a product."""
    size = entries_size(entries, tolerance)
    depth = max(int(math.log2(len(entries) / SMALLEST_LEAF)), 0)
    is_negligible = lambda gaps: entries.at_distances(gaps) < NEGLIGIBLE * tolerance * size
    levels, pairs = level_pairs(balanced_tree(entries.positions, depth), is_negligible)
    hoped = Plan(levels, pairs, [RANK_STEP] * len(levels), size, AIM * tolerance * size)
    if hoped.cheapest().cost >= limit:
        return None
    return with_measured_ranks(hoped, entries)


def with_measured_ranks(plan: Plan, entries: ProductEntries) -> Plan:
    double = entries.double()
    # The root first: large nodes take longest.
    ranks = run([partial(_rank, double, nodes, plan.error) for nodes in plan.levels], entries.device)
    return replace(plan, ranks=ranks).cheapest()


def entries_size(entries: ProductEntries, tolerance: float) -> float:
    """Standard deviation of all entries, estimated from random ones; at least what rounding allows.

    With long lengthscales, entries are nearly equal: errors relative to their root mean square would hide the differences.
    """
    generator, n = torch.Generator().manual_seed(0), len(entries)
    rows, columns = map(entries.inputs, integers(n, (2, SAMPLED_ENTRIES, 1), generator, entries.device))
    found, diagonal = (entries.blocks(rows, other).double() for other in (columns, rows))
    mean = found.mean()
    variance = float((found - mean).square().mean() + (diagonal - mean).square().mean() / n)
    least = min(LEAST_ERROR[entries.dtype] / tolerance, 1.0)
    return max(math.sqrt(variance), least * math.sqrt(variance + float(mean.square())))


def _rank(entries: ProductEntries, nodes: Nodes, error: float) -> int:
    generator = torch.Generator().manual_seed(1)
    chosen = permutation(len(nodes), generator)[:SAMPLED_NODES].to(nodes.rows.device)
    proxies, have = sampled_proxies(nodes, chosen, SAMPLED_PROXIES, generator)
    if not len(proxies):
        return nodes.size
    slots = permutation(nodes.size, generator)[:SAMPLED_ROWS].to(nodes.rows.device)
    rows = nodes.rows[chosen[have]][:, slots]
    rank = needed_rank(entries.at_proxies(rows, proxies), error)
    return nodes.size if rank >= len(slots) else min(-(-max(rank, 1) // RANK_STEP) * RANK_STEP, nodes.size)

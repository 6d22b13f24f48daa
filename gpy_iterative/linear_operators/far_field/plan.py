"""Which tree and which ranks: the far field of a kernel matrix, built to a tolerance."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpy_iterative.linear_operators.far_field.entries import RadialEntries
from gpy_iterative.linear_operators.far_field.pairs import LevelPairs, are_nearly_all_near, level_pairs
from gpy_iterative.linear_operators.far_field.proxies import sampled_proxies
from gpy_iterative.linear_operators.far_field.skeletons import needed_rank
from gpy_iterative.linear_operators.far_field.tree import Nodes, balanced_tree
from gpy_iterative.worker_threads import run

#: Rows of a leaf, at the least.
SMALLEST_LEAF = 32
#: What each point of a pair of nodes costs beside the entries, in entries: vectors are gathered and added.
POINT_COST = 12
#: Nodes of a level on which its rank is measured, rows of each, and proxies.
SAMPLED_NODES, SAMPLED_ROWS, SAMPLED_PROXIES = 24, 192, 384
#: Random entries from which the size of all is estimated.
SAMPLED_ENTRIES = 2**14
#: The error of far entries that ranks are measured for, which adds up over the levels, and entries that count as zero: in
#: parts of the error that is allowed.
AIM, NEGLIGIBLE = 0.08, 0.03
#: Ranks are multiples of this number: matrix products are faster.
RANK_STEP = 8


@dataclass(frozen=True)
class Plan:
    """A tree with its pairs, and the rank of every level.

    Attributes:
        levels: of the tree, the root first; the last are the leaves.
        pairs: of each level.
        ranks: of each level.
        size: the root mean square of the matrix's entries.
        error: the root mean square of the errors that skeletons are made for.
    """

    levels: list[Nodes]
    pairs: list[LevelPairs]
    ranks: list[int]
    size: float
    error: float

    @property
    def cost(self) -> float:
        """Of a product, in entries that are evaluated."""
        near = _cost(self.pairs[-1].near.shape[1], self.levels[-1].size)
        return near + sum(_cost(level.far.shape[1], rank) for level, rank in zip(self.pairs, self.ranks, strict=True))

    @property
    def top(self) -> int:
        """The first level with far pairs; one beyond the leaves where there are none."""
        return next((level for level, pairs in enumerate(self.pairs) if pairs.far.shape[1]), len(self.pairs))

    def cut(self, depth: int) -> "Plan":
        """The same with the leaves at another depth."""
        stop = depth + 1
        return replace(self, levels=self.levels[:stop], pairs=self.pairs[:stop], ranks=self.ranks[:stop])

    def cheapest(self) -> "Plan":
        """The same with the leaves at the depth of least cost."""
        return min((self.cut(depth) for depth in range(len(self.levels))), key=lambda other: other.cost)


def _cost(pairs: int, size: int) -> float:
    return pairs * size * (size + POINT_COST)


def make_plan(entries: RadialEntries, tolerance: float, limit: float) -> Plan | None:
    """The plan of least cost for the matrix of these entries; None where it must cost more than a limit.

    Args:
        entries: of the matrix.
        tolerance: the relative error that a product with random vectors may have.
        limit: of a product's cost, in entries.

    Cost: a tree, the lists of pairs, and the entries of a few nodes of each level at a few hundred rows each.
    """
    size = entries_size(entries)
    depth = max(int(math.log2(len(entries) / SMALLEST_LEAF)), 0)
    is_negligible = partial(entries.are_below, NEGLIGIBLE * tolerance * size)
    if are_nearly_all_near(entries.positions, is_negligible):
        return None
    levels, pairs = level_pairs(balanced_tree(entries.positions, depth), is_negligible)
    hoped = Plan(levels, pairs, [RANK_STEP] * len(levels), size, AIM * tolerance * size)
    if hoped.cheapest().cost >= limit:
        return None
    return with_measured_ranks(hoped, entries)


def with_measured_ranks(plan: Plan, entries: RadialEntries) -> Plan:
    """The plan with the ranks that its error takes, and with its leaves at the depth of least cost."""
    double = entries.double()
    # The root first: large nodes take longest.
    return replace(plan, ranks=run([partial(_rank, double, nodes, plan.error) for nodes in plan.levels])).cheapest()


def entries_size(entries: RadialEntries) -> float:
    """The root mean square of all entries, from random ones and the diagonal."""
    generator, n = torch.Generator().manual_seed(0), len(entries)
    rows, columns = torch.randint(n, (2, SAMPLED_ENTRIES, 1), generator=generator).to(entries.device)
    found, diagonal = (entries.blocks(rows, other).double().square().mean() for other in (columns, rows))
    return math.sqrt(float(found + diagonal / n))


def _rank(entries: RadialEntries, nodes: Nodes, error: float) -> int:
    """The rank that a level needs for this error; the nodes' size where there is none."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(len(nodes), generator=generator)[:SAMPLED_NODES].to(nodes.rows.device)
    proxies = sampled_proxies(nodes, chosen, SAMPLED_PROXIES, generator)
    if not len(proxies.rows):
        return nodes.size
    slots = torch.randperm(nodes.size, generator=generator)[:SAMPLED_ROWS].to(nodes.rows.device)
    rows = nodes.rows[chosen[proxies.have]][:, slots]
    rank = needed_rank(entries.at_proxies(rows, proxies.rows), error)
    return nodes.size if rank >= len(slots) else min(-(-max(rank, 1) // RANK_STEP) * RANK_STEP, nodes.size)

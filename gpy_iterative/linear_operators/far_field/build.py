"""The levels of a plan: skeletons and interpolations from the leaves up, and the error that they leave."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.entries import Entries
from gpy_iterative.linear_operators.far_field.levels import Levels, PairBlocks
from gpy_iterative.linear_operators.far_field.plan import Plan
from gpy_iterative.linear_operators.far_field.proxies import level_proxies
from gpy_iterative.linear_operators.far_field.skeletons import skeletons
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.worker_threads import run, shares

#: Proxies for each point of a skeleton, and how many at least: of few, those for derivatives may lie on one side.
PROXIES_PER_POINT, LEAST_PROXIES = 5, 160
#: The smallest error for which skeletons are picked at once, and not in halves.
SMALLEST_AT_ONCE = 1e-6
#: Nodes of which skeletons are picked together.
BATCH_NODES = 128


def build_levels(plan: Plan, entries: Entries) -> Levels:
    """Skeletons and interpolations of every level from the leaves to the topmost one with far pairs.

    Cost: at every row of the data the entries of some hundred proxies, in float64.
    """
    leaves, pairs, double = plan.levels[-1], plan.pairs[-1], entries.double()
    is_same = pairs.near[0] == pairs.near[1]
    parts = [
        PairBlocks(leaves.rows, pairs.near[:, is_same], is_diagonal=True, step=0),
        PairBlocks(leaves.rows, pairs.near[:, ~is_same], is_diagonal=False, step=0),
    ]
    interpolations, points, in_halves = [], leaves.rows, plan.error < SMALLEST_AT_ONCE
    proxies = level_proxies(plan.levels, plan.pairs, _num_proxies(max(plan.ranks[plan.top :], default=0)))
    for depth in range(len(plan.levels) - 1, plan.top - 1, -1):
        rank = min(plan.ranks[depth], points.shape[1])
        picked, weights = _skeletons(double, points, proxies[depth].rows[:, : _num_proxies(rank)], rank, in_halves)
        interpolations.append(weights.to(entries.dtype))
        parts.append(PairBlocks(picked, plan.pairs[depth].far, is_diagonal=False, step=len(interpolations)))
        points = picked.view(len(picked) // 2, -1) if depth else picked
    return Levels(leaves.rows, leaves.is_own(), interpolations, [part for part in parts if part.pairs.shape[1]])


def _num_proxies(rank: int) -> int:
    return max(PROXIES_PER_POINT * rank, LEAST_PROXIES)


def _skeletons(entries: Entries, points: Tensor, proxies: Tensor, rank: int, in_halves: bool) -> tuple[Tensor, Tensor]:
    """Row numbers [nodes, rank] that are picked from points [nodes, size], and the transposed U [nodes, rank, size]."""
    picked = points.new_empty(len(points), rank)
    weights = torch.empty(len(points), rank, points.shape[1], dtype=torch.float64, device=points.device)

    def pick(share: Sequence[slice]) -> None:
        for nodes in share:
            found = skeletons(entries.at_proxies(points[nodes], proxies[nodes]), rank, in_halves=in_halves)
            picked[nodes], weights[nodes] = points[nodes].gather(1, found.pivots), found.weights

    run([partial(pick, share) for share in shares(blocks(len(points), BATCH_NODES), points.device)])
    return picked, weights

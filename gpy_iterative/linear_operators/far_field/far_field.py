"""Building of far fields."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.entries import ProductEntries
from gpy_iterative.linear_operators.far_field.levels import Levels, PairBlocks
from gpy_iterative.linear_operators.far_field.measured import measured_error
from gpy_iterative.linear_operators.far_field.plan import RANK_STEP, Plan, make_plan, with_measured_ranks
from gpy_iterative.linear_operators.far_field.proxies import level_proxies
from gpy_iterative.linear_operators.far_field.skeletons import skeletons
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.worker_threads import ByDevice, divided, run

#: "auto" divides this by n, because the largest eigenvalue grows with n and the noise does not. float64 takes a part: it is
#: used for smooth functions and little noise.
TOLERANCE_TIMES_ROWS, FLOAT64_PART = 0.1, 0.01
SMALLEST_TOLERANCE, SMALLEST_IN_FLOAT64, LARGEST_TOLERANCE = 3e-7, 1e-9, 1e-6
#: Most entries of a far field as a part of the tiles', for "auto" and for a tolerance. On CUDA they take longer.
AUTO_PART, GIVEN_PART = ByDevice(cpu=0.5, accelerator=0.25), 1.0
#: Safety factor of the second attempt.
LOWER_AIM = 0.2
#: The second attempt's error may be so many tolerances: tiles would take much longer.
MOST_MISSED = 10
#: Proxies per skeleton point, and least proxies: few with derivatives could lie on one side.
PROXIES_PER_POINT, LEAST_PROXIES = 4, 160
#: On levels of few nodes, where errors are largest, there are more.
FEW_NODES, MORE_PROXIES = 32, 2
BATCH_NODES = ByDevice(cpu=128, accelerator=1024)


@dataclass(frozen=True)
class FarField:
    levels: Levels
    error: float


@divided()
def far_field(entries: ProductEntries, wanted: float | Literal["auto"]) -> FarField | None:
    """The far field of a symmetric matrix; None if it does not pay, or two attempts miss the tolerance by far."""
    n = len(entries)
    tolerance = automatic_tolerance(n, entries.dtype) if wanted == "auto" else wanted
    part = AUTO_PART.on(entries.device) if wanted == "auto" else GIVEN_PART
    limit = part * n**2 / 2
    plan = make_plan(entries, tolerance, limit)
    if plan is None or plan.cost >= limit:
        return None
    first = _built(plan, entries)
    if first.error <= tolerance:
        return first
    plan = _with_higher_ranks(plan, entries, tolerance / first.error)
    if plan.cost >= limit:
        return None
    second = _built(plan, entries)
    return second if second.error <= MOST_MISSED * tolerance else None


def automatic_tolerance(n: int, dtype: torch.dtype) -> float:
    part, smallest = (FLOAT64_PART, SMALLEST_IN_FLOAT64) if dtype == torch.float64 else (1.0, SMALLEST_TOLERANCE)
    return min(max(part * TOLERANCE_TIMES_ROWS / n, smallest), LARGEST_TOLERANCE)


def _built(plan: Plan, entries: ProductEntries) -> FarField:
    levels = build_levels(plan, entries)
    return FarField(levels, measured_error(plan, levels, entries))


def _with_higher_ranks(plan: Plan, entries: ProductEntries, ratio: float) -> Plan:
    other = with_measured_ranks(replace(plan, error=plan.error * LOWER_AIM * ratio), entries)
    ranks = [max(rank, before + RANK_STEP) for rank, before in zip(other.ranks, plan.ranks, strict=False)]
    return replace(other, ranks=ranks)


def build_levels(plan: Plan, entries: ProductEntries) -> Levels:
    leaves, pairs, double = plan.levels[-1], plan.pairs[-1], entries.double()
    is_same, inputs = pairs.near[0] == pairs.near[1], entries.inputs(leaves.rows)
    parts = [
        PairBlocks(leaves.rows, inputs, pairs.near[:, is_same], is_diagonal=True, step=0),
        PairBlocks(leaves.rows, inputs, pairs.near[:, ~is_same], is_diagonal=False, step=0),
    ]
    interpolations, points = [], leaves.rows
    # Nodes below inherit proxies.
    most = [max(plan.ranks[max(depth, plan.top) :], default=0) for depth in range(len(plan.levels))]
    counts = [_num_proxies(rank, len(nodes)) for rank, nodes in zip(most, plan.levels, strict=True)]
    proxies = level_proxies(entries.positions, plan.levels, plan.pairs, counts)
    for depth in range(len(plan.levels) - 1, plan.top - 1, -1):
        rank = min(plan.ranks[depth], points.shape[1])
        chosen = proxies[depth][:, : _num_proxies(rank, len(points))]
        picked, weights = _skeletons(double, points, chosen, rank)
        interpolations.append(weights.to(entries.dtype))
        inputs, far = entries.inputs(picked), plan.pairs[depth].far
        parts.append(PairBlocks(picked, inputs, far, is_diagonal=False, step=len(interpolations)))
        points = picked.view(len(picked) // 2, -1) if depth else picked
    return Levels(leaves.rows, leaves.is_own(), interpolations, [part for part in parts if part.pairs.shape[1]])


def _num_proxies(rank: int, nodes: int) -> int:
    return max(PROXIES_PER_POINT * rank, LEAST_PROXIES) * (MORE_PROXIES if nodes <= FEW_NODES else 1)


def _skeletons(entries: ProductEntries, points: Tensor, proxies: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rows [nodes, rank] picked from points [nodes, size], and U^T [nodes, rank, size]."""
    picked = points.new_empty(len(points), rank)
    weights = torch.empty(len(points), rank, points.shape[1], dtype=torch.float64, device=points.device)

    def pick(nodes: slice) -> None:
        found = skeletons(entries.at_proxies(points[nodes], proxies[nodes]), rank)
        picked[nodes], weights[nodes] = points[nodes].gather(1, found.pivots), found.weights

    run([partial(pick, nodes) for nodes in blocks(len(points), BATCH_NODES.on(points.device))], points.device)
    return picked, weights

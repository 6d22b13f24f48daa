"""The error of a far field, measured on random entries of every level."""

import math

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.entries import Entries
from gpy_iterative.linear_operators.far_field.levels import Levels
from gpy_iterative.linear_operators.far_field.plan import Plan

#: Entries of every level whose errors are measured.
MEASURED_ENTRIES = 512


def measured_error(plan: Plan, levels: Levels, entries: Entries) -> float:
    """The relative error of products with random vectors: that of the entries, both as root mean squares."""
    generator = torch.Generator().manual_seed(3)
    double, total, n = entries.double(), 0.0, len(entries)
    for part in levels.parts:
        if part.step:
            errors = _errors(levels, part.step, part.points, part.pairs, double, generator)
            nodes = plan.levels[len(plan.levels) - part.step]
            total += 2 * part.pairs.shape[1] * nodes.size**2 * float(errors.square().mean())
    return math.sqrt(total) / (n * plan.size)


def _errors(
    levels: Levels, step: int, skeletons: Tensor, pairs: Tensor, entries: Entries, generator: torch.Generator
) -> Tensor:
    """Errors of random entries of far pairs of one step, [p]."""
    draw = lambda stop: torch.randint(stop, (MEASURED_ENTRIES,), generator=generator).to(pairs.device)
    chosen = pairs[:, draw(pairs.shape[1])]
    sides = [_weights(levels, step, nodes, draw(2 ** (step - 1)), draw(levels.rows.shape[1])) for nodes in chosen]
    (left, first), (right, second) = sides
    blocks = entries.blocks(skeletons[chosen[0]], skeletons[chosen[1]])
    found = (first.unsqueeze(1) @ blocks @ second.unsqueeze(2)).flatten()
    return found - entries.blocks(left.unsqueeze(1), right.unsqueeze(1)).flatten()


def _weights(levels: Levels, step: int, nodes: Tensor, leaf: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [p] of nodes of a step, by leaf in the node and slot in the leaf; their weights [p, rank] at its skeleton."""
    leaves = nodes * 2 ** (step - 1) + leaf
    rows, weights = levels.rows[leaves, slot], levels.interpolations[0][leaves, :, slot].double()
    for above, interpolation in enumerate(levels.interpolations[1:step], 1):
        half = (leaves >> (above - 1)) % 2
        of_half = interpolation.unflatten(2, (2, -1))[leaves >> above, :, half].double()
        weights = (of_half @ weights.unsqueeze(2)).squeeze(2)
    return rows, weights

"""The tree and its pairs: every row once, leaves of equal size, every pair of rows in exactly one block."""

import pytest
import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.tree import SEPARATION, balanced_tree, level_pairs


def points(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nothing(gaps: Tensor) -> Tensor:
    return torch.zeros_like(gaps, dtype=torch.bool)


@pytest.mark.parametrize("n", [64, 65, 100, 127])
def test_each_level_has_every_row_once(n: int) -> None:
    x = points(n, 2)
    for depth, nodes in enumerate(balanced_tree(x, 4)):
        assert len(nodes) == 2**depth
        assert nodes.rows[nodes.is_own()].sort().values.equal(torch.arange(n))
        assert int(nodes.counts.min()) >= nodes.size - 1 >= n // 2**depth - 1
        assert (nodes.low.unsqueeze(1) <= x[nodes.rows]).all()
        assert (x[nodes.rows] <= nodes.high.unsqueeze(1)).all()


def test_a_slot_without_a_row_repeats_the_first() -> None:
    *_, leaves = balanced_tree(points(100, 2), 3)
    lacking = leaves.counts < leaves.size
    assert lacking.any()
    assert leaves.rows[lacking, -1].equal(leaves.rows[lacking, 0])


def test_children_halve_the_widest_side() -> None:
    x = points(64, 2) * torch.tensor([1.0, 10.0])
    _, halves = balanced_tree(x, 1)
    left, right = x[halves.rows]
    assert left[:, 1].max() <= right[:, 1].min()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_every_pair_of_rows_is_in_one_block(d: int) -> None:
    n = 500
    levels, pairs = level_pairs(balanced_tree(points(n, d), 5), nothing)
    seen = torch.zeros(n, n)
    for nodes, level in zip(levels, pairs, strict=True):
        for i, j in level.far.T:
            seen[nodes.rows[i, : nodes.counts[i]].unsqueeze(1), nodes.rows[j, : nodes.counts[j]]] += 1
    for i, j in pairs[-1].near.T:
        seen[levels[-1].rows[i, : levels[-1].counts[i]].unsqueeze(1), levels[-1].rows[j, : levels[-1].counts[j]]] += 1
    either = seen + seen.T * ~torch.eye(n, dtype=torch.bool)
    inside = (levels[-1].rows.unsqueeze(2) == torch.arange(n)).any(1).float()
    either -= inside.T @ inside * (1 - torch.eye(n))  # pairs inside of a leaf are met from both sides
    assert either.eq(1).all()


def test_far_boxes_are_separated_and_none_repeats_a_pair_of_its_parents() -> None:
    for nodes, level in zip(*level_pairs(balanced_tree(points(2000, 2), 6), nothing), strict=True):
        diameters = nodes.diameters()[level.far].amax(0)
        assert (level.gaps >= SEPARATION * diameters).all()
        assert (level.near[0] <= level.near[1]).all()


def test_equal_points_are_near() -> None:
    x = torch.cat([points(100, 2), torch.full((300, 2), 0.5, dtype=torch.float64)])
    levels, pairs = level_pairs(balanced_tree(x, 4), nothing)
    leaves = pairs[-1]
    is_point = levels[-1].diameters() == 0
    assert is_point.sum() > 4
    between = is_point[leaves.near].all(0)
    count = int(is_point.sum())
    assert int(between.sum()) == count * (count + 1) // 2


def test_negligible_pairs_are_in_no_list() -> None:
    _, listed = level_pairs(balanced_tree(points(1000, 2), 5), lambda gaps: gaps > 0.3)
    assert all((level.gaps <= 0.3).all() for level in listed)


def test_lists_end_where_they_are_long() -> None:
    _, listed = level_pairs(balanced_tree(points(100, 18), 5), nothing)
    assert [level.near.shape[1] for level in listed] == [1, 3, 10, 36, 136]  # the next 32 nodes would have 528


@pytest.mark.parametrize("d", [1, 2, 3, 10, 18])
def test_lists_of_many_nodes_end_where_nearly_all_pairs_are_near(d: int) -> None:
    x = points(20_000, d)
    for each in (x, (2 * x - 1).erfinv()):
        levels, _ = level_pairs(balanced_tree(each, 8), nothing)
        assert len(levels[-1]) == (128 if d >= 10 else 256)

"""Index sets: distinct, of equal probability, independent of how many there are to draw from."""

import pytest
import torch

from gpy_iterative.quadruply.samples import draw_set, ring_block, uniform_subset
from tests.monte_carlo import assert_mean_within


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(("total", "size"), [(7, 3), (40, 5), (5, 4)])
def test_every_number_is_in_with_the_same_probability(ring: bool, total: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(2000):
        index = draw_set(total, size, generator, ring=ring)
        assert len(index.unique()) == len(index) == size
        draws.append(torch.zeros(total).index_fill_(0, index, 1.0))
    assert_mean_within(torch.stack(draws), size / total, max_sem=0.02)


def test_uniform_subsets_are_uniform() -> None:
    # Every pair of 5 of 10 numbers: probability 2/9, also beside the path that takes a permutation.
    for total, size in ((10, 5), (20, 3)):
        generator = torch.Generator().manual_seed(1)
        draws = []
        for _ in range(2000):
            inside = torch.zeros(total).index_fill_(0, uniform_subset(total, size, generator), 1.0)
            draws.append(torch.outer(inside, inside)[0, 1:4])
        assert_mean_within(torch.stack(draws), size * (size - 1) / (total * (total - 1)), max_sem=0.02)


def test_all_of_them_are_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    for ring in (True, False):
        assert draw_set(6, 6, generator, ring=ring).tolist() == list(range(6))
        assert draw_set(0, 0, generator, ring=ring).tolist() == []


def test_a_ring_wraps_around() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = {tuple(ring_block(4, 3, generator).tolist()) for _ in range(100)}
    assert blocks == {(0, 1, 2), (1, 2, 3), (2, 3, 0), (3, 0, 1)}


def test_huge_totals_cost_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    for ring in (True, False):
        index = draw_set(10**15, 1000, generator, ring=ring)  # any memory in the total would fail
        assert len(index.unique()) == 1000


def test_touched_rows_are_counted_without_bias() -> None:
    # E[(all / touched) 1(t is touched)] = 1: what the control variate's gradient rests on.
    for ring in (True, False):
        generator = torch.Generator().manual_seed(2)
        draws = []
        for _ in range(3000):
            both = torch.cat([draw_set(8, 3, generator, ring=ring) for _ in range(2)]).unique()
            draws.append(torch.zeros(8).index_fill_(0, both, 8 / len(both)))
        assert_mean_within(torch.stack(draws), 1.0, max_sem=0.03)

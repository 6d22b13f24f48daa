"""The true error keeps the tolerance, and the measured one is that of all entries.

Smooth kernels in the plane have their errors in a few of a hundred thousand entries, where two far boxes nearly touch.
"""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field import far_field as far_field_module
from gpy_iterative.linear_operators.far_field import proxies as proxies_module
from gpy_iterative.linear_operators.far_field.entries import ProductEntries, RadialEntries
from gpy_iterative.linear_operators.far_field.far_field import build_levels, far_field
from gpy_iterative.linear_operators.far_field.levels import Levels
from gpy_iterative.linear_operators.far_field.measured import measured_error
from gpy_iterative.linear_operators.far_field.plan import make_plan
from gpy_iterative.linear_operators.far_field.proxies import level_proxies
from gpy_iterative.linear_operators.far_field.tree import balanced_tree, level_pairs
from gpy_iterative.linear_operators.radial.functions import RBF


def uniform(n: int, seed: int) -> Tensor:
    """Points in a square of ten lengthscales."""
    return 10 * torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def true_error(x: Tensor, levels: Levels, entries: ProductEntries) -> float:
    """Root mean square error of all entries over their standard deviation."""
    squares, values = 0.0, torch.exp(-0.5 * torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").square())
    for some, true in zip(torch.eye(len(x), dtype=x.dtype).split(500), values.split(500), strict=True):
        found = levels.matmul(some.mT, lambda batch: entries.factors[0].blocks(*batch.inputs(0)), levels.batches)
        squares += float((found.mT - true).square().sum())
    return math.sqrt(squares) / len(x) / float(values.std())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_true_error_of_a_smooth_kernel_has_the_tolerance(seed: int) -> None:
    x = uniform(5000, seed)
    entries = ProductEntries([RadialEntries(x, RBF, None)])
    field = far_field(entries, 1e-7)
    assert field is not None
    true = true_error(x, field.levels, entries)
    assert true < 1e-7
    assert true / 2 < field.error < 2 * true


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_measured_error_is_the_true_one_where_few_entries_make_it(seed: int) -> None:
    x = uniform(2000, seed)
    entries = ProductEntries([RadialEntries(x, RBF, None)])
    plan = make_plan(entries, 1e-6, len(x) ** 2 / 2)
    assert plan is not None
    with (
        mock.patch.object(far_field_module, "MORE_PROXIES", 1),
        mock.patch.object(proxies_module, "CANDIDATES", 1),
    ):
        levels = build_levels(plan, entries)
    true = true_error(x, levels, entries)
    assert true / 3 < measured_error(plan, levels, entries) < 3 * true


@pytest.mark.slow
def test_the_measured_error_is_on_average_the_true_one_where_single_rows_make_it() -> None:
    """Four rows of a node measured a sixth of it: most errors in space are those of few rows."""
    logarithms = []
    for seed in range(4):
        x = 10 * torch.rand(3000, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        entries = ProductEntries([RadialEntries(x, RBF, None)])
        plan = make_plan(entries, 1e-8, len(x) ** 2 / 2)
        assert plan is not None
        levels = build_levels(plan, entries)
        logarithms.append(math.log(measured_error(plan, levels, entries) / true_error(x, levels, entries)))
    assert abs(sum(logarithms) / len(logarithms)) < math.log(3)


def test_every_far_node_has_its_share_of_proxies() -> None:
    """The nearest one of all, too: its corner makes the largest errors."""
    x, count = uniform(2000, 0), 240
    levels, pairs = level_pairs(balanced_tree(x, 4), lambda gaps: gaps < 0)
    proxies = level_proxies(x, levels, pairs, [count] * len(levels))[-1]
    leaf_of_row = torch.empty(len(x), dtype=torch.int64)
    leaf_of_row[levels[-1].rows] = torch.arange(len(levels[-1])).unsqueeze(-1)
    for node in range(len(levels[-1])):
        is_own = (pairs[-1].far == node).any(0)
        partners, gaps = pairs[-1].far[:, is_own].sum(0) - node, pairs[-1].gaps[is_own]
        weights = (gaps + proxies_module.SMALLEST_GAP * levels[-1].diameters()[node]) ** -2
        own = leaf_of_row[proxies[node, 1::2]]
        found = (own.unsqueeze(0) == partners.unsqueeze(1)).sum(1)
        assert (found - weights / weights.sum() * len(own)).abs().max() < 4


def test_proxies_are_near_rows_of_far_nodes() -> None:
    x = uniform(2000, 0)
    levels, pairs = level_pairs(balanced_tree(x, 4), lambda gaps: gaps < 0)

    def mean_gap() -> float:
        rows, nodes = level_proxies(x, levels, pairs, [240] * len(levels))[-1], levels[-1]
        points = x[rows[:, 1::2]]
        outside = points - torch.clamp(points, nodes.low.unsqueeze(1), nodes.high.unsqueeze(1))
        return float(outside.norm(dim=-1).mean())

    nearest = mean_gap()
    with mock.patch.object(proxies_module, "CANDIDATES", 1):
        assert nearest < 0.9 * mean_gap()


def test_a_row_apart_is_a_proxy() -> None:
    """By far the nearest, it has the largest entries, in which a node's weights had errors of any size without it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8001, 1, generator=generator, dtype=torch.float64)
    x[4001:] += 40
    x[-1] = 25
    levels, pairs = level_pairs(balanced_tree(x, 1), lambda gaps: gaps < 0)
    proxies = level_proxies(x, levels, pairs, [160] * len(levels))[-1]
    apart = len(x) - 1
    (other,) = (node for node in range(2) if apart not in levels[-1].rows[node])
    assert apart in proxies[other]

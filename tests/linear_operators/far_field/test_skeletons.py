"""Skeletons: picked rows are kept exactly, and interpolation is the least-squares one."""

import torch
from torch import Tensor

from gpy_iterative.linear_operators.far_field.skeletons import _picked, needed_rank, skeletons


def smooth(size: int = 40, proxies: int = 120) -> Tensor:
    """Values of 1 / r between two clouds of points that are far from one another, three times."""
    generator = torch.Generator().manual_seed(0)
    near, far = (torch.rand(3, count, 2, generator=generator, dtype=torch.float64) for count in (size, proxies))
    return 1 / torch.cdist(near, far + 2)


def test_interpolation_is_the_least_squares_solution() -> None:
    values = smooth()
    found = skeletons(values, 6)
    for member, pivots, weights in zip(values, found.pivots, found.weights, strict=True):
        naive = torch.linalg.lstsq(member[pivots].T, member.T, driver="gelsd").solution
        assert len(set(pivots.tolist())) == 6
        assert torch.allclose(weights[:, pivots], torch.eye(6, dtype=torch.float64), atol=1e-12)
        assert (weights.T @ member[pivots] - naive.T @ member[pivots]).norm() < 1e-8 * member.norm()


def test_halves_reach_errors_beyond_the_square_root_of_rounding() -> None:
    values = smooth()
    once, twice = (picked(values, 24).errors(values).norm() for picked in (_picked, skeletons))
    assert 10 * twice < once
    assert twice < 1e-10 * values.norm()


def test_the_needed_rank_reaches_the_error_and_is_not_larger() -> None:
    values = smooth()
    for error in (1e-3, 1e-6, 1e-10):
        rank = needed_rank(values, error)
        reached = skeletons(values, rank).errors(values).square().mean().sqrt()
        before = skeletons(values, rank - 1).errors(values).square().mean().sqrt()
        assert reached < 2 * error
        assert before > error / 4


def test_rows_of_low_rank_are_interpolated_whatever_the_rank() -> None:
    left, right = (
        torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1)
    )
    values = left @ right.mT
    found = skeletons(values, 10)
    assert found.weights.isfinite().all()
    assert found.errors(values).abs().max() < 1e-10
    assert needed_rank(values, 1e-9) == 3


def test_repeated_rows_are_picked_once() -> None:
    values = smooth(10).repeat(1, 3, 1)
    found = skeletons(values, 5)
    assert all(len(set((pivots % 10).tolist())) == 5 for pivots in found.pivots)

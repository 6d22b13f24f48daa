"""Orders of points, and nearest previous points, against brute force."""

import pytest
import torch
from torch import Tensor

from gpy_iterative.preconditioners import neighbours
from gpy_iterative.preconditioners.neighbours import maximin_order, previous_neighbours
from gpy_iterative.random_numbers import permutation


def points(n: int, d: int = 2) -> Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(("n", "d", "count"), [(1, 2, 1), (2, 1, 1), (50, 1, 49), (300, 2, 7), (300, 3, 40)])
@pytest.mark.parametrize("at_a_time", [1000, 2**22])
def test_neighbours_are_the_nearest_before(
    n: int, d: int, count: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "FOUND", at_a_time)
    x = points(n, d)
    found = previous_neighbours(x, count)
    assert found.shape == (n, count)
    for row in range(n):
        if row < count:
            assert found[row].tolist() == [*range(row), *[0] * (count - row)]
        else:
            expected = (x[:row] - x[row]).square().sum(-1).argsort()[:count]
            assert sorted(found[row].tolist()) == sorted(expected.tolist())


def test_points_in_a_bad_order_find_theirs() -> None:
    """Sorted from the outside inwards, most points of a tree come after the one that asks."""
    x = torch.linspace(1, 0, 200).double().unsqueeze(-1).square()
    found = previous_neighbours(x, 3)
    assert torch.equal(found[3:].sort(-1).values, torch.arange(3, 200).unsqueeze(-1) - torch.tensor([3, 2, 1]))


def test_equal_points() -> None:
    x = torch.zeros(100, 2).double()
    found = previous_neighbours(x, 5)
    assert (found < torch.arange(100).clamp_min(1).unsqueeze(-1)).all()
    assert all(len(row.unique()) == 5 for row in found[5:])


@pytest.mark.parametrize("kind", ["equal", "grid", "repeated", "underflow"])
def test_maximin_order_of_ties(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation, in few rounds."""
    rounds, finest = [], neighbours._finest
    monkeypatch.setattr(neighbours, "_finest", lambda x: rounds.append(len(x)) or finest(x))
    grid = torch.cartesian_prod(torch.arange(20.0), torch.arange(20.0))
    x = {
        "equal": torch.zeros(400, 2),
        "grid": grid,
        "repeated": points(4).repeat(100, 1),
        "underflow": 1e-200 * points(400),  # all distances are 0
    }[kind]
    order = maximin_order(x, torch.Generator().manual_seed(0))
    assert torch.equal(order.sort().values, torch.arange(400))
    assert len(rounds) < 50
    if kind == "repeated":
        assert len(x[order[:4]].unique(dim=0)) == 4


def spacing(x: Tensor) -> Tensor:
    """The distance of each point to the nearest one before it."""
    distances = torch.cdist(x, x) + torch.full((len(x), len(x)), torch.inf).triu()
    return distances.amin(-1)[1:]


def exact_maximin(x: Tensor) -> Tensor:
    order, distances = [0], (x - x[0]).norm(dim=-1)
    for _ in range(len(x) - 1):
        order.append(int(distances.argmax()))
        distances = torch.minimum(distances, (x - x[order[-1]]).norm(dim=-1))
    return torch.tensor(order)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_maximin_spreads_early_points_nearly_as_far_as_the_exact_order(d: int) -> None:
    x, generator = points(400, d), torch.Generator().manual_seed(0)
    order = maximin_order(x, generator)
    assert torch.equal(order.sort().values, torch.arange(400))
    found, exact, random = (spacing(x[o]).log() for o in (order, exact_maximin(x), permutation(400, generator)))
    for part in (slice(0, 100), slice(100, 200), slice(200, 399)):
        assert found[part].mean() > exact[part].mean() - 0.6
    # Of a random order, many early points lie close together.
    assert found[:100].amin() > random[:100].amin() + 0.5


def test_beyond_eight_inputs_distances_are_those_of_the_principal_components() -> None:
    """Lengthscales that went to infinity leave inputs without weight, in any rotation."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(300, 8, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64)).Q
    many = points @ rotation[:8] + 1e-9 * torch.randn(300, 20, generator=generator, dtype=torch.float64) + 5.0
    assert torch.equal(previous_neighbours(many, 7), previous_neighbours(points, 7))

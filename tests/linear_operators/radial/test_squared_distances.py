"""Squared distances in float32 are right to a small part of a squared lengthscale, however far the inputs stretch."""

import pytest
import torch
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_operators.radial.squared_distances import SquaredDistances

#: Four times what is allowed on average: a few roundings of norms above the average may come together.
ERROR = 1.2e-4


def points(seed: int, rows: int, spreads: list[float]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, len(spreads), generator=generator).sub(0.5) * torch.tensor(spreads)


def exact(x1: Tensor, x2: Tensor) -> Tensor:
    return (x1.double().unsqueeze(-2) - x2.double().unsqueeze(-3)).square().sum(-1)


@pytest.mark.parametrize("spreads", [[1.0, 2.0], [1000.0, 2.0, 3.0], [500.0, 800.0], []])
def test_neighbours_keep_their_distance(spreads: list[float]) -> None:
    x1 = points(0, 300, spreads)
    x2 = x1 + 0.1 * points(1, 300, [1.0] * len(spreads))
    everything = slice(0, 300)
    distances = SquaredDistances(x1, x2, 3.0)
    found = distances.block(everything, everything).double() / 3
    truth = exact(x1, x2)
    near = truth < 1
    assert near.any()
    assert (found - truth)[near].abs().max() <= ERROR
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=ERROR)
    tile = distances.block(slice(256, 300), slice(128, 256), torch.empty(44, 128), torch.empty(44, 128))
    torch.testing.assert_close(tile.double() / 3, truth[256:, 128:256], rtol=1e-4, atol=ERROR)


@pytest.mark.parametrize("scale", [5.0, torch.tensor([[[5.0]]])])
def test_differences_of_far_coordinates_are_those_of_the_inputs(scale: float | Tensor) -> None:
    """A root of the scale, which would move points by a thousandth of a lengthscale, is not taken into the coordinates."""
    x1 = 10_000 + points(0, 200, [30.0])
    x2 = x1 + points(1, 200, [0.1])
    everything = slice(0, 200)
    distances = SquaredDistances(x1, x2, scale)
    truth = 5 * exact(x1, x2)
    torch.testing.assert_close(distances.block(everything, everything).double().squeeze(0), truth, rtol=1e-6, atol=0)
    shape = (1, 72, 128) if isinstance(scale, Tensor) else (72, 128)
    tile = distances.block(slice(128, 200), slice(0, 128), torch.empty(shape), torch.empty(shape))
    torch.testing.assert_close(tile.double().view(72, 128), truth[128:, :128], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_few_coordinates_before_a_kink(dims: int) -> None:
    x1 = points(0, 100, [1.0] * dims)
    x2 = x1 + points(1, 100, [1e-4] * dims)
    everything = slice(0, 100)
    distances = SquaredDistances(x1, x2, 1.0, few=2)
    assert len(distances.apart) == (dims if dims <= 2 else 0)
    if dims <= 2:
        found = distances.block(everything, everything).double()
        torch.testing.assert_close(found, exact(x1, x2), rtol=1e-6, atol=0)


def test_blocks_of_a_batch_and_of_single_rows() -> None:
    x = torch.stack([points(0, 20, [900.0, 1.0]), points(1, 20, [1.0, 1.0])])
    distances = SquaredDistances(x, x, torch.tensor([[[1.0]], [[2.0]]]))
    rows = torch.tensor([3, 17, 5])
    truth = exact(x, x) * torch.tensor([[[1.0]], [[2.0]]])
    found = distances.block(rows, slice(4, 11)).double()
    torch.testing.assert_close(found, truth[:, rows, 4:11], rtol=1e-4, atol=ERROR)


def test_a_year_of_hours_is_positive_definite_in_float32() -> None:
    """Neighbours a hundredth of a lengthscale apart, a thousand lengthscales in all, and the smallest usual noise."""
    hours = torch.linspace(-500.0, 500.0, 100_001)[:1000] + 0.0
    x = torch.stack([hours - 400.0, torch.zeros_like(hours)], dim=-1)
    far = torch.cat([x, -x])
    operator = RadialKernelLinearOperator(
        far, torch.tensor(1.0), function=MATERN32, products=KernelProducts(tile_size=512)
    )
    with torch.no_grad():
        matrix = operator.to_dense().double()
    assert torch.linalg.eigvalsh(matrix).min() > -1e-4

"""Random numbers of a generator."""

import pytest
import torch

from gpy_iterative.random_numbers import integers, normal, permutation, uniform

DRAWS = {
    "normal": (lambda *given: normal((3, 2), *given), torch.float64),
    "uniform": (lambda *given: uniform((3, 2), *given), torch.float64),
    "integers": (lambda *given: integers(5, (3, 2), *given), torch.int64),
    "permutation": (lambda *given: permutation(6, *given), torch.int64),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_the_generators_whatever_the_default_device(name: str) -> None:
    draw, dtype = DRAWS[name]
    expected = draw(torch.Generator().manual_seed(0))
    assert expected.device.type == "cpu"
    assert expected.dtype == dtype
    with torch.device("meta"):
        again = draw(torch.Generator("cpu").manual_seed(0))
    assert torch.equal(again, expected)
    moved = draw(torch.Generator().manual_seed(0), torch.device("meta"))
    assert moved.device.type == "meta"
    assert moved.shape == expected.shape


def test_ranges() -> None:
    generator = torch.Generator().manual_seed(0)
    assert integers(3, (1000,), generator).unique().tolist() == [0, 1, 2]
    assert permutation(7, generator).sort().values.tolist() == list(range(7))
    numbers = uniform((1000,), generator)
    assert 0 <= numbers.min() < 0.05
    assert 0.95 < numbers.max() < 1
    assert normal((2,), generator, dtype=torch.float32).dtype == torch.float32

"""Blocks: solved exactly, or by their halves."""

import pytest
import torch

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_solvers import block_cholesky
from gpy_iterative.linear_solvers.block_cholesky import BlockFactor

SIZE = 20


@pytest.fixture
def block() -> torch.Tensor:
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return root @ root.mT + torch.eye(SIZE, dtype=torch.float64)


@pytest.fixture
def rhs() -> torch.Tensor:
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_block_without_halves_is_solved_exactly(block: torch.Tensor, rhs: torch.Tensor) -> None:
    factor = BlockFactor.of(block)
    assert factor.second is None
    torch.testing.assert_close(block @ factor.solve(rhs), rhs)
    assert factor.nbytes == SIZE * SIZE * 8


@pytest.mark.parametrize("size", [SIZE, SIZE - 1])
def test_halves_are_solved_forth_and_back(
    size: int, block: torch.Tensor, rhs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cholesky, "CPU_WHOLE", 10)
    block, rhs, expected = block[:size, :size], rhs[:size], torch.zeros_like(rhs[:size])
    for rows in (slice(0, 10), slice(10, size), slice(0, 10)):
        expected[rows] += torch.linalg.solve(block[rows, rows], (rhs - block @ expected)[rows])
    factor = BlockFactor.of(block)
    torch.testing.assert_close(factor.solve(rhs), expected)
    assert factor.nbytes < block.nbytes
    # Nearer to the solution than zero is, in the norm of the block, for every right-hand side.
    exact = torch.linalg.solve(block, rhs)
    energy = lambda vectors: (vectors * (block @ vectors)).sum(0)
    assert (energy(expected - exact) < energy(exact)).all()


def test_halves_that_have_no_factor(block: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cholesky, "CPU_WHOLE", 10)
    smallest = min(float(torch.linalg.eigvalsh(-block[rows, rows])[0]) for rows in (slice(10), slice(10, SIZE)))
    factor = BlockFactor.of(-block)
    assert factor.curvature == pytest.approx(smallest)
    assert torch.isfinite(factor.solve(block)).all()
    assert BlockFactor.of(block).curvature == torch.inf
    block[-1, -1] = torch.nan
    with pytest.raises(NonFiniteError):
        BlockFactor.of(block)

"""Blocks and their parts: exact where there is one part, symmetric Gauss-Seidel where there are several."""

import pytest
import torch

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.solvers import block_cholesky
from gpy_iterative.solvers.block_cholesky import BlockFactor

SIZE = 20


@pytest.fixture
def block() -> torch.Tensor:
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return root @ root.mT + torch.eye(SIZE, dtype=torch.float64)


@pytest.fixture
def rhs() -> torch.Tensor:
    return torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_one_part_is_exact(block: torch.Tensor, rhs: torch.Tensor) -> None:
    factor = BlockFactor.of(block)
    assert len(factor.factors) == 1
    torch.testing.assert_close(block @ factor.solve(rhs), rhs)
    assert factor.nbytes == SIZE * SIZE * 8


@pytest.mark.parametrize("length", [1, 8, 10, 19])
def test_parts_are_solved_forth_and_back(
    length: int, block: torch.Tensor, rhs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cholesky, "CPU_PART", length)
    starts = list(range(0, SIZE, length))
    expected = torch.zeros_like(rhs)
    for start in [*starts, *reversed(starts[:-1])]:
        rows = slice(start, start + length)
        expected[rows] += torch.linalg.solve(block[rows, rows], (rhs - block @ expected)[rows])
    found = BlockFactor.of(block).solve(rhs)
    torch.testing.assert_close(found, expected)
    # Nearer to the solution than zero is, in the norm of the block, for every right-hand side.
    exact = torch.linalg.solve(block, rhs)
    energy = lambda vectors: (vectors * (block @ vectors)).sum(0)
    assert (energy(found - exact) < energy(exact)).all()


def test_parts_take_less_memory_than_the_whole(block: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cholesky, "CPU_PART", 10)
    assert BlockFactor.of(block).nbytes == 3 * 10 * 10 * 8


def test_what_no_part_can_be_factored_from(block: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cholesky, "CPU_PART", 8)
    with pytest.raises(NotPositiveDefiniteError, match="A block of 8 rows"):
        BlockFactor.of(-block)
    block[-1, -1] = torch.nan
    with pytest.raises(NonFiniteError):
        BlockFactor.of(block)

"""Blocks of the system, with and without a Cholesky factor."""

import pytest
import torch

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_solvers.cholesky import block_cholesky

SIZE = 20


@pytest.fixture
def block() -> torch.Tensor:
    root = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return root @ root.mT + torch.eye(SIZE, dtype=torch.float64)


def test_a_block_is_solved_exactly(block: torch.Tensor) -> None:
    rhs = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    factor = block_cholesky(block)
    torch.testing.assert_close(block @ factor.solve(rhs), rhs)
    assert factor.curvature == torch.inf


def test_a_block_that_float32_cannot_factor_is_factored_in_float64(block: torch.Tensor) -> None:
    # Representable in float32, where rounding errors of the factorisation exceed the smallest eigenvalue.
    x = torch.linspace(0, 1, SIZE)
    matrix = torch.exp(-(x[:, None] - x).square() / 2)
    factor = block_cholesky(matrix)
    assert factor.lower.dtype == torch.float64
    assert factor.solve(torch.ones(SIZE, 1)).dtype == torch.float32


def test_a_block_that_has_no_factor(block: torch.Tensor) -> None:
    factor = block_cholesky(-block)
    assert factor.curvature == pytest.approx(float(torch.linalg.eigvalsh(-block)[0]))
    assert torch.isfinite(factor.solve(block)).all()


def test_entries_that_are_not_finite(block: torch.Tensor) -> None:
    block[-1, -1] = torch.nan
    with pytest.raises(NonFiniteError):
        block_cholesky(block)

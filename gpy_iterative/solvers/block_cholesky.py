"""Small blocks of the system, solved exactly: what projections are made of."""

import torch
from torch import Tensor

from gpy_iterative.solvers.jittered_cholesky import jittered_cholesky


def block_cholesky(block: Tensor) -> Tensor:
    """The lower Cholesky factor, in the precision and with as much jitter as the arithmetic needs.

    Raises:
        NonFiniteError: an entry is not finite.
        NotPositiveDefiniteError: no factor even with a relative jitter of 1e-4.
    """
    factor, info = torch.linalg.cholesky_ex(block)
    return jittered_cholesky(block.double(), f"A block of {len(block)} rows")[0] if info else factor


def block_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The block's inverse times rhs [m, s], in the dtype of rhs."""
    return torch.cholesky_solve(rhs.to(factor.dtype), factor).to(rhs.dtype)

"""Small blocks of the system, solved directly: what projections are made of."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from gpy_iterative.errors import NotPositiveDefiniteError
from gpy_iterative.linear_solvers.jittered_cholesky import JITTERS, jittered_cholesky
from gpy_iterative.worker_threads import run

#: Rows of a block that a CPU factors as a whole: a factor's time grows with the cube of its rows.
CPU_WHOLE = 512


def block_cholesky(block: Tensor) -> tuple[Tensor, float]:
    """The lower Cholesky factor in the precision, and with as much jitter, as it needs; and the block's curvature.

    That is a bound above the smallest eigenvalue where this is negative, infinite where the block has a factor. A block
    that is far from positive definite gets twice its smallest eigenvalue for a jitter.

    Raises:
        NonFiniteError: an entry is not finite.
    """
    factor, info = torch.linalg.cholesky_ex(block)
    if not info:
        return factor, math.inf
    block = block.double()
    try:
        factor, jitter = jittered_cholesky(block, f"A block of {len(block)} rows")
        failed = JITTERS[JITTERS.index(jitter) - 1] if jitter else -math.inf
        return factor, -failed * float(block.diagonal().amax())
    except NotPositiveDefiniteError:
        smallest = float(torch.linalg.eigvalsh(block)[0])
        identity = torch.eye(len(block), dtype=block.dtype, device=block.device)
        return torch.linalg.cholesky(block - 2 * smallest * identity), smallest


def block_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The block's inverse times rhs [m, s], in the dtype of rhs."""
    return torch.cholesky_solve(rhs.to(factor.dtype), factor).to(rhs.dtype)


@dataclass(frozen=True)
class BlockFactor:
    """What solves a block of the system: its Cholesky factor, or on a CPU those of a large block's halves.

    Halves are solved forth and back: each exactly, with the other as it is. (Symmetric Gauss-Seidel. The two factors of a
    block of 1,024 take a third of the time that its own does, and training steps on elevators and pol as many epochs.)

    Attributes:
        first: the factor of the block, or of its first half.
        second: of its second half; None where there are no halves.
        between: the entries left of the second half on the diagonal; None likewise.
        curvature: see `block_cholesky`; the lower one of the halves'.
    """

    first: Tensor
    second: Tensor | None = None
    between: Tensor | None = None
    curvature: float = math.inf

    @classmethod
    def of(cls, block: Tensor) -> Self:
        """The factor of a block [m, m]. Raises what `block_cholesky` does."""
        if block.device.type != "cpu" or len(block) <= CPU_WHOLE:
            factor, curvature = block_cholesky(block)
            return cls(factor, curvature=curvature)
        middle = -(-len(block) // 2)
        halves = block[:middle, :middle], block[middle:, middle:]
        first, second = run([partial(block_cholesky, half) for half in halves])
        return cls(first[0], second[0], block[middle:, :middle].clone(), min(first[1], second[1]))

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return sum(tensor.nbytes for tensor in (self.first, self.second, self.between) if tensor is not None)

    def solve(self, rhs: Tensor) -> Tensor:
        """The block's inverse times rhs [m, s]; nearly, where there are halves."""
        if self.second is None or self.between is None:
            return block_solve(self.first, rhs)
        top, bottom = rhs.tensor_split([len(self.first)])
        forth = block_solve(self.first, top)
        solved = block_solve(self.second, bottom - self.between @ forth)
        return torch.cat([block_solve(self.first, top - self.between.mT @ solved), solved])

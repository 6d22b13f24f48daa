"""Small blocks of the system, solved directly: what projections are made of."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gpy_iterative.solvers.jittered_cholesky import jittered_cholesky

#: Rows of a block that a CPU factors as a whole: a factor's time grows with the cube of its rows.
CPU_WHOLE = 512


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


@dataclass(frozen=True)
class BlockFactor:
    """What solves a block of the system: its Cholesky factor, or on a CPU those of a large block's halves.

    Halves are solved forth and back: each exactly, with the other as it is. (Symmetric Gauss-Seidel. The two factors of a
    block of 1,024 take a third of the time that its own does, and training steps on elevators and pol as many epochs.)

    Attributes:
        first: the factor of the block, or of its first half.
        second: of its second half; None where there are no halves.
        between: the entries left of the second half on the diagonal; None likewise.
    """

    first: Tensor
    second: Tensor | None = None
    between: Tensor | None = None

    @classmethod
    def of(cls, block: Tensor) -> Self:
        """The factor of a block [m, m]. Raises what `block_cholesky` does."""
        if block.device.type != "cpu" or len(block) <= CPU_WHOLE:
            return cls(block_cholesky(block))
        middle = -(-len(block) // 2)
        return cls(
            block_cholesky(block[:middle, :middle]),
            block_cholesky(block[middle:, middle:]),
            block[middle:, :middle].clone(),
        )

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

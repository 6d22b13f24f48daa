"""Small blocks of the system, solved exactly: what projections are made of."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gpy_iterative.solvers.jittered_cholesky import jittered_cholesky

#: Rows of a part that a CPU factors by itself: a factor's time grows with the cube of its rows.
CPU_PART = 512


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
    """What solves a block of the system: one Cholesky factor, or on a CPU one for each part of a large block.

    Parts are solved in turn, forth and back: each time exactly, and with the others as they are. (Symmetric Gauss-Seidel; a
    block of 1,024 costs a third of its own factor, and training steps on elevators and pol take as many epochs.)

    Attributes:
        starts: the first rows of the parts.
        factors: a Cholesky factor each.
        left: the block's entries left of each part on the diagonal.
    """

    starts: tuple[int, ...]
    factors: tuple[Tensor, ...]
    left: tuple[Tensor, ...]

    @classmethod
    def of(cls, block: Tensor) -> Self:
        """The factor of a block [m, m]. Raises what `block_cholesky` does."""
        length = CPU_PART if block.device.type == "cpu" else len(block)
        parts = [slice(start, start + length) for start in range(0, len(block), length)]
        return cls(
            tuple(part.start for part in parts),
            tuple(block_cholesky(block[part, part]) for part in parts),
            tuple(block[part, : part.start].clone() for part in parts),
        )

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return sum(tensor.nbytes for tensor in (*self.factors, *self.left))

    def solve(self, rhs: Tensor) -> Tensor:
        """The block's inverse times rhs [m, s]; where there are parts, nearly."""
        count, solution = len(self.factors), torch.zeros_like(rhs)
        for part in range(count):
            self._solve_part(part, rhs, solution, known=part)
        for part in range(count - 2, -1, -1):
            self._solve_part(part, rhs, solution, known=count)
        return solution

    def _solve_part(self, part: int, rhs: Tensor, solution: Tensor, known: int) -> None:
        start, factor = self.starts[part], self.factors[part]
        rows = slice(start, start + len(factor))
        rest = rhs[rows] - self.left[part] @ solution[:start]
        for later in range(part + 1, known):
            rest -= self.left[later][:, rows].mT @ solution[self.starts[later] :][: len(self.factors[later])]
        solution[rows] = block_solve(factor, rest)

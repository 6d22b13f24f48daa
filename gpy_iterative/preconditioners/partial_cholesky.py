"""The partial Cholesky factor of one kernel matrix, grown pivot by pivot or block by block.

Greedy pivots are where the rest of the diagonal is largest. Random ones are drawn in proportion to it (Chen, Epperly,
Tropp and Webber 2022, "Randomly pivoted Cholesky"), in blocks of proposals from which rejection makes the very same
distribution (Epperly, Tropp and Webber 2024, "Embrace rejection: kernel matrix approximation by accelerated randomly
pivoted Cholesky").
"""

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import dense_rows


class PartialCholesky:
    """L [n, k] with L L^T nowhere larger than K, and exact on its pivots.

    Args:
        kernel: K [n, n], unbatched.
        diagonal: of K [n].
        capacity: the largest rank.

    Attributes:
        rest: the diagonal of K - L L^T [n].
        rank: k.
    """

    def __init__(self, kernel: LinearOperator, diagonal: Tensor, capacity: int) -> None:
        self.kernel, self.rest, self.rank = kernel, diagonal.clone(), 0
        # Columns are rows here: each step reads and writes contiguous memory.
        self._columns = diagonal.new_zeros(capacity, diagonal.shape[-1])
        self._pivots = torch.zeros(capacity, dtype=torch.long, device=diagonal.device)
        self._stop = torch.finfo(diagonal.dtype).eps * diagonal.max()

    @property
    def factor(self) -> Tensor:
        """L [n, k]."""
        return self._columns[: self.rank].mT

    @property
    def pivots(self) -> Tensor:
        """[k], in the order in which they were taken."""
        return self._pivots[: self.rank]

    def is_exhausted(self) -> bool:
        """Whether what is left of the diagonal is rounding noise."""
        return bool((self.rest <= self._stop).all())  # written so that NaN is found by what comes next

    def add_greedy(self, rank: int) -> None:
        """Grows to a rank, or to where the matrix is exhausted."""
        while self.rank < rank:
            # A tensor of one index, not a number: an accelerator keeps it to itself.
            pivot = self.rest.argmax().unsqueeze(0)
            left = self.rest[pivot]
            if left <= self._stop:
                return
            column = dense_rows(self.kernel, pivot).squeeze(-2)
            column = column - self._columns[: self.rank, pivot].squeeze(-1) @ self._columns[: self.rank]
            column /= left.sqrt()
            self._append(column.unsqueeze(0), pivot)

    def add_random(self, rank: int, proposals: int, generator: torch.Generator) -> None:
        """The same with random pivots: `proposals` at a time, of which about as many are taken as are needed."""
        while self.rank < rank and not self.is_exhausted():
            candidates = self._propose(proposals, generator)
            block = self.complement(candidates, self.entries(candidates))
            # A running difference until now. Where rounding alone had left something, nothing is left to be proposed again:
            # every round takes its first candidate or rules it out, and the rounds come to an end.
            self.rest[candidates] = block.diagonal().clamp_min(0).to(self.rest)
            threshold = torch.rand(proposals, generator=generator, device=generator.device, dtype=torch.float64)
            chosen, lower = _accepted(block, threshold.cpu(), float(self._stop), rank - self.rank)
            if not len(chosen):
                continue
            pivots, lower = candidates[chosen.to(candidates.device)], lower.to(self.rest)
            columns = dense_rows(self.kernel, pivots) - self._columns[: self.rank, pivots].mT @ self.factor.mT
            self._append(torch.linalg.solve_triangular(lower, columns, upper=False), pivots)

    def entries(self, rows: Tensor) -> Tensor:
        """K on some rows and columns [m, m], on the host in float64."""
        size = len(rows)
        return self.kernel[rows.repeat_interleave(size), rows.repeat(size)].view(size, size).double().cpu()

    def complement(self, rows: Tensor, entries: Tensor) -> Tensor:
        """K - L L^T there, given these entries of K."""
        known = self._columns[: self.rank, rows].double().cpu()
        return entries - known.mT @ known

    def _propose(self, size: int, generator: torch.Generator) -> Tensor:
        """Rows [size] with repetition, in proportion to what is left of the diagonal."""
        left = self.rest.masked_fill(self.rest <= self._stop, 0).double().cumsum(-1)
        if not torch.isfinite(left[-1]):
            raise NonFiniteError("The kernel matrix has entries that are not finite: check data and hyperparameters.")
        drawn = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64).to(left.device)
        # `right`: a row without any rest is never met, not even by a drawn 0.
        return torch.searchsorted(left, drawn * left[-1], right=True).clamp_max(len(left) - 1)

    def _append(self, columns: Tensor, pivots: Tensor) -> None:
        first, self.rank = self.rank, self.rank + len(pivots)
        self._columns[first : self.rank], self._pivots[first : self.rank] = columns, pivots
        self.rest = (self.rest - columns.square().sum(0)).clamp_min_(0)
        self.rest[self.pivots] = 0


def _accepted(block: Tensor, threshold: Tensor, stop: float, most: int) -> tuple[Tensor, Tensor]:
    """Which candidates are taken, `most` at the most, and their lower Cholesky factor.

    Args:
        block: the rest of the kernel matrix on the candidates [m, m].
        threshold: [m], uniform draws.
        stop: what is left of the diagonal that is rounding.

    Each is drawn as if those before it in its block had not been taken; it is taken with the share of its diagonal
    entry that they left, which makes the draw right again.
    """
    rest, start, chosen = block.clone(), block.diagonal().clone(), []
    columns = [block[:, :0]]
    for candidate in range(len(block)):
        left = rest[candidate, candidate]
        if len(chosen) < most and left > stop and threshold[candidate] * start[candidate] < left:
            chosen.append(candidate)
            column = rest[:, candidate] / left.sqrt()
            columns.append(column.unsqueeze(-1))
            rest = rest - torch.outer(column, column)
    taken = torch.tensor(chosen, dtype=torch.long)
    return taken, torch.cat(columns, dim=-1)[taken].tril()


def factor_on(rows: Tensor, block: Tensor) -> tuple[Tensor, float]:
    """K C times the inverse transpose of the Cholesky factor of C^T K C [n, k], and how far its jitter was raised.

    Args:
        rows: C^T K [k, n]; for pivots, rows of K.
        block: C^T K C [k, k] in float64.

    The jitter keeps L L^T below K, and covers twice the block's negative eigenvalues, which are rounding errors of the
    kernel. It is fixed where these are smaller than half of it. Where they are larger it is raised, continuously in the
    hyperparameters, to what is returned in units of the block's largest diagonal entry: directions that carry nothing
    but rounding then fade out, and the rest of the factor stays as good as it was. 0 where it was not raised.
    """
    if not torch.isfinite(block).all():
        raise NonFiniteError("The kernel matrix has entries that are not finite: check data and hyperparameters.")
    scale = float(block.diagonal().max()) if len(block) else 0.0
    if not scale > 0:  # a kernel that is zero
        return torch.zeros_like(rows).mT, 0.0
    jitter, raised = max(1e-10, len(rows) * torch.finfo(rows.dtype).eps), 0.0
    identity = torch.eye(len(block), dtype=block.dtype, device=block.device)
    if torch.linalg.cholesky_ex(block + 0.5 * jitter * scale * identity).info:
        jitter = raised = -2 * float(torch.linalg.eigvalsh(block)[0]) / scale
    lower = torch.linalg.cholesky(block + jitter * scale * identity)
    # By its inverse: a product takes a third of the time of a solve with so many columns, and float64 has digits left.
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return (inverse @ rows.double()).mT.to(rows.dtype), raised

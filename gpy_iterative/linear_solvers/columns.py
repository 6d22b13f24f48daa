"""The columns of one solve: their scales, their norms, which are done, and the best iterate of each.

A column is done when its relative residual is within its group's tolerance; it then leaves the block, and the
products of the remaining iterations become narrower. Norms live on the host, which waits for an accelerator
to read them: it does so every few iterations only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import rows_matmul
from gpy_iterative.linear_solvers.solution import ColumnGroup

#: Rows, evenly spread, on which a running residual is compared with the true one; smaller systems are compared as a whole.
VERIFIED_ROWS = 256
#: A running residual is taken for the true one while it differs by less than this part of the tolerance.
ALLOWED_DRIFT = 0.1
#: A new best iterate is copied when its norm is below this part of the last copy's: few copies, almost the best.
WORTH_A_COPY = 0.9
#: Iterations between two readings of an accelerator. A column runs on for so many less one at the most.
READ_EVERY = 4
#: What helps where a number is not finite.
ADVICE = (
    "Check the data and hyperparameters for extreme values; a noise constraint and float64 keep the arithmetic within "
    "range."
)
#: How much lower a column aims after its true residual turned out above the tolerance.
LOWER_AIM = 0.8


def reads_every(device: torch.device) -> int:
    """How many iterations on this device pass from one reading of it to the next."""
    return 1 if device.type == "cpu" else READ_EVERY


@dataclass
class Iterate:
    """Where an iteration stands: solutions, residuals and right-hand sides of the open columns, [n, s].

    Value and residual belong to the iteration, which may overwrite them; the right-hand sides are read only. The
    shortfall, as last observed, is the largest residual over its tolerance; the iteration is over when it is 1.
    """

    value: Tensor
    residual: Tensor
    rhs: Tensor
    shortfall: float = math.inf

    def keep(self, columns: Tensor) -> None:
        """Narrows the block to some of its columns."""
        self.value, self.residual, self.rhs = (tensor[:, columns] for tensor in (self.value, self.residual, self.rhs))


class Columns:
    """All columns of one solve, scaled to right-hand sides of norm one.

    Args:
        operator: H [n, n].
        rhs: B [n, s].
        groups: neighbouring columns with a tolerance of their own.
        stopping: see `IterativeSolver`.
        recursive: the iteration's residual is `rhs - H value` up to rounding; else it is an estimate, and no iterate
            counts before its true residual is known.
        initial_guess: [n, s] or None.
        guess_image: H times it, where that is known.
        numbers: what the columns are called in errors; None counts them.
        scaled: whether columns are scaled to norm one; else their norms count as relative already.
        advice: what errors say.

    Attributes:
        reads_every: iterations from one observation to the next.
        max_rounds: a round ends with true residuals; where they miss the tolerance that the running ones had reached,
            another follows. In float32 this measures better than recomputing the residual every so many iterations, which
            costs conjugate gradients the conjugacy of its directions.
        value, residual, norms: the best iterate so far, its residual and relative norms.
        overhead: passes over the matrix that were spent here.

    Raises:
        NonFiniteError: a right-hand side, its norm or the guess is not finite.
    """

    max_rounds: ClassVar[int] = 10

    def __init__(
        self,
        operator: LinearOperator,
        rhs: Tensor,
        groups: Sequence[ColumnGroup],
        *,
        stopping: Literal["columns", "mean"],
        recursive: bool,
        initial_guess: Tensor | None,
        guess_image: Tensor | None = None,
        numbers: Tensor | None = None,
        scaled: bool = True,
        advice: str = ADVICE,
    ) -> None:
        self.operator, self.groups, self.stopping, self.recursive = operator, groups, stopping, recursive
        self._advised = advice
        self._sizes = [group.size for group in groups]
        self.tolerances = torch.tensor([g.tolerance for g in groups for _ in range(g.size)], dtype=torch.float64)
        self._aims = self.tolerances.clone()
        self.overhead = 0.0
        self.reads_every = reads_every(rhs.device)
        self._open = torch.arange(rhs.shape[-1])
        self._numbers = self._open if numbers is None else numbers
        self._norms_of(rhs, iteration=0)  # a norm that overflows would scale its column to zero
        norms = torch.linalg.vector_norm(rhs, dim=-2, dtype=torch.float64).to(rhs.dtype)  # tiny squares are no zeros
        # A zero column has the solution zero; its scale only has to be harmless.
        self.scale = torch.where(norms > 0, norms, 1.0) if scaled else torch.ones_like(norms)
        self.rhs = rhs / self.scale
        if initial_guess is None:
            self.value, self.residual = torch.zeros_like(self.rhs), self.rhs.clone()
        else:
            product = operator._matmul(initial_guess) if guess_image is None else guess_image
            self.overhead += 1  # whoever made it
            self.value, self.residual = self._scaled_start(initial_guess / self.scale, product / self.scale)
        self.norms = self._norms_of(self.residual, iteration=0)
        self._running = self.norms.clone()
        self._round = self._open
        self._candidate: Tensor | None = None

    def _scaled_start(self, guess: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
        """Value and residual of the guess, each column scaled to be nearest to the solution in the norm of H.

        The product is needed anyway, and a guess so scaled is never farther away than zero. A column whose residual
        is nevertheless the larger one starts at zero: a warm start is never reported worse than a cold one.
        """
        energy = (guess * product).sum(-2)
        is_safe = energy > 0
        factor = (guess * self.rhs).sum(-2) / torch.where(is_safe, energy, torch.ones_like(energy))
        norms = torch.linalg.vector_norm(self.rhs - product * factor, dim=-2)
        # Written so that NaN stays NaN, and is found.
        factor = torch.where((norms >= 1) | (energy <= 0), torch.zeros_like(factor), factor)
        return guess * factor, self.rhs - product * factor

    # What is open

    def is_done(self) -> bool:
        """Whether the best iterates satisfy the stopping rule."""
        return not self._is_open(self.norms, self.tolerances).any()

    def shortfall(self) -> float:
        """How far the best iterates are from the tolerance: the largest norm over its tolerance; 1 or less is done."""
        return self._shortfall(self.norms, self.tolerances)

    def _shortfall(self, norms: Tensor, tolerances: Tensor) -> float:
        if self.stopping == "columns":
            return float((norms / tolerances).max())
        pairs = zip(norms.split(self._sizes), tolerances.split(self._sizes), strict=True)
        return max(float(part.mean() / tolerance.mean()) for part, tolerance in pairs if len(part))

    def _is_open(self, norms: Tensor, tolerances: Tensor) -> Tensor:
        if self.stopping == "columns":
            return norms > tolerances
        return torch.full_like(norms, self._shortfall(norms, tolerances) > 1, dtype=torch.bool)

    # A round of iterations: begin, observe after each, end

    def begin(self) -> Iterate | None:
        """The block of all columns that are not done, at their best iterates; None when there is none."""
        self._open = self._round = self._is_open(self.norms, self.tolerances).nonzero().squeeze(-1)
        if not len(self._open):
            return None
        self._running = self.norms.clone()
        self._candidate = None if self.recursive else self.value.clone()
        columns = self._open.to(self.rhs.device)
        value, residual, rhs = (tensor[:, columns] for tensor in (self.value, self.residual, self.rhs))
        return Iterate(value, residual, rhs, self._shortfall(self._running, self._aims))

    def observe(self, iterate: Iterate, iteration: int, epochs: float) -> Tensor | None:
        """Reads the norms after an iteration: the columns of the block that go on, or None when all do.

        `epochs` is the work of all iterations so far.
        """
        norms = self._running[self._open] = self._norms_of(iterate.residual, iteration)
        iterate.shortfall = self._shortfall(self._running, self._aims)
        leaving = ~self._is_open(self._running, self._aims)[self._open]
        if self.recursive:
            best = self.norms[self._open]
            self._store(iterate, norms, (norms < WORTH_A_COPY * best) | (leaving & (norms < best)))
        if not leaving.any():
            return None
        if self._candidate is not None:
            index = leaving.nonzero().squeeze(-1)
            self._candidate[:, self._on_device(self._open[index])] = iterate.value[:, self._on_device(index)]
        staying = (~leaving).nonzero().squeeze(-1)
        self._open = self._open[staying]
        return self._on_device(staying)

    def end(self, iterate: Iterate, iteration: int) -> None:
        """Closes the round with true residuals. Columns that turn out to miss their tolerance will aim lower."""
        value = self.latest(iterate, iteration)
        if self.recursive:
            self._verify(iteration)
        else:
            self._accept_candidate(value, iteration)
        self._running = self.norms.clone()
        missed = self._is_open(self.norms, self.tolerances)
        self._aims[missed] *= LOWER_AIM

    def close(self, iterate: Iterate, kept: Tensor | None, iteration: int) -> Tensor:
        """Ends the round for all columns that an observation let go on; an empty choice of columns, as `observe` gives."""
        if kept is not None:
            iterate.keep(kept)
        self.latest(iterate, iteration)
        self._open = self._open[:0]
        return self._on_device(self._open)

    def latest(self, iterate: Iterate, iteration: int) -> Tensor:
        """The values [n, s] that the round has come to, of which nothing but running residuals is known yet."""
        if self._candidate is not None:
            self._candidate[:, self._on_device(self._open)] = iterate.value
            return self._candidate
        # Read again: the last iterations may not have been observed.
        norms = self._running[self._open] = self._norms_of(iterate.residual, iteration)
        self._store(iterate, norms, norms < self.norms[self._open])
        return self.value

    def _store(self, iterate: Iterate, norms: Tensor, which: Tensor) -> None:
        index = which.nonzero().squeeze(-1)
        if not len(index):
            return
        target = self._open[index]
        self.norms[target] = norms[index]
        if len(target) == self.value.shape[-1]:  # all of them: a plain copy, and a tenth of the time
            self.value.copy_(iterate.value)
            self.residual.copy_(iterate.residual)
            return
        source, place = self._on_device(index), self._on_device(target)
        self.value[:, place] = iterate.value[:, source]
        self.residual[:, place] = iterate.residual[:, source]

    def _accept_candidate(self, candidate: Tensor, iteration: int) -> None:
        """Takes those columns whose true residual is smaller than the best one's."""
        columns = self._on_device(self._round)
        value = candidate[:, columns]
        residual = self.rhs[:, columns] - self.operator._matmul(value)
        self.overhead += 1
        self._open = self._round
        norms = self._norms_of(residual, iteration)
        self._store(Iterate(value, residual, residual), norms, norms < self.norms[self._round])

    def _verify(self, iteration: int) -> None:
        """Compares the round's residuals with true ones on some rows, and replaces them where they have drifted."""
        columns, size = self._on_device(self._round), self.rhs.shape[0]
        value = self.value[:, columns]
        if size > VERIFIED_ROWS:
            rows = self._watched_rows()
            drift = self._true_rows(rows, columns, value) - self.residual[rows][:, columns]
            drift = torch.linalg.vector_norm(drift, dim=0).double().cpu()
            if (drift * math.sqrt(size / VERIFIED_ROWS) <= ALLOWED_DRIFT * self.tolerances[self._round]).all():
                return
        residual = self.rhs[:, columns] - self.operator._matmul(value)
        self.overhead += 1
        self._open = self._round
        self.norms[self._round] = self._norms_of(residual, iteration)
        self.residual[:, columns] = residual

    def _watched_rows(self) -> Tensor:
        size = self.rhs.shape[0]
        return torch.linspace(0, size - 1, self._num_watched_rows(), device=self.rhs.device).long()

    def _num_watched_rows(self) -> int:
        return min(VERIFIED_ROWS, self.rhs.shape[0])

    def _true_rows(self, rows: Tensor, columns: Tensor, value: Tensor) -> Tensor:
        """Those rows of the true residuals of some columns, whose values are given."""
        self.overhead += len(rows) / self.rhs.shape[0]
        return self.rhs[rows][:, columns] - rows_matmul(self.operator, rows, value)

    # Norms and results

    def _norms_of(self, residual: Tensor, iteration: int) -> Tensor:
        norms = torch.linalg.vector_norm(residual, dim=-2).double().cpu()
        if not torch.isfinite(norms).all():
            first = int((~torch.isfinite(norms)).nonzero()[0])
            column = int(self._numbers[self._open[first]])
            raise NonFiniteError(
                f"The residual of column {column} of a linear solve is {norms[first].item()} after "
                f"{iteration} iterations. {self._advised}"
            )
        return norms

    def group_norms(self, *, running: bool = False) -> dict[str, float]:
        """One relative norm a group, of the best iterates or of the running ones."""
        reduce = torch.Tensor.mean if self.stopping == "mean" else torch.Tensor.amax
        parts = (self._running if running else self.norms).split(self._sizes)
        return {g.name: float(reduce(part)) if g.size else 0.0 for g, part in zip(self.groups, parts, strict=True)}

    def unscaled(self) -> tuple[Tensor, Tensor]:
        """Value and residual of the best iterates, in the scale of the right-hand sides."""
        return self.value * self.scale, self.residual * self.scale

    def _on_device(self, index: Tensor) -> Tensor:
        return index.to(self.rhs.device)

"""Iterative refinement: iterations in lower precision, residuals in the operator's own.

A round solves H' d = r on the operator's twin H' for corrections d until the twin's error has taken over, and adds them to
the solutions; the next round starts from true residuals r = b - H v. So what is reached is what the tolerance says of H,
whatever the twin is like: a poor one takes more rounds, and where no correction makes a residual smaller the solve has
stagnated. Carson & Higham 2018, "Accelerating the solution of linear systems by iterative refinement in three
precisions", with an iterative solver in the place of the LU factors.
"""

from typing import ClassVar, Literal

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_solvers.columns import LOWER_AIM, Columns, Iterate
from gpy_iterative.linear_solvers.linear_system import LinearSystem
from gpy_iterative.linear_solvers.solution import ColumnGroup

#: Iterations at the least between two looks at how far the twin's residuals are from true ones. A look costs a few rows of
#: the matrix, all of them where it is small, and no more than one part in so many of the work.
WATCHED_EVERY = 20
#: A twin that was rounded to a matrix with negative eigenvalues may let residuals grow: no farther than this.
DIVERGENCE = 1e3


class RefinedColumns(Columns):
    """Columns whose rounds are corrections on a twin of the operator.

    Args:
        system: without batch dimensions.
        twin: of its operator, H' [n, n], in the dtype that the iterations compute in.

    A round lowers a residual by the root of the twin's relative rounding error at the most: far enough to be worth its
    true residual, and hardly ever so far that the twin's error has taken over.

    Stopping and recursive are as in `Columns`. True residuals, one product with the operator a round, are overhead.
    """

    max_rounds: ClassVar[int] = 50

    def __init__(
        self,
        system: LinearSystem,
        twin: LinearOperator,
        *,
        stopping: Literal["columns", "mean"],
        recursive: bool,
    ) -> None:
        super().__init__(
            system.operator,
            system.rhs,
            system.groups,
            stopping=stopping,
            recursive=recursive,
            initial_guess=system.initial_guess,
            guess_image=system.guess_image,
        )
        self._twin, self._reduction = twin, torch.finfo(twin.dtype).eps ** 0.5
        self._watched_at = 0.0
        self._aims *= LOWER_AIM  # room for what the twin leaves

    def begin(self) -> Iterate | None:
        """The block of corrections of all columns that are not done, from zero; None when there is none."""
        self._open = self._round = self._is_open(self.norms, self.tolerances).nonzero().squeeze(-1)
        if not len(self._open):
            return None
        self._running = self.norms.clone()
        self._corrections = Columns(
            self._twin,
            self.residual[:, self._on_device(self._round)].to(self._twin.dtype),
            self._groups_of_round(),
            stopping=self.stopping,
            recursive=self.recursive,
            initial_guess=None,
            numbers=self._round,
            scaled=False,
            advice=self._advice(),
        )
        return self._corrections.begin()

    def observe(self, iterate: Iterate, iteration: int, epochs: float) -> Tensor | None:
        """Reads the norms of the twin's residuals; the columns of the block that go on, or None when all do."""
        has_drifted = self.recursive and self._is_watched(iteration, epochs) and self._has_drifted(iterate)
        kept = self._corrections.observe(iterate, iteration, epochs)
        self._running[self._round] = self._corrections._running
        has_diverged = (self._running > DIVERGENCE * self.norms)[self._round].any()
        return self._corrections.close(iterate, kept, iteration) if has_drifted or has_diverged else kept

    def _is_watched(self, iteration: int, epochs: float) -> bool:
        """Whether it is time for another look. Steps of a few rows each are no reason to take one every few of them."""
        cost = self._num_watched_rows() / self.rhs.shape[0]
        if iteration % WATCHED_EVERY or epochs - self._watched_at < WATCHED_EVERY * cost:
            return False
        self._watched_at = epochs
        return True

    def _has_drifted(self, iterate: Iterate) -> bool:
        """Whether the twin's residuals, of the columns together, are nearer to zero than to the true ones."""
        columns = self._on_device(self._round[self._corrections._open])
        value = self.value[:, columns] + iterate.value
        rows = self._watched_rows()
        drift = self._true_rows(rows, columns, value) - iterate.residual[rows]
        return bool(torch.linalg.matrix_norm(drift) > torch.linalg.matrix_norm(iterate.residual[rows]))

    def end(self, iterate: Iterate, iteration: int) -> None:
        """Adds the corrections of those columns whose true residuals become smaller by it."""
        columns = self._on_device(self._round)
        candidate = self.value.clone()
        candidate[:, columns] += self._corrections.latest(iterate, iteration).to(candidate.dtype)
        self._accept_candidate(candidate, iteration)
        missed = self._is_open(self.norms, self.tolerances) & ~self._is_open(self._running, self._aims)
        self._aims[missed] *= LOWER_AIM
        self._running = self.norms.clone()

    def _advice(self) -> str:
        return (
            "The iterations computed with precision='float32', and the kernel's values may be beyond its range: leave "
            "KernelProducts(precision='native')."
        )

    def _groups_of_round(self) -> list[ColumnGroup]:
        """The open columns of every group, with what they aim at now; means where the means are compared."""
        aims, norms = (torch.Tensor.mean,) * 2 if self.stopping == "mean" else (torch.Tensor.amin, torch.Tensor.amax)
        groups, start = [], 0
        for group in self.groups:
            members = self._round[(self._round >= start) & (self._round < start + group.size)]
            start += group.size
            if len(members):
                aim = max(float(aims(self._aims[members])), self._reduction * float(norms(self.norms[members])))
                groups.append(ColumnGroup(group.name, len(members), aim))
        return groups

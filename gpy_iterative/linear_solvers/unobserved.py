"""Entries of a Kronecker system that have no datum, such as a station's missing days.

With P = H^-1 of the whole system, o the data and e the other entries, H_oo^-1 = P_oo - P_oe P_ee^-1 P_eo and
log|H_oo| = log|H| + log|P_ee|. P_ee comes from eigenvectors, one axis at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial, reduce

import torch
from torch import Tensor

from gpy_iterative.errors import NotPositiveDefiniteError
from gpy_iterative.linear_operators.radial.grid import row_products
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.worker_threads import ByDevice, divided, run

#: Numbers of a derivative that are held at a time.
NUMBERS = ByDevice(cpu=2**23, accelerator=2**27)


class Unobserved:
    """P_ee of m entries.

    Args:
        entries: e, numbers [m] of (cell, task).
        bases: Q_1, Q_2, ..., W with P = C diag(values) C^T, C = Q_1 x Q_2 x ... x W.
        values: [*sizes, T].

    Cost, for an axis of k inputs and N entries in all: N (k^2 + m^2 / k) + m^3 / 6 multiply-adds; twice that for
    derivatives.
    """

    def __init__(self, entries: Tensor, bases: Sequence[Tensor], values: Tensor) -> None:
        self.entries, self._values = entries, values
        (*self._bases, self._tasks_basis), (*self._places, task) = bases, torch.unravel_index(entries, values.shape)
        self._tasks = self._tasks_basis[task]  # [m, T]
        of_tasks = lambda group, columns: torch.einsum("mt,gt,tmg->gm", self._tasks, self._tasks[group], columns)
        matrix = self._in_order(self._gram(values, of_tasks))
        self._lower, info = torch.linalg.cholesky_ex(matrix)
        if info:
            raise NotPositiveDefiniteError(
                "The kernel with noise is singular to rounding: keep the noise away from zero."
            )

    def logdet(self) -> Tensor:
        return 2 * self._lower.diagonal().log().sum()

    def correction(self, rotated: Tensor) -> Tensor:
        """C^T E^T P_ee^-1 E C diag(values) rotated, for [*sizes, T, s]."""
        number = self._cheapest
        (used, _, groups), rows = self._by_place(number), self._rows(number, with_tasks=True)
        weighted = (self._values.unsqueeze(-1) * rotated).movedim(number, 0)
        by_place = (used @ weighted.flatten(1)).unflatten(1, (rows.shape[1], -1))
        found = self._in_order([rows[group] @ at for group, at in zip(groups, by_place, strict=True)])
        solved = torch.cholesky_solve(found, self._lower)
        by_place = torch.stack([rows[group].mT @ solved[group] for group in groups])
        return (used.mT @ by_place.flatten(1)).view(weighted.shape).movedim(0, number)

    def explained(self, rows: Sequence[Tensor]) -> Tensor:
        """|P_ee^-1/2 E C diag(values) r|^2 [t] of products r of rows [t, size] of all axes and tasks."""
        number = self._cheapest
        (used, _, groups), of_entries = self._by_place(number), self._rows(number, with_tasks=True)
        values, others = self._values.movedim(number, 0).flatten(1), row_products([*rows[:number], *rows[number + 1 :]])
        product = lambda own, group: of_entries[group] @ (((rows[number] * own) @ values) * others).mT
        found = self._in_order(run([partial(product, *pair) for pair in zip(used, groups, strict=True)], values.device))
        return torch.linalg.solve_triangular(self._lower, found, upper=False).square().sum(0)

    @cached_property
    def _inverse(self) -> Tensor:
        with divided():  # LAPACK's threads wait for each other
            return torch.cholesky_inverse(self._lower)

    def score(self, spectra: Sequence[Tensor]) -> Iterator[Tensor]:
        """Derivatives of -log|P_ee| by K_1, K_2, ..., B, with eigenvalues `spectra` in the bases, and by N."""
        for number in range(len(self._bases)):
            yield self._by_axis(number, outer([each for place, each in enumerate(spectra) if place != number]))
        yield from self._by_tasks(outer(spectra[:-1]))

    def _by_axis(self, number: int, others: Tensor) -> Tensor:
        """By K_k: Q X Q^T, X = sum_b others_b A_b^T V_b A_b, A_b = Q diag(values_b), b of the other axes."""
        basis, values, others = self._bases[number], self._values.movedim(number, 0).flatten(1), others.flatten()
        (used, place, groups), rows = self._by_place(number), self._rows(number, with_tasks=True)
        result = torch.zeros_like(basis)
        for part in blocks(len(others), max(NUMBERS.on(basis.device) // max(used.numel(), len(place)), 1)):
            some = rows[:, part]
            pairs = basis.new_zeros(len(used), len(used), some.shape[-1])  # V
            add = lambda at, group, some=some: at.index_add_(0, place, some * (self._inverse[:, group] @ some[group]))
            run([partial(add, *pair) for pair in zip(pairs, groups, strict=True)], basis.device)
            scaled = used * values[:, part].mT.unsqueeze(-2)
            products = (pairs * others[part]).movedim(-1, 0) @ scaled
            result.addmm_(scaled.flatten(0, 1).mT, products.flatten(0, 1))
        return basis @ result @ basis.mT

    def _by_tasks(self, of_cells: Tensor) -> Tensor:
        """By B and N: W X W^T, [2, T, T]."""
        basis, values = self._tasks_basis, self._values
        pairs = (values.unsqueeze(-1) * values.unsqueeze(-2)).flatten(-2)
        weights = torch.cat([of_cells.unsqueeze(-1) * pairs, pairs], dim=-1)

        def of_group(group: Tensor, columns: Tensor) -> Tensor:
            products = (columns * self._inverse[:, group]).unflatten(0, (2, *basis.shape))
            return torch.einsum("ktumg,mt,gu->ktu", products, self._tasks, self._tasks[group])

        return basis @ torch.stack(self._gram(weights, of_group)).sum(0) @ basis.mT

    def _gram(self, weights: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """What `use` makes of groups of columns of E (Q_1 x Q_2 x ...) diag(weights) (Q_1 x Q_2 x ...)^T E^T [q, m, m]."""
        number = self._cheapest
        (used, place, groups), rows = self._by_place(number), self._rows(number)
        weights = weights.movedim(number, 0).reshape(used.shape[-1], -1, weights.shape[-1]).movedim(-1, 0)

        def of_place(own: Tensor, group: Tensor) -> Tensor:
            of_pairs = (used * own) @ weights  # [q, used, product of other sizes]
            return use(group, (of_pairs[:, place] * rows) @ rows[group].mT)

        return run([partial(of_place, *pair) for pair in zip(used, groups, strict=True)], weights.device)

    def _in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """[m, ...] from the cheapest axis' groups of entries."""
        _, _, groups = self._by_place(self._cheapest)
        return torch.cat(parts)[torch.cat(groups).argsort()]

    @cached_property
    def _cheapest(self) -> int:
        """The axis whose pairs of inputs cost least."""
        cost = lambda number: len(self._by_place(number)[0]) ** 2 + len(self.entries) ** 2 / len(self._bases[number])
        return min(range(len(self._bases)), key=cost)

    def _by_place(self, number: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Rows of an axis' basis that entries have, the row of each entry, and the entries of each row."""
        used, place, counts = self._places[number].unique(return_inverse=True, return_counts=True)
        return self._bases[number][used], place, place.argsort().split(counts.tolist())

    def _rows(self, number: int, *, with_tasks: bool = False) -> Tensor:
        """The entries' rows of the bases of the other axes, perhaps with that of tasks [m, product of sizes]."""
        pairs = enumerate(zip(self._bases, self._places, strict=True))
        rows = [basis[place] for other, (basis, place) in pairs if other != number]
        return row_products([*rows, self._tasks if with_tasks else self._tasks.new_ones(len(self.entries), 1)])


def outer(vectors: Sequence[Tensor]) -> Tensor:
    """The products of all entries [*sizes] of vectors."""
    return reduce(lambda left, right: left.unsqueeze(-1) * right, vectors)

"""Entries of a Kronecker system that have no datum, such as a station's missing days.

With P = H^-1 of the whole system, o the data and e the other entries, H_oo^-1 = P_oo - P_oe P_ee^-1 P_eo and
log|H_oo| = log|H| + log|P_ee|. P_ee comes from eigenvectors, one axis at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import combinations_with_replacement

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
        bases: Q_1, Q_2, ..., W with P = C diag(values) C^T, C = Q_1 x Q_2 x ... x W. Tasks are an axis like the others.
        values: [*sizes, T].

    Cost, for an axis of k inputs and N entries in all: N (k^2 + m^2 / k) + m^3 / 6 multiply-adds; two to four times that
    for derivatives.
    """

    def __init__(self, entries: Tensor, bases: Sequence[Tensor], values: Tensor) -> None:
        self._bases, self._values = bases, values
        self._places = torch.unravel_index(entries, values.shape)
        # Rows of each axis' basis that entries have, the row of each entry, and the entries of each row.
        self._by_place: list[tuple[Tensor, Tensor, Sequence[Tensor]]] = []
        for basis, places in zip(bases, self._places, strict=True):
            used, place, counts = places.unique(return_inverse=True, return_counts=True)
            self._by_place.append((basis[used], place, place.argsort().split(counts.tolist())))
        matrix = self._in_order(self._gram(values.unsqueeze(0), lambda group, columns: columns[0].mT))
        self._lower, info = torch.linalg.cholesky_ex(matrix)
        if info:
            raise NotPositiveDefiniteError(
                "The kernel with noise is singular to rounding: keep the noise away from zero."
            )

    def logdet(self) -> Tensor:
        return 2 * self._lower.diagonal().log().sum()

    def correction(self, rotated: Tensor) -> Tensor:
        """C^T E^T P_ee^-1 E C diag(values) rotated, for [*sizes, T, s]."""
        number = self._gram_axis()
        (used, _, groups), rows = self._by_place[number], self._rows(number)
        weighted = (self._values.unsqueeze(-1) * rotated).movedim(number, 0)
        by_place = (used @ weighted.flatten(1)).unflatten(1, (rows.shape[1], -1))
        found = self._in_order([rows[group] @ at for group, at in zip(groups, by_place, strict=True)])
        solved = torch.cholesky_solve(found, self._lower)
        by_place = torch.stack([rows[group].mT @ solved[group] for group in groups])
        return (used.mT @ by_place.flatten(1)).view(weighted.shape).movedim(0, number)

    def explained(self, rows: Sequence[Tensor]) -> Tensor:
        """|P_ee^-1/2 E C diag(values) r|^2 [t] of products r of rows [t, size] of all axes and tasks."""
        number = self._gram_axis()
        (used, _, groups), of_entries = self._by_place[number], self._rows(number)
        values, others = self._values.movedim(number, 0).flatten(1), row_products([*rows[:number], *rows[number + 1 :]])
        product = lambda own, group: of_entries[group] @ (((rows[number] * own) @ values) * others).mT
        found = self._in_order(run([partial(product, *pair) for pair in zip(used, groups, strict=True)], values.device))
        return torch.linalg.solve_triangular(self._lower, found, upper=False).square().sum(0)

    def score(self, spectra: Sequence[Tensor]) -> Iterator[Tensor]:
        """Derivatives of -log|P_ee| by K_1, K_2, ..., B, with eigenvalues `spectra` in the bases, and by N."""
        with divided():  # LAPACK's threads wait for each other
            inverse = torch.cholesky_inverse(self._lower)
        for number, basis in enumerate(self._bases):
            others = [torch.ones_like(each[:1]) if place == number else each for place, each in enumerate(spectra)]
            others = outer(others).unsqueeze(0)
            if number == len(self._bases) - 1:
                others = torch.cat([others, torch.ones_like(others)])
            num_pairs = len(basis) * (len(basis) + 1) // 2
            is_short = num_pairs * self._gram_cost(self._gram_axis(number)) < len(self._places[0]) ** 2
            derive = self._by_pairs if is_short else self._by_others
            yield from basis @ derive(number, others, inverse) @ basis.mT

    def _by_others(self, number: int, others: Tensor, inverse: Tensor) -> Tensor:
        """X = sum_b others_b A_b^T V_b A_b, A_b = Q diag(values_b), b of the other axes.

        [q, k, k] for [q, *sizes], this axis of size 1. V comes from the inverse of P_ee.
        """
        (used, place, groups), rows = self._by_place[number], self._rows(number)
        values, others = self._values.movedim(number, 0).flatten(1), others.flatten(1)
        result = values.new_zeros(len(others), len(values), len(values))
        for part in blocks(len(values[0]), max(NUMBERS.on(values.device) // max(used.numel(), len(place)), 1)):
            some = rows[:, part]
            pairs = values.new_zeros(len(used), len(used), some.shape[-1])  # V
            add = lambda at, group, some=some: at.index_add_(0, place, some * (inverse[:, group] @ some[group]))
            run([partial(add, *pair) for pair in zip(pairs, groups, strict=True)], values.device)
            scaled = used * values[:, part].mT.unsqueeze(-2)
            for each, weights in zip(result, others[:, part], strict=True):
                products = (pairs * weights).movedim(-1, 0) @ scaled
                each.addmm_(scaled.flatten(0, 1).mT, products.flatten(0, 1))
        return result

    def _by_pairs(self, number: int, others: Tensor, inverse: Tensor) -> Tensor:
        """The same, one entry of X at a time, for a short axis."""
        rows, values = self._bases[number][self._places[number]], self._values.split(1, dim=number)
        result = rows.new_zeros(len(others), len(values), len(values))
        for i, j in combinations_with_replacement(range(len(values)), 2):
            left, right = rows[:, i], rows[:, j]
            use = lambda group, columns, left=left, right=right: left @ (columns * inverse[:, group]) @ right[group]
            result[:, i, j] = result[:, j, i] = sum(self._gram(others * values[i] * values[j], use, number))
        return result

    def _gram(self, weights: Tensor, use: Callable[[Tensor, Tensor], Tensor], *without: int) -> list[Tensor]:
        """What `use` makes of groups of columns of E C diag(weights) C^T E^T [q, m, m], for weights [q, *sizes].

        C is without some axes, of size 1.
        """
        number = self._gram_axis(*without)
        (used, place, groups), rows = self._by_place[number], self._rows(number, *without)
        weights = weights.movedim(1 + number, 1).flatten(2)

        def of_place(own: Tensor, group: Tensor) -> Tensor:
            of_pairs = (used * own) @ weights  # [q, used, product of other sizes]
            return use(group, (of_pairs[:, place] * rows) @ rows[group].mT)

        return run([partial(of_place, *pair) for pair in zip(used, groups, strict=True)], weights.device)

    def _in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """[m, ...] from parts of the groups of all axes' grams."""
        _, _, groups = self._by_place[self._gram_axis()]
        return torch.cat(list(parts))[torch.cat(list(groups)).argsort()]

    def _gram_axis(self, *without: int) -> int:
        return min(set(range(len(self._bases))).difference(without), key=self._gram_cost)

    def _gram_cost(self, number: int) -> float:
        """Multiply-adds by an axis, for each cell of all axes that are not left out."""
        return len(self._by_place[number][0]) ** 2 + len(self._places[0]) ** 2 / len(self._bases[number])

    def _rows(self, *without: int) -> Tensor:
        """The entries' rows of the bases of the other axes [m, product of sizes]."""
        pairs = enumerate(zip(self._bases, self._places, strict=True))
        rows = [basis[place] for number, (basis, place) in pairs if number not in without]
        return row_products([self._values.new_ones(len(self._places[0]), 1), *rows])


def outer(vectors: Sequence[Tensor]) -> Tensor:
    """The products of all entries [*sizes] of vectors."""
    return reduce(lambda left, right: left.unsqueeze(-1) * right, vectors)

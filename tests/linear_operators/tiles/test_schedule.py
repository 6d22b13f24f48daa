"""Every tile that a product needs is visited once, by itself or as the transpose of one that is stored."""

import itertools

import pytest

from gpy_iterative.linear_operators.tiles.schedule import TileVisits

#: Strips of up to two columns of tiles: of a symmetric matrix, and of any.
UPPER = [
    [range(0, 1), range(1, 2), range(2, 4), range(4, 5)],
    [range(1, 2), range(2, 4), range(4, 5)],
    [range(2, 3), range(3, 4), range(4, 5)],
    [range(3, 4), range(4, 5)],
    [range(4, 5)],
]
WHOLE = [[range(0, 2), range(2, 4), range(4, 5)]] * 3


def runs(count: int) -> list[range]:
    return [range(start, stop) for start in range(count) for stop in range(start, count + 1)]


@pytest.mark.parametrize(("strips", "symmetric"), [(UPPER, True), (WHOLE, False)])
def test_every_tile_of_the_product_is_taken_once(strips: list[list[range]], symmetric: bool) -> None:
    visits = TileVisits(strips, symmetric=symmetric)
    for rows, columns in itertools.product(runs(len(strips)), runs(5)):
        taken: list[tuple[int, int]] = []
        found = visits.of(rows, columns)
        for visit in found:
            assert visit.strip in strips[visit.row]
            assert visit.needed, "a strip without a part"
            used = {*visit.direct, *visit.mirrored}
            assert used <= set(visit.needed) <= set(visit.strip)
            assert {visit.needed[0], visit.needed[-1]} <= used
            taken += [(visit.row, column) for column in visit.direct]
            taken += [(column, visit.row) for column in visit.mirrored]
        assert sorted(taken) == list(itertools.product(rows, columns))
        assert [visit.row for visit in found] == sorted(visit.row for visit in found)


def test_they_are_found_once() -> None:
    visits = TileVisits(UPPER, symmetric=True)
    first = visits.of(range(2), range(5))
    assert visits.of(range(2), range(5)) is first
    # A wholly visited strip is the very one that was evaluated: nothing is to be picked from it.
    assert all(part is visit.strip for visit in visits.of(range(5), range(5)) for part in (visit.needed, visit.direct))


def test_so_many_visits_are_remembered_of_the_last_products() -> None:
    visits = TileVisits(UPPER, symmetric=True, most=17)
    whole, first = range(5), range(1)
    all_visits, row = visits.of(whole, whole), visits.of(first, whole)
    assert (len(all_visits), len(row)) == (13, 4)
    assert visits.of(whole, whole) is all_visits
    visits.of(range(4, 5), range(4, 5))  # one more: the one that was asked for first since then goes
    assert visits.of(whole, whole) is all_visits
    found = visits.of(first, whole)
    assert found is not row
    assert found == row


def test_a_product_with_too_many_visits_is_not_remembered() -> None:
    visits = TileVisits(UPPER, symmetric=True, most=12)
    assert visits.of(range(5), range(5)) == visits.of(range(5), range(5))
    assert visits.of(range(5), range(5)) is not visits.of(range(5), range(5))
    assert visits.of(range(1), range(5)) is visits.of(range(1), range(5))


def test_only_strips_of_the_product_are_looked_at() -> None:
    class Counted(list):
        def __getitem__(self, item: object) -> object:
            found = super().__getitem__(item)
            looked_at.extend(found if isinstance(found, list) else [found])
            return found

    looked_at: list[range] = []
    strips = [Counted([range(row, row + 1), *(range(i, i + 2) for i in range(row + 1, 400, 2))]) for row in range(400)]
    TileVisits(strips, symmetric=True).of(range(400), range(50, 52))
    # Those that are visited, and a few in each row to find them.
    assert 400 < len(looked_at) < sum(map(len, strips)) / 4

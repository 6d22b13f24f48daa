"""Vectors in blocks of rows: which tiles a slice touches, and that nothing is lost on the way."""

import pytest
import torch

from gpy_iterative.linear_operators.tiles.row_blocks import (
    FEW_COLUMNS,
    RowBlocks,
    RowSums,
    TileRun,
    overlaps,
    tile_runs,
    whole_run,
)
from gpy_iterative.linear_operators.tiles.tiles import blocks

TILES = blocks(21, 8)  # of 8, 8 and 5 rows
WHOLE = slice(None)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        (slice(0, 21), [TileRun(range(3), WHOLE, slice(0, 21), 8)]),
        (slice(8, 21), [TileRun(range(1, 3), WHOLE, slice(0, 13), 8)]),
        (slice(16, None), [TileRun(range(2, 3), WHOLE, slice(0, 5), 5)]),
        (slice(3, 6), [TileRun(range(1), slice(3, 6), slice(0, 3), 3)]),
        (
            slice(3, 20),
            [
                TileRun(range(1), slice(3, 8), slice(0, 5), 5),
                TileRun(range(1, 2), WHOLE, slice(5, 13), 8),
                TileRun(range(2, 3), slice(0, 4), slice(13, 17), 4),
            ],
        ),
        (slice(5, 5), []),
        (slice(30, 40), []),
    ],
)
def test_whole_tiles_go_together_and_parts_alone(wanted: slice, runs: list[TileRun]) -> None:
    assert tile_runs(TILES, wanted) == runs


def test_overlaps_are_tile_by_tile() -> None:
    assert [run.numbers for run in overlaps(TILES, WHOLE)] == [range(1), range(1, 2), range(2, 3)]
    assert overlaps([], WHOLE) == []


@pytest.mark.parametrize("wanted", [slice(0, 21), slice(8, 21), slice(16, 21), slice(2, 7)])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_blocks_give_the_vectors_back(wanted: slice, batch: tuple[int, ...]) -> None:
    (run,) = tile_runs(TILES, wanted)
    vectors = random(*batch, 21, 4)[..., wanted, :]
    found = RowBlocks.of(vectors, run)
    assert found.data.is_contiguous()
    assert torch.equal(found.vectors(), vectors)
    for number in run.numbers:
        start = (number - run.numbers.start) * run.length
        expected = vectors[..., start : start + run.length, :].mT.unsqueeze(-3)
        assert torch.equal(found.part(range(number, number + 1)), expected)


def test_there_may_be_no_rows() -> None:
    run = whole_run([])
    assert RowBlocks.of(random(0, 4), run).vectors().shape == (0, 4)
    assert RowBlocks.zeros(random(1), (2, 4), run).vectors().shape == (2, 0, 4)


@pytest.mark.parametrize("columns", [1, FEW_COLUMNS, FEW_COLUMNS + 1])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_rows_of_tiles_are_summed_up(columns: int, batch: tuple[int, ...]) -> None:
    result = RowBlocks.zeros(random(1), (*batch, columns), whole_run(TILES))
    result.data += 1
    sums = RowSums(result, 2)
    expected = torch.ones(*batch, 21, columns, dtype=torch.float64)
    for number, rows in enumerate(TILES):
        size = rows.stop - rows.start
        tiles, vectors = random(*batch, 3, size, 8, seed=number), random(*batch, 3, columns, 8, seed=5 + number)
        sums.add(number, vectors[..., :1, :, :], tiles[..., :1, :, :])
        sums.add(number, vectors[..., 1:, :, :], tiles[..., 1:, :, :])
        expected[..., rows, :] += (tiles @ vectors.mT).sum(-3)
    for _ in range(2):  # the second time nothing is left
        sums.finish()
    torch.testing.assert_close(result.vectors(), expected)

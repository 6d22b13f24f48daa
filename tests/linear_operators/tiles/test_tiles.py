"""Vectors in blocks of rows, and the tiles that a product visits."""

import itertools

import pytest
import torch

from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.tiles import RowBlocks

SIZE, LENGTH = 21, 8  # tiles of 8, 8 and 5 rows


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("wanted", [slice(0, 21), slice(8, 21), slice(16, 21), slice(2, 7), slice(5, 17)])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_blocks_give_the_vectors_back(wanted: slice, batch: tuple[int, ...]) -> None:
    vectors = random(*batch, SIZE, 4)
    found = RowBlocks.of(vectors[..., wanted, :], SIZE, LENGTH, wanted.start)
    kept = torch.zeros_like(vectors)
    kept[..., wanted, :] = vectors[..., wanted, :]
    assert found.data.is_contiguous()
    first, stop = LENGTH * found.numbers.start, min(LENGTH * found.numbers.stop, SIZE)
    vectors = found.data.mT.flatten(-3, -2)
    assert torch.equal(vectors[..., : stop - first, :], kept[..., first:stop, :])
    assert not vectors[..., stop - first :, :].any()
    for number in found.numbers:
        start = number * LENGTH
        assert torch.equal(found.blocks[number], kept[..., start : start + LENGTH, :].mT)


def test_there_may_be_no_rows() -> None:
    for blocks in (RowBlocks.of(random(0, 4), 0, LENGTH), RowBlocks(random(2, 0, 4, LENGTH), 0)):
        assert blocks.blocks == {}


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_tile_of_a_product_is_visited_once(symmetric: bool) -> None:
    x = random(37, 2)
    tiles = RadialTiles(x, None if symmetric else x[:29], RBF, None, KernelProducts(tile_size=8), TileCache())
    runs = [range(start, stop) for start in range(5) for stop in range(start, 5)]
    for rows, columns in itertools.product(runs, runs):
        visits = [tile.key for tile in tiles.visits(rows, columns)]
        assert visits == sorted(set(visits))
        wanted = {(i, j) for i in rows for j in columns if i < len(tiles.rows) and j < len(tiles.columns)}
        if symmetric:
            wanted = {(min(pair), max(pair)) for pair in wanted}
        assert {visit for visit in visits if visit[1] < len(tiles.columns)} == wanted


def test_vectors_of_a_small_matrix_are_not_padded() -> None:
    x, vectors = random(4, 2), random(4, 3)
    tiles = RadialTiles(x, None, RBF, None, KernelProducts(), TileCache())
    assert RowBlocks.of(vectors, 4, tiles.length).data.shape == (1, 3, 4)
    whole = slice(None)
    torch.testing.assert_close(tiles.product(whole, whole, vectors), tiles.block(whole, whole) @ vectors)

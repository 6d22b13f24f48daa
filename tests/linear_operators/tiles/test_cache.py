"""Room for tiles where several threads ask for it."""

import threading

import torch

from gpy_iterative.linear_operators.tiles.cache import Tile, TileCache

SHAPE, LIKE = torch.Size((1, 4, 4)), torch.empty(0)
TILE_BYTES = SHAPE.numel() * LIKE.element_size()
FIRST = Tile((0, 0), slice(0, 4), slice(0, 4), SHAPE)
SECOND = Tile((0, 1), slice(0, 4), slice(4, 8), SHAPE)


def zeros(_: Tile, out: torch.Tensor) -> torch.Tensor:
    return out.zero_()


def test_a_tile_waits_for_the_derivative_that_it_displaces() -> None:
    """The budget holds two tiles: one native, and a derivative that another thread is evaluating."""
    cache, budget = TileCache(), 2 * TILE_BYTES
    evaluating, may_finish = threading.Event(), threading.Event()

    def slow_ones(_: Tile, out: torch.Tensor) -> torch.Tensor:
        evaluating.set()
        assert may_finish.wait(60)
        return out.fill_(1.0)

    kept: list[torch.Tensor | None] = []
    cache.evaluate(FIRST, LIKE, budget, zeros)
    derivative = threading.Thread(
        target=lambda: kept.append(cache.derivatives.evaluate(FIRST, LIKE, budget, slow_ones))
    )
    native = threading.Thread(target=lambda: kept.append(cache.evaluate(SECOND, LIKE, budget, zeros)))
    derivative.start()
    assert evaluating.wait(60)
    native.start()
    native.join(0.05)
    assert native.is_alive()  # no room as long as the derivative is evaluated
    may_finish.set()
    derivative.join(60)
    native.join(60)
    assert [None if tile is None else float(tile.max()) for tile in kept] == [1.0, 0.0]
    assert cache.own_bytes == budget
    assert cache.derivatives.own_bytes == 0


def test_a_tile_that_failed_leaves_its_room() -> None:
    cache, budget = TileCache(), 2 * TILE_BYTES
    evaluating, may_fail = threading.Event(), threading.Event()

    def fails(_: Tile, out: torch.Tensor) -> torch.Tensor:
        evaluating.set()
        assert may_fail.wait(60)
        raise ValueError("as it should")

    def attempt() -> None:
        try:
            cache.derivatives.evaluate(FIRST, LIKE, budget, fails)
        except ValueError:
            failed.set()

    failed = threading.Event()
    cache.evaluate(FIRST, LIKE, budget, zeros)
    derivative = threading.Thread(target=attempt)
    derivative.start()
    assert evaluating.wait(60)
    native = threading.Thread(target=lambda: cache.evaluate(SECOND, LIKE, budget, zeros))
    native.start()
    may_fail.set()
    derivative.join(60)
    native.join(60)
    assert failed.is_set()
    assert not native.is_alive()
    assert cache.tiles.get((0, 1)) is not None
    assert cache.pool.num_bytes() == budget

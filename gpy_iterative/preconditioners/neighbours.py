"""Orders of points, and nearest previous points."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.random_numbers import permutation
from gpy_iterative.worker_threads import CPU, num_threads, run

#: Growth of the trees' sizes.
GROWTH = 1.5
#: Neighbours that a worker looks for at a time.
FOUND = 2**19
#: Dimensions of trees for more inputs, which would visit most points.
DIMENSIONS = 8


class Tree:
    def __init__(self, points: Tensor) -> None:
        self._tree = cKDTree(points.double().cpu().numpy())

    def nearest(self, points: Tensor, count: int) -> Tensor:
        """Indices [*b, t, count <= n] of the nearest to points [*b, t, d]."""
        coordinates = points.double().cpu().numpy()
        _, found = self._tree.query(coordinates, k=np.arange(1, count + 1), workers=num_threads())
        return torch.from_numpy(found).to(points.device)


def maximin_order(points: Tensor, generator: torch.Generator) -> Tensor:
    """A permutation [n] of points [n, d] with early points far apart; approximate, O(n log n).

    From the end: repeated points, then groups of the closest half whose nearest neighbour precedes them in a random order.
    """
    coordinates = points.double().cpu().numpy()
    left = permutation(len(coordinates), generator, CPU).numpy()
    first = np.sort(np.unique(coordinates[left], axis=0, return_index=True)[1])
    groups, left = [np.delete(left, first)], left[first]
    while len(left) > 1:
        is_taken, distances = _finest(coordinates[left])
        if not is_taken.any():  # distances underflow
            break
        groups.append(left[is_taken][np.argsort(-distances[is_taken], kind="stable")])
        left = left[~is_taken]
    return torch.from_numpy(np.concatenate([left, *groups[::-1]]))


def _finest(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which points to remove, and distances to nearest neighbours."""
    distances, nearest = cKDTree(points).query(points, k=[2], workers=num_threads())
    distances, nearest = distances[:, 0], nearest[:, 0]
    return (nearest < np.arange(len(points))) & (distances <= np.median(distances)), distances


def previous_neighbours(points: Tensor, count: int) -> Tensor:
    """The nearest previous points [n, count] of points [n, d], int64 on the CPU; unused places are 0.

    Beyond eight inputs distances are those of the eight principal components.
    """
    coordinates = _principal_components(points.double().cpu()).numpy()
    size = len(coordinates)
    result = np.zeros((size, count), dtype=np.int64)
    first = np.arange(count)
    result[:count] = np.where(first < first[:, None], first, 0)
    levels = list(_growing(count, size))
    trees = run([partial(cKDTree, coordinates[: rows.stop]) for rows in levels])
    asked = math.ceil(GROWTH * count) + 8
    tasks = [
        partial(_fill, result, tree, coordinates, np.arange(part.start, part.stop), asked)
        for rows, tree in zip(levels, trees, strict=True)
        for part in blocks(rows.stop, math.ceil(FOUND / asked), rows.start)
    ]
    run(tasks)
    return torch.from_numpy(result)


def _growing(start: int, size: int) -> Iterator[slice]:
    while start < size:
        stop = min(size, math.ceil(GROWTH * start))
        yield slice(start, stop)
        start = stop


def _principal_components(points: Tensor) -> Tensor:
    if points.shape[-1] <= DIMENSIONS:
        return points
    centred = points - points.mean(0)
    return centred @ torch.linalg.eigh(centred.mT @ centred).eigenvectors[:, -DIMENSIONS:]


def _fill(result: np.ndarray, tree: cKDTree, points: np.ndarray, rows: np.ndarray, asked: int) -> None:
    """Fills rows from their nearest `asked` points, or as many as have enough previous ones."""
    count = result.shape[1]
    while len(rows):
        asked = min(asked, tree.n)
        _, found = tree.query(points[rows], k=np.arange(1, asked + 1))
        is_before = found < rows[:, None]
        place = is_before.cumsum(1)
        has_enough = place[:, -1] >= count
        is_taken = (is_before & (place <= count))[has_enough]
        result[rows[has_enough]] = found[has_enough][is_taken].reshape(-1, count)
        rows, asked = rows[~has_enough], 2 * asked

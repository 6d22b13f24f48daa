"""Orders of points, and the nearest points before each one in an order."""

import math

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from gpy_iterative.worker_threads import num_threads

#: Each tree holds so many times the points of the one before.
GROWTH = 1.5
#: Neighbours that are asked for at a time, of all points together.
FOUND = 2**22


class Tree:
    """Points [n, d], among which the nearest ones to others are found in O(log n)."""

    def __init__(self, points: Tensor) -> None:
        self._tree = cKDTree(points.double().cpu().numpy())

    def nearest(self, points: Tensor, count: int) -> Tensor:
        """The numbers [t, count] of those that are nearest to points [t, d]; count is n at the most."""
        coordinates = points.double().cpu().numpy()
        _, found = self._tree.query(coordinates, k=np.arange(1, count + 1), workers=num_threads())
        return torch.from_numpy(found).to(points.device)


def random_order(size: int, generator: torch.Generator) -> Tensor:
    """A random permutation [n]."""
    return torch.randperm(size, generator=generator, device=generator.device).cpu()


def maximin_order(points: Tensor, generator: torch.Generator) -> Tensor:
    """A permutation [n] of points [n, d] in which early points lie far apart, coarse before fine.

    An approximation: groups are taken off the end until one point is left, first repeated points, then again and again
    those of the closest half that have their nearest neighbour before them in a random order. Cost: O(n log n).
    """
    coordinates = points.double().cpu().numpy()
    left = random_order(len(coordinates), generator).numpy()
    first = np.sort(np.unique(coordinates[left], axis=0, return_index=True)[1])
    groups, left = [np.delete(left, first)], left[first]
    while len(left) > 1:
        is_taken, distances = _finest(coordinates[left])
        groups.append(left[is_taken][np.argsort(-distances[is_taken], kind="stable")])
        left = left[~is_taken]
    return torch.from_numpy(np.concatenate([left, *groups[::-1]]))


def _finest(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the points, all different, are taken off; and the distance from each to its nearest neighbour."""
    distances, nearest = cKDTree(points).query(points, k=[2], workers=num_threads())
    distances, nearest = distances[:, 0], nearest[:, 0]
    return (nearest < np.arange(len(points))) & (distances <= np.median(distances)), distances


def previous_neighbours(points: Tensor, count: int) -> Tensor:
    """For each of the points [n, d] the nearest ones before it, [n, count], as int64 on the CPU.

    Points that have fewer than `count` points before them have 0 in the remaining places. Cost: n queries of trees of
    the first points, each tree half as large again as the one before.
    """
    coordinates = points.double().cpu().numpy()
    size = len(coordinates)
    result = np.zeros((size, count), dtype=np.int64)
    first = np.arange(count)
    result[:count] = np.where(first < first[:, None], first, 0)
    start = count
    while start < size:
        stop = min(size, math.ceil(GROWTH * start))
        _fill(result, cKDTree(coordinates[:stop]), coordinates, np.arange(start, stop))
        start = stop
    return torch.from_numpy(result)


def _fill(result: np.ndarray, tree: cKDTree, points: np.ndarray, rows: np.ndarray) -> None:
    """The nearest points before each of these rows, from a tree of all points up to them and some beyond."""
    asked = math.ceil(GROWTH * result.shape[1]) + 8
    while len(rows):
        asked = min(asked, tree.n)
        parts = np.array_split(rows, math.ceil(len(rows) * asked / FOUND))
        rows = np.concatenate([_fill_from(result, tree, points, part, asked) for part in parts])
        asked *= 2


def _fill_from(result: np.ndarray, tree: cKDTree, points: np.ndarray, rows: np.ndarray, asked: int) -> np.ndarray:
    """The rows for which too few of the nearest `asked` points are before them; the others are filled."""
    count = result.shape[1]
    _, found = tree.query(points[rows], k=np.arange(1, asked + 1), workers=num_threads())
    is_before = found < rows[:, None]
    place = is_before.cumsum(1)
    has_enough = place[:, -1] >= count
    is_taken = (is_before & (place <= count))[has_enough]
    result[rows[has_enough]] = found[has_enough][is_taken].reshape(-1, count)
    return rows[~has_enough]

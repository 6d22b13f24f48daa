"""Orders of points, and the nearest points before each one in an order."""

import math

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from gpy_iterative.worker_threads import num_threads

#: Each tree holds so many times the points of the one before.
GROWTH = 1.5
#: Points whose neighbours are asked for at a time.
QUERIES = 65_536


def random_order(size: int, generator: torch.Generator) -> Tensor:
    """A random permutation [n]."""
    return torch.randperm(size, generator=generator, device=generator.device).cpu()


def maximin_order(points: Tensor, generator: torch.Generator) -> Tensor:
    """A permutation [n] of points [n, d] in which early points lie far apart, coarse before fine.

    The exact order takes the point that is farthest from all before it, one by one. Here whole groups are taken off the
    end: of the closest half of the points, one of each pair that are each other's nearest neighbours, until one point is
    left. Cost: O(n log n).
    """
    coordinates = points.double().cpu().numpy()
    left = random_order(len(coordinates), generator).numpy()
    groups = []
    while len(left) > 1:
        is_taken, distances = _finest(coordinates[left])
        groups.append(left[is_taken][np.argsort(-distances[is_taken], kind="stable")])
        left = left[~is_taken]
    return torch.from_numpy(np.concatenate([left, *groups[::-1]]))


def _finest(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which points are taken off, and the distance from each to its nearest neighbour."""
    distances, found = cKDTree(points).query(points, k=2, workers=num_threads())
    own = np.arange(len(points))
    nearest, distances = np.where(found[:, 0] == own, found[:, 1], found[:, 0]), distances[:, 1]
    is_second = (nearest[nearest] == own) & (nearest < own)
    if not is_second.any():  # equal points may each be the nearest of the next
        is_second = own == distances.argmin()
    return is_second & (distances <= np.median(distances[is_second])), distances


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
        tree = cKDTree(coordinates[:stop])
        for begin in range(start, stop, QUERIES):
            rows = np.arange(begin, min(begin + QUERIES, stop))
            result[rows] = _nearest_before(tree, coordinates, rows, count)
        start = stop
    return torch.from_numpy(result)


def _nearest_before(tree: cKDTree, points: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """The nearest points before each of these rows [r, count], from a tree of all points up to them and some beyond."""
    result = np.empty((len(rows), count), dtype=np.int64)
    open_rows, asked = np.arange(len(rows)), math.ceil(GROWTH * count) + 8
    while len(open_rows):
        asked = min(asked, tree.n)
        numbers = rows[open_rows]
        _, found = tree.query(points[numbers], k=np.arange(1, asked + 1), workers=num_threads())
        is_before = found < numbers[:, None]
        place = is_before.cumsum(1)
        has_enough = place[:, -1] >= count
        is_taken = (is_before & (place <= count))[has_enough]
        result[open_rows[has_enough]] = found[has_enough][is_taken].reshape(-1, count)
        open_rows, asked = open_rows[~has_enough], 2 * asked
    return result

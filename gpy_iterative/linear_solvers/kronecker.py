"""Exact factors of Kronecker products with noise, H = K_1 x K_2 x ... x B + I x N, by eigenvectors of all factors.

K_1, K_2, ... are the kernels of the axes of a complete grid, or one kernel of all points; B and N are covariances of tasks.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from linear_operator import LinearOperator, to_dense
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.linear_operators.extensions import sum_terms
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial.grid import along_axis
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.preconditioners.task_noise import kronecker_terms

#: Eigenvectors cost less than a dense factor up to so many rows, and less than most solves up to so many inputs of an axis,
#: or so many times the root of the rows.
MOST_ROWS, MOST_POINTS, MOST_BY_ROOT = 3000, 1000, 10
SINGULAR = "The kernel with the noise of the tasks is not positive definite: keep the noise away from zero."


def kronecker_parts(
    operator: LinearOperator | Tensor,
) -> tuple[tuple[LinearOperator | Tensor, ...], Tensor | None] | None:
    """(K_1, ..., B [T, T], noise), with graph, and each point's cell in the grid [n] or None; None for other systems.

    The noise is N [T, T] or variances [n T].
    """
    if not isinstance(operator, LinearOperator) or operator.batch_shape:
        return None
    is_independent = isinstance(operator, NoisyLinearOperator)
    covariance = operator.kernel if is_independent else operator
    found = kronecker_terms(covariance)
    if found is None:  # one output: B = 1
        one = torch.ones(1, 1, dtype=operator.dtype, device=operator.device)
        found = [(term, factor * one) for term, factor in sum_terms(covariance)], []
    kernels, noises = found
    if len(kernels) != 1 or len(noises) != 1 - is_independent:
        return None
    points, tasks = kernels[0]
    grid = points.complete_grid() if isinstance(points, RadialProductLinearOperator) else None
    axes, cells = ([points], None) if grid is None else grid
    rows, size = operator.shape[-1], max(axis.shape[-1] for axis in axes)
    is_large = rows > MOST_ROWS and size > max(MOST_POINTS, MOST_BY_ROOT * math.sqrt(rows))
    if is_large or (grid is None and tasks.shape[-1] == 1):
        return None
    if not is_independent:
        return (*axes, tasks, noises[0]), cells
    noise = operator.noise.reshape(-1, tasks.shape[-1])
    return ((*axes, tasks, operator.noise), cells) if bool((noise == noise[:1]).all()) else None


class KroneckerFactor:
    """H = C^-T (L x M + I x D) C^-1 with C = U x W, in float64: U, L are those of K, and W^T B W = M, W^T N W = D.

    W whitens the mean block of a datum, N + k B, so that k M = I - D: N alone may be singular, or lose digits.

    Args:
        parts: K_1, ..., B, noise; see `kronecker_parts`.
        cells: of the points; None: they have the order of K_1 x K_2 x ...
    """

    def __init__(self, *parts: LinearOperator | Tensor, cells: Tensor | None = None) -> None:
        axes, (tasks, noise) = [to_dense(part).detach() for part in parts[:-2]], parts[-2:]
        self.dtype, self._cells = axes[0].dtype, cells  # the dtype of results
        self._axes = [axis.double() for axis in axes]
        self._tasks, noise = tasks.detach().double(), noise.detach().double()
        self._is_independent = noise.dim() == 1
        noise = noise[: len(tasks)].diag() if self._is_independent else noise
        if not all(bool(torch.isfinite(each).all()) for each in (*self._axes, self._tasks, noise)):
            raise NonFiniteError(
                "A kernel matrix or covariance of tasks is not finite: check data and hyperparameters."
            )
        variance = math.prod(axis.diagonal().mean() for axis in self._axes)
        variance = torch.where(variance > 0, variance, 1)
        root, info = torch.linalg.cholesky_ex(noise + variance * self._tasks)
        if info:
            raise NotPositiveDefiniteError(SINGULAR)
        inverse = torch.linalg.inv(root)
        values, self._bases = zip(*map(torch.linalg.eigh, self._axes), strict=True)
        of_noise, vectors = torch.linalg.eigh(inverse @ noise @ inverse.mT)
        of_noise = of_noise.clamp(0, 1)
        self._values = [each.clamp_min(0) for each in values]
        self._of_tasks = (1 - of_noise) / variance
        self._tasks_basis = inverse.mT @ vectors
        self._eigenvalues = _outer([*self._values, self._of_tasks]) + of_noise  # [*sizes, T]
        if not bool((self._eigenvalues > 0).all()):
            raise NotPositiveDefiniteError(SINGULAR)
        num_points = self._eigenvalues.numel() // len(tasks)
        self._logdet = self._eigenvalues.log().sum() + 2 * num_points * root.diagonal().log().sum()

    def dim(self) -> int:
        """The number of dimensions of H."""
        return 2

    def solve(self, rhs: Tensor) -> Tensor:
        """H^-1 rhs for [n T, s]."""
        rotated = self._rotated(rhs) / self._eigenvalues.unsqueeze(-1)
        return self._flat(_multiplied([*self._bases, self._tasks_basis], rotated)).to(self.dtype)

    def whiten(self, rhs: Tensor) -> Tensor:
        """W rhs [n T, s] in float64, with W^T W = H^-1."""
        return (self._rotated(rhs) / self._eigenvalues.sqrt().unsqueeze(-1)).flatten(0, -2)

    def logdet(self) -> Tensor:
        """The log-determinant of H."""
        return self._logdet.to(self.dtype)

    def score(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Derivatives of log N(y; 0, H) by the parts, for weights H^-1 y [n T, 1]."""
        a, inverse = self._cell_entries(weights), 1 / self._eigenvalues
        matrices, bases = [*self._axes, self._tasks], [*self._bases, self._tasks_basis]
        spectra = [values.unsqueeze(0) for values in (*self._values, self._of_tasks)]
        found = []
        for number, basis in enumerate(bases):
            others = [None if place == number else matrix for place, matrix in enumerate(matrices)]
            rest = [None if place == number else values for place, values in enumerate(spectra)]
            left, right = (cells.movedim(number, 0).flatten(1) for cells in (a, _multiplied(others, a)))
            traces = _multiplied(rest, inverse.unsqueeze(-1)).flatten()
            found.append(left @ right.mT - (basis * traces) @ basis.mT)
        if self._is_independent:
            variances = _multiplied([basis.square() for basis in bases], inverse.unsqueeze(-1))
            found.append(self._flat(a.square() - variances).flatten())
        else:
            a, w = a.flatten(0, -3).squeeze(-1), self._tasks_basis
            found.append(a.mT @ a - (w * inverse.flatten(0, -2).sum(0)) @ w.mT)
        return tuple(0.5 * part.to(self.dtype) for part in found)

    def _cell_entries(self, rhs: Tensor) -> Tensor:
        """[n T, s] as cells [*sizes, T, s], in float64."""
        by_point = rhs.double().unflatten(0, (-1, len(self._tasks)))
        if self._cells is not None:
            by_point = torch.empty_like(by_point).index_copy_(0, self._cells, by_point)
        return by_point.unflatten(0, [len(axis) for axis in self._axes])

    def _flat(self, cells: Tensor) -> Tensor:
        """The inverse of `_cell_entries`."""
        by_point = cells.flatten(0, -3)
        return (by_point if self._cells is None else by_point[self._cells]).flatten(0, 1)

    def _rotated(self, rhs: Tensor) -> Tensor:
        bases = [basis.mT for basis in (*self._bases, self._tasks_basis)]
        return _multiplied(bases, self._cell_entries(rhs))


def _outer(vectors: Sequence[Tensor]) -> Tensor:
    return reduce(lambda left, right: left.unsqueeze(-1) * right, vectors)


def _multiplied(matrices: Sequence[Tensor | None], cells: Tensor) -> Tensor:
    """(M_1 x M_2 x ...) cells [*sizes, s]; None is the identity."""
    for number, matrix in enumerate(matrices):
        if matrix is not None:
            cells = along_axis(cells, number, matrix.matmul)
    return cells

"""Exact factors of Kronecker products with noise, H = K_1 x K_2 x ... x B + I x N, by eigenvectors of all factors.

K_1, K_2, ... are the kernels of the axes of a grid, or one kernel of all points; B and N are covariances of tasks. A few
entries may have no datum.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from linear_operator import LinearOperator, to_dense
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.linear_operators.extensions import sum_terms
from gpy_iterative.linear_operators.masked import ObservedLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial.grid import along_axis, most_empty, row_products, spread
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.linear_solvers.unobserved import Unobserved, outer
from gpy_iterative.preconditioners.task_noise import kronecker_terms
from gpy_iterative.worker_threads import run

#: Eigenvectors cost less than a dense factor up to so many rows, and less than most solves up to so many inputs of an axis,
#: or, if no entry is without a datum, so many times the root of the rows.
MOST_ROWS, MOST_POINTS, MOST_BY_ROOT = 3000, 1000, 10
SINGULAR = "The kernel with the noise of the tasks is not positive definite: keep the noise away from zero."


def kronecker_parts(operator: LinearOperator | Tensor) -> tuple[tuple[LinearOperator | Tensor, ...], Tensor] | None:
    """(K_1, ..., B [T, T], noise), with graph, and each datum's entry of the product [n]; None for other systems.

    The noise is N [T, T] or variances [n].
    """
    if not isinstance(operator, LinearOperator) or operator.batch_shape:
        return None
    is_independent = isinstance(operator, NoisyLinearOperator)
    covariance, observed = operator.kernel if is_independent else operator, None
    if isinstance(covariance, ObservedLinearOperator):
        covariance, observed = covariance.base, covariance.observed
    found = kronecker_terms(covariance)
    if found is None:  # one output: B = 1
        one = torch.ones(1, 1, dtype=operator.dtype, device=operator.device)
        found = [(term, factor * one) for term, factor in sum_terms(covariance)], []
    kernels, noises = found
    if len(kernels) != 1 or len(noises) != 1 - is_independent:
        return None
    points, tasks = kernels[0]
    axes, cells = [points], None
    if isinstance(points, RadialProductLinearOperator):
        cells = points.grid_cells()
        axes = axes if cells is None else points.axis_kernels()
    if cells is None:
        if tasks.shape[-1] == 1:
            return None
        cells = torch.arange(points.shape[-1], device=operator.device)
    rows, sizes = operator.shape[-1], [axis.shape[-1] for axis in axes]
    num_unobserved = math.prod(sizes) * tasks.shape[-1] - rows
    most_by_root = 0 if num_unobserved else MOST_BY_ROOT * math.sqrt(rows)
    is_large = rows > MOST_ROWS and max(sizes) > max(MOST_POINTS, most_by_root)
    if is_large or num_unobserved > most_empty(rows):
        return None
    entries = entries_of(cells, tasks.shape[-1], observed)
    if observed is not None and bool((entries.bincount() > 1).any()):  # several data of a task at a point
        return None
    if not is_independent:
        return (*axes, tasks, noises[0]), entries
    noise, task = operator.noise, entries % tasks.shape[-1]
    # Derivatives by single variances would cost more than the factor where entries have no datum.
    is_shared = operator.num_variances in (1, tasks.shape[-1]) or not noise.requires_grad or not num_unobserved
    has_factor = is_shared and bool((noise == _by_task(noise, task, tasks.shape[-1])[task]).all())
    return ((*axes, tasks, noise), entries) if has_factor else None


def entries_of(cells: Tensor, num_tasks: int, observed: Tensor | None) -> Tensor:
    """Of the product, for data of all tasks in these cells [n], or some of them."""
    entries = (cells.unsqueeze(-1) * num_tasks + torch.arange(num_tasks, device=cells.device)).flatten()
    return entries if observed is None else entries[observed]


def _by_task(noise: Tensor, task: Tensor, count: int) -> Tensor:
    """A variance [T] of each task's data; their mean for a task without data."""
    return noise.mean().detach().repeat(count).index_copy_(0, task, noise.detach())


class KroneckerFactor:
    """H = C^-T (L x M + I x D) C^-1 with C = U x W, in float64: U, L are those of K, and W^T B W = M, W^T N W = D.

    W whitens the mean block of a datum, N + k B, so that k M = I - D: N alone may be singular, or lose digits.

    Args:
        parts: K_1, ..., B, noise; see `kronecker_parts`.
        entries: of the product, for each datum [n]; None: all, in order.
    """

    def __init__(self, *parts: LinearOperator | Tensor, entries: Tensor | None = None) -> None:
        axes, (tasks, noise) = [to_dense(part).detach() for part in parts[:-2]], parts[-2:]
        self.dtype = axes[0].dtype  # of results
        self._axes = [axis.double() for axis in axes]
        self._tasks, noise = tasks.detach().double(), noise.detach().double()
        size = math.prod(map(len, (*axes, tasks)))
        self.entries = torch.arange(size, device=noise.device) if entries is None else entries
        self._is_independent = noise.dim() == 1
        if self._is_independent:
            noise = _by_task(noise, self.entries % len(tasks), len(tasks)).diag()
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
        found = run([partial(torch.linalg.eigh, axis) for axis in self._axes], noise.device)
        values, bases = zip(*found, strict=True)
        of_noise, vectors = torch.linalg.eigh(inverse @ noise @ inverse.mT)
        of_noise = of_noise.clamp(0, 1)
        self._values = [each.clamp_min(0) for each in values]
        self._of_tasks = (1 - of_noise) / variance
        self._bases = [*bases, inverse.mT @ vectors]
        self._eigenvalues = outer([*self._values, self._of_tasks]) + of_noise  # [*sizes, T]
        if not bool((self._eigenvalues > 0).all()):
            raise NotPositiveDefiniteError(SINGULAR)
        self._logdet = self._eigenvalues.log().sum() + 2 * (size // len(tasks)) * root.diagonal().log().sum()
        self._unobserved = None
        if len(self.entries) < size:
            are_others = torch.ones(size, dtype=torch.bool, device=noise.device).index_fill_(0, self.entries, False)
            self._unobserved = Unobserved(are_others.nonzero().squeeze(-1), self._bases, 1 / self._eigenvalues)
            self._logdet = self._logdet + self._unobserved.logdet()

    @property
    def sizes(self) -> list[int]:
        """Of the axes."""
        return list(self._eigenvalues.shape[:-1])

    def dim(self) -> int:
        """The number of dimensions of H."""
        return 2

    def solve(self, rhs: Tensor) -> Tensor:
        """H^-1 rhs for [n, s]."""
        rotated = self._rotated(rhs) / self._eigenvalues.unsqueeze(-1)
        return _multiplied(self._bases, rotated).flatten(0, -2).index_select(0, self.entries).to(self.dtype)

    def whiten(self, rhs: Tensor) -> Tensor:
        """W rhs [N, s] in float64, with W^T W = H^-1; N is the size of the product."""
        return (self._rotated(rhs) / self._eigenvalues.sqrt().unsqueeze(-1)).flatten(0, -2)

    def whiten_product(self, rows: Sequence[Tensor]) -> Tensor:
        """W K(X, x) [N, t] for K(x, X) whose rows are products of rows [t, size] of all axes and tasks."""
        cells = row_products(self._rotated_rows(rows)).mT.unflatten(0, self._eigenvalues.shape)
        return (self._observed(cells) / self._eigenvalues.sqrt().unsqueeze(-1)).flatten(0, -2)

    def explained(self, rows: Sequence[Tensor]) -> Tensor:
        """The diagonal [t] of K(x, X) H^-1 K(X, x) for such rows. Cost: N multiply-adds for each."""
        rotated = self._rotated_rows(rows)
        first, *others = (each.square() for each in rotated)
        explained = ((first @ (1 / self._eigenvalues.flatten(1))) * row_products(others)).sum(-1)
        return explained if self._unobserved is None else explained - self._unobserved.explained(rotated)

    def _rotated_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [part.double() @ basis for part, basis in zip(rows, self._bases, strict=True)]

    def logdet(self) -> Tensor:
        """The log-determinant of H."""
        return self._logdet.to(self.dtype)

    def score(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Derivatives of log N(y; 0, H) by the parts, for weights H^-1 y [n, 1]."""
        a, inverse = self._cell_entries(weights), 1 / self._eigenvalues
        matrices, spectra = [*self._axes, self._tasks], [*self._values, self._of_tasks]
        found = []
        for number, basis in enumerate(self._bases):
            others = [None if place == number else matrix for place, matrix in enumerate(matrices)]
            rest = [None if place == number else values.unsqueeze(0) for place, values in enumerate(spectra)]
            left, right = (cells.movedim(number, 0).flatten(1) for cells in (a, _multiplied(others, a)))
            traces = _multiplied(rest, inverse.unsqueeze(-1)).flatten()
            found.append(left @ right.mT - (basis * traces) @ basis.mT)
        by_point, w = a.flatten(0, -3).squeeze(-1), self._bases[-1]
        found.append(by_point.mT @ by_point - (w * inverse.flatten(0, -2).sum(0)) @ w.mT)
        if self._unobserved is not None:
            found = [part + own for part, own in zip(found, self._unobserved.score(spectra), strict=True)]
        if self._is_independent:
            found[-1] = self._by_datum(found[-1].diagonal(), a)
        return tuple(0.5 * part.to(self.dtype) for part in found)

    def _by_datum(self, by_task: Tensor, weights: Tensor) -> Tensor:
        """Derivatives [n] by each variance; if some entries have no datum, only the sum for each task is right."""
        if self._unobserved is None:
            bases = [basis.square() for basis in self._bases]
            variances = _multiplied(bases, 1 / self._eigenvalues.unsqueeze(-1))
            return (weights.square() - variances).flatten()[self.entries]
        task = self.entries % len(by_task)
        return (by_task / task.bincount(minlength=len(by_task)))[task]

    def _cell_entries(self, rhs: Tensor) -> Tensor:
        """[n, s] as [*sizes, T, s], in float64 and zero where there is no datum."""
        return spread(rhs.double(), self.entries, self._eigenvalues.shape)

    def _rotated(self, rhs: Tensor) -> Tensor:
        """C^T rhs [*sizes, T, s] of data [n, s]."""
        return self._observed(_multiplied([basis.mT for basis in self._bases], self._cell_entries(rhs)))

    def _observed(self, rotated: Tensor) -> Tensor:
        """Such that the whole system's solution is zero where there is no datum."""
        return rotated if self._unobserved is None else rotated - self._unobserved.correction(rotated)


def _multiplied(matrices: Sequence[Tensor | None], cells: Tensor) -> Tensor:
    """(M_1 x M_2 x ...) cells [*sizes, s]; None is the identity."""
    for number, matrix in enumerate(matrices):
        if matrix is not None:
            cells = along_axis(cells, number, matrix.matmul)
    return cells

"""Exact factors for complete data of several outputs, H = K x B + I x N, by eigenvectors of K and B."""

import torch
from linear_operator import LinearOperator, to_dense
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.preconditioners.task_noise import kronecker_terms

#: Eigenvectors cost less than a dense factor up to so many rows, and less than most solves up to so many points.
MOST_ROWS, MOST_POINTS = 3000, 1000
SINGULAR = "The kernel with the noise of the tasks is not positive definite: keep the noise away from zero."


def kronecker_parts(operator: LinearOperator | Tensor) -> tuple[LinearOperator, Tensor, Tensor] | None:
    """K [n, n], B [T, T], and the noise, N [T, T] or variances [n T], with graph; None for other systems."""
    if not isinstance(operator, LinearOperator) or operator.batch_shape:
        return None
    is_independent = isinstance(operator, NoisyLinearOperator)
    found = kronecker_terms(operator.kernel if is_independent else operator)
    if found is None:
        return None
    kernels, noises = found
    if len(kernels) != 1 or len(noises) != 1 - is_independent:
        return None
    points, tasks = kernels[0]
    is_large = operator.shape[-1] > MOST_ROWS and points.shape[-1] > MOST_POINTS
    if is_large or tasks.shape[-1] == 1:
        return None
    if not is_independent:
        return points, tasks, noises[0]
    noise = operator.noise.reshape(-1, tasks.shape[-1])
    return (points, tasks, operator.noise) if bool((noise == noise[:1]).all()) else None


class KroneckerFactor:
    """H = C^-T (L x M + I x D) C^-1 with C = U x W, in float64: U, L are those of K, and W^T B W = M, W^T N W = D.

    W whitens the mean block of a datum, N + k B, so that k M = I - D: N alone may be singular, or lose digits.
    """

    def __init__(self, points: LinearOperator, tasks: Tensor, noise: Tensor) -> None:
        matrix, noise = to_dense(points).detach(), noise.detach().double()
        self.dtype = matrix.dtype  # of results
        self._points, self._tasks = matrix.double(), tasks.detach().double()
        self._is_independent = noise.dim() == 1
        noise = noise[: len(tasks)].diag() if self._is_independent else noise
        if not all(bool(torch.isfinite(each).all()) for each in (self._points, self._tasks, noise)):
            raise NonFiniteError(
                "A kernel matrix or covariance of tasks is not finite: check data and hyperparameters."
            )
        variance = self._points.diagonal().mean()
        variance = torch.where(variance > 0, variance, 1)
        root, info = torch.linalg.cholesky_ex(noise + variance * self._tasks)
        if info:
            raise NotPositiveDefiniteError(SINGULAR)
        inverse = torch.linalg.inv(root)
        values, self._basis = torch.linalg.eigh(self._points)
        of_noise, vectors = torch.linalg.eigh(inverse @ noise @ inverse.mT)
        self._values, of_noise = values.clamp_min(0), of_noise.clamp(0, 1)
        self._of_tasks = (1 - of_noise) / variance
        self._tasks_basis = inverse.mT @ vectors
        self._eigenvalues = torch.outer(self._values, self._of_tasks) + of_noise
        if not bool((self._eigenvalues > 0).all()):
            raise NotPositiveDefiniteError(SINGULAR)
        self._logdet = self._eigenvalues.log().sum() + 2 * len(matrix) * root.diagonal().log().sum()

    def dim(self) -> int:
        """The number of dimensions of H."""
        return 2

    def solve(self, rhs: Tensor) -> Tensor:
        """H^-1 rhs for [n T, s]."""
        rotated = _rotated(self._basis.mT, self._tasks_basis.mT, rhs) / self._eigenvalues.flatten().unsqueeze(-1)
        return _rotated(self._basis, self._tasks_basis, rotated).to(self.dtype)

    def whiten(self, rhs: Tensor) -> Tensor:
        """W rhs [n T, s] in float64, with W^T W = H^-1."""
        return _rotated(self._basis.mT, self._tasks_basis.mT, rhs) / self._eigenvalues.flatten().sqrt().unsqueeze(-1)

    def logdet(self) -> Tensor:
        """The log-determinant of H."""
        return self._logdet.to(self.dtype)

    def score(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Derivatives of log N(y; 0, H) by the parts of `kronecker_parts`, for weights H^-1 y [n T, 1]."""
        a, inverse = weights.double().view(len(self._points), -1), 1 / self._eigenvalues
        u, w = self._basis, self._tasks_basis
        by_points = a @ self._tasks @ a.mT - (u * (inverse @ self._of_tasks)) @ u.mT
        by_tasks = a.mT @ self._points @ a - (w * (self._values @ inverse)) @ w.mT
        if self._is_independent:
            by_noise = (a.square() - u.square() @ inverse @ w.mT.square()).flatten()
        else:
            by_noise = a.mT @ a - (w * inverse.sum(0)) @ w.mT
        return tuple(0.5 * part.to(self.dtype) for part in (by_points, by_tasks, by_noise))


def _rotated(points: Tensor, tasks: Tensor, rhs: Tensor) -> Tensor:
    """(points x tasks) rhs [n T, s], in float64."""
    mixed = tasks @ rhs.double().unflatten(0, (len(points), -1))
    return (points @ mixed.flatten(1)).unflatten(1, mixed.shape[1:]).flatten(0, 1)

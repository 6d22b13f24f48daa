"""Preconditioners for noise that is correlated between tasks: H = sum_k K_k x B_k + I x N, N [T, T] the noise of a datum.

With N = R R^T, the system (I x R)^-1 H (I x R)^-T has independent noise of variance 1, for which recipes are made. Systems
with missing targets, jitter or other Kronecker products are not recognised.
"""

from collections.abc import Callable

import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import ConstantDiagLinearOperator, SumLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import dense, sum_terms
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.preconditioners.preconditioner import Preconditioner, SampledPreconditioner


class WhitenedTasks(SampledPreconditioner):
    """(I x R) S (I x R)^T.

    Args:
        inner: S, of the whitened system.
        root: R [*b, T, T].
        num_points: size of I.
    """

    def __init__(self, inner: SampledPreconditioner, root: Tensor, num_points: int) -> None:
        self.inner, self.root, self.num_points = inner, root, num_points
        self._inverse = torch.linalg.inv(root)
        self.build_epochs, self.num_signs = inner.build_epochs, inner.num_signs

    def solve(self, rhs: Tensor) -> Tensor:
        return _of_tasks(self._inverse.mT, self.inner.solve(_of_tasks(self._inverse, rhs)))

    def logdet(self) -> Tensor:
        return self.inner.logdet() + 2 * self.num_points * torch.linalg.slogdet(self.root).logabsdet

    def sample(self, base: Tensor) -> tuple[Tensor, Tensor]:
        vectors, dual = self.inner.sample(base)
        return _of_tasks(self.root, vectors), _of_tasks(self._inverse.mT, dual)


def build_whitened(
    build: Callable[[LinearOperator], Preconditioner], operator: LinearOperator
) -> Preconditioner | WhitenedTasks:
    """A recipe's preconditioner; that of the whitened system, in the tasks' basis, where noise is correlated."""
    found = _whitened(operator)
    if found is None:
        return build(operator)
    whitened, root = found
    inner = build(whitened)
    if not isinstance(inner, SampledPreconditioner):
        return build(operator)
    return WhitenedTasks(inner, root, operator.shape[-1] // root.shape[-1])


def of_independent_noise(operator: LinearOperator) -> NoisyLinearOperator | None:
    """The system, or the whitened one; None for another form of noise."""
    if isinstance(operator, NoisyLinearOperator):
        return operator
    found = _whitened(operator)
    return None if found is None else found[0]


def kronecker_terms(operator: LinearOperator) -> tuple[list[tuple[LinearOperator, Tensor]], list[Tensor]] | None:
    """(K_k, B_k), and the terms of N, with graph; None for another form."""
    noises, kernels = [], []
    for term, factor in sum_terms(operator):
        if not isinstance(term, KroneckerLinearOperator) or len(term.linear_ops) != 2:
            return None
        points, tasks = term.linear_ops[0], factor * dense(term.linear_ops[1])
        if isinstance(points, ConstantDiagLinearOperator):
            noises.append(points.diag_values.unsqueeze(-1) * tasks)
        else:
            kernels.append((points, tasks))
    has_one_size = len({tasks.shape[-1] for tasks in [*noises, *(tasks for _, tasks in kernels)]}) == 1
    return (kernels, noises) if kernels and has_one_size else None


@torch.no_grad()
def _whitened(operator: LinearOperator) -> tuple[NoisyLinearOperator, Tensor] | None:
    """The whitened system and R; None for another form, or a singular N."""
    found = kronecker_terms(operator)
    if found is None or not found[1]:
        return None
    kernels, noises = found
    root, info = torch.linalg.cholesky_ex(sum(noise.double() for noise in noises))
    if info.any():
        return None
    inverse = torch.linalg.inv(root)
    parts = [
        KroneckerLinearOperator(points, to_linear_operator((inverse @ tasks.double() @ inverse.mT).to(operator.dtype)))
        for points, tasks in kernels
    ]
    kernel = parts[0] if len(parts) == 1 else SumLinearOperator(*parts)
    root = root.to(operator.dtype)
    return NoisyLinearOperator(kernel, root.new_ones(operator.shape[:-1])), root


def _of_tasks(matrix: Tensor, vectors: Tensor) -> Tensor:
    """(I x matrix) vectors, for [*b, T, T] and [*b, n T, s]."""
    return (matrix.unsqueeze(-3) @ vectors.unflatten(-2, (-1, matrix.shape[-1]))).flatten(-3, -2)

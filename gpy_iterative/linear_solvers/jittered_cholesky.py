"""Cholesky factors of matrices that rounding may have left without one."""

import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError, float64_first, warn

#: Multiples of the largest diagonal entry that are added to the diagonal, tried in turn.
JITTERS = (0.0, 1e-8, 1e-6, 1e-4)


def jittered_cholesky(matrix: Tensor, name: str) -> tuple[Tensor, float]:
    """The lower factor of a float64 matrix [*b, n, n], which stays as it is, and the jitter that it took.

    Args:
        matrix: symmetric.
        name: what errors call it.

    Raises:
        NonFiniteError: an entry is not finite.
        NotPositiveDefiniteError: no factor even with the largest jitter.
    """
    if not torch.isfinite(matrix).all():
        raise NonFiniteError(f"{name} has entries that are not finite: check data and hyperparameters.")
    for jitter in JITTERS:
        trial = matrix
        if jitter:
            trial = matrix.clone()
            diagonal = trial.diagonal(dim1=-2, dim2=-1)
            diagonal.add_(jitter * diagonal.amax(-1, keepdim=True))
        factor, info = torch.linalg.cholesky_ex(trial)
        if not info.any():
            return factor, jitter
    raise NotPositiveDefiniteError(
        f"{name} is not positive definite even with a jitter of {JITTERS[-1]:g} of its diagonal. Keep the noise away from "
        "zero (a noise constraint), use float64, or check the kernel."
    )


def warned_cholesky(matrix: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """`jittered_cholesky` of a matrix whose entries were computed in a dtype, which says so where it took a jitter."""
    factor, jitter = jittered_cholesky(matrix, name)
    if jitter:
        warn(
            f"A jitter of {jitter:g} times the largest diagonal entry was added to factor {name[:1].lower()}{name[1:]}. To "
            f"avoid it {float64_first(dtype)}keep the noise away from zero (a noise constraint), or drop near-duplicates.",
            NumericalWarning,
        )
    return factor

"""Small blocks of the system, solved exactly: what projections are made of."""

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError, NotPositiveDefiniteError

#: Relative jitters, tried in turn on a block that has no Cholesky factor even in float64.
JITTERS = (0.0, 1e-8, 1e-6, 1e-4)


def block_cholesky(block: Tensor) -> Tensor:
    """The lower Cholesky factor, in the precision and with as much jitter as the arithmetic needs."""
    factor, info = torch.linalg.cholesky_ex(block)
    if not info:
        return factor
    if not torch.isfinite(block).all():
        raise NonFiniteError("A block of the system has entries that are not finite: check data and hyperparameters.")
    block = block.double()
    diagonal = block.diagonal()
    scale, added = diagonal.max().clone(), 0.0
    for jitter in JITTERS:
        diagonal.add_((jitter - added) * scale)
        added = jitter
        factor, info = torch.linalg.cholesky_ex(block)
        if not info:
            return factor
    raise NotPositiveDefiniteError(
        f"A block of {len(block)} rows is not positive definite even with a jitter of {JITTERS[-1]:g} of its diagonal. "
        "Keep the noise away from zero (a noise constraint), or use float64."
    )


def block_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The block's inverse times rhs [m, s], in the dtype of rhs."""
    return torch.cholesky_solve(rhs.to(factor.dtype), factor).to(rhs.dtype)

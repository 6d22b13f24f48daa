"""Several targets for one matrix: members of a batch of right-hand sides as further columns of one solve."""

from collections.abc import Iterable

from linear_operator import LinearOperator
from torch import Tensor


def unexpanded(inputs: Iterable[Tensor]) -> list[Tensor]:
    """Inputs [*f, *b, n, d] as [*b, n, d], without leading dimensions along which all of them are expanded views.

    GPyTorch wants inputs as often as there are targets. They have one matrix all the same.
    """
    inputs = list(inputs)
    while inputs and all(x.dim() > 2 and len(x) and x.stride(0) == 0 for x in inputs):
        inputs = [x[0] for x in inputs]
    return inputs


def as_columns(rhs: Tensor, operator: LinearOperator) -> Tensor:
    """[*f, *k, m, s] for an operator [*k, m, m] to [*k, m, s * F]: one product serves the F members."""
    extra = rhs.dim() - operator.dim()
    if extra <= 0:
        return rhs
    return rhs.flatten(0, extra - 1).movedim(0, -1).flatten(-2)


def from_columns(columns: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_columns`, for a right-hand side of the shape of `like`."""
    extra = like.dim() - columns.dim()
    if extra <= 0:
        return columns
    return columns.unflatten(-1, (like.shape[-1], -1)).movedim(-1, 0).reshape(like.shape)

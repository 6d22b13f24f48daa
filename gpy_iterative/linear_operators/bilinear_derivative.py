"""The derivative of a sum of left_k^T K right_k where the products K left_k are known already.

They are those of a solve's solutions: K times one is the right-hand side less the residual. What scales the matrix as a
whole then needs no pass over it.
"""

from functools import singledispatch

from linear_operator import LinearOperator
from torch import Tensor


@singledispatch
def bilinear_derivative(
    operator: LinearOperator, left: Tensor, right: Tensor, left_image: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The derivatives of `(left * (operator @ right)).sum()` with respect to `operator.representation()`.

    Args:
        operator: [*b, n, m].
        left, right: [*b, n, s] and [*b, m, s], constant.
        left_image: operator^T left [*b, m, s], where it is at hand; operators that have no use for it ignore it.

    Returns:
        One tensor, or None, for each of the representation.
    """
    return operator._bilinear_derivative(left, right)

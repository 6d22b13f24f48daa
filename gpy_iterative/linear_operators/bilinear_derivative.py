"""The derivative of a sum of left_k^T K right_k, where its terms may be known already.

After a solve they are: for a solution v of K v = b, K v is b less the solve's residual. The derivative with respect to what
scales the whole matrix follows from them, without a pass over it.
"""

from functools import singledispatch

from linear_operator import LinearOperator
from torch import Tensor


@singledispatch
def bilinear_derivative(
    operator: LinearOperator, left: Tensor, right: Tensor, forms: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The derivatives of `(left * (operator @ right)).sum()` with respect to `operator.representation()`.

    Args:
        operator: [*b, n, m].
        left, right: [*b, n, s] and [*b, m, s], constant.
        forms: left_k^T operator right_k [*b, s] in float64, where they are known.

    Returns:
        One tensor, or None, for each of the representation.

    Operators that have a use for the forms register themselves; for all others this is `_bilinear_derivative`.
    """
    return operator._bilinear_derivative(left, right)

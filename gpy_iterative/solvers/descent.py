"""What the solvers that descend by rows share: their options, how far a step may go, and when it went too far."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.solvers.base import Iterate
from gpy_iterative.solvers.columns import reads_every

#: The largest eigenvalue is known well enough when a power iteration raises it by less than this part.
EIGENVALUE_TOLERANCE = 0.05
MAX_POWER_ITERATIONS = 10
#: A residual that grows beyond this multiple of where it started sends the solve back there with a smaller step.
DIVERGENCE = 10.0
MAX_HALVINGS = 5


@dataclass(frozen=True)
class WayBack:
    """Where a round of iterations began, and how far residuals may grow before it goes back there.

    Attributes:
        value, residual: [n, s], copies.
        limit: [s], residual norms.
        steps: counted, since an accelerator is asked only every few of them.
    """

    value: Tensor
    residual: Tensor
    limit: Tensor
    steps: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def to(cls, iterate: Iterate) -> "WayBack":
        """To where the iterate stands now."""
        limit = DIVERGENCE * torch.linalg.vector_norm(iterate.residual, dim=0)
        return cls(iterate.value.clone(), iterate.residual.clone(), limit)

    def growth(self, residual: Tensor) -> float:
        """The largest norm of the columns of [n, s] over its limit: 1 or less is well; 0 where nobody looked."""
        if next(self.steps) % reads_every(residual.device):
            return 0.0
        return float((torch.linalg.vector_norm(residual, dim=0) / self.limit).max())

    def take(self, iterate: Iterate) -> None:
        """Overwrites the iterate."""
        iterate.value.copy_(self.value)
        iterate.residual.copy_(self.residual)

    def narrow(self, columns: Tensor) -> "WayBack":
        """For some of the columns."""
        return WayBack(self.value[:, columns], self.residual[:, columns], self.limit[columns], self.steps)


def check_descent(batch_size: int, momentum: float, learning_rate: float | None) -> None:
    """ValueError unless the options are within their ranges."""
    check_count("batch_size", batch_size)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}.")
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate must be positive and finite, got {learning_rate}.")


def row_permutation(operator: LinearOperator, generator: torch.Generator) -> Tensor:
    """All rows in random order, on the operator's device."""
    order = torch.randperm(operator.shape[-1], generator=generator, device=generator.device)
    return order.to(operator.device)


def largest_eigenvalue(operator: LinearOperator, generator: torch.Generator) -> tuple[float, int]:
    """A lower estimate by power iterations, and how many products it took."""
    vector = torch.randn(operator.shape[-1], 1, generator=generator, device=generator.device, dtype=operator.dtype).to(
        operator.device
    )
    largest = 0.0
    for iteration in range(1, MAX_POWER_ITERATIONS + 1):
        vector = operator._matmul(vector / torch.linalg.vector_norm(vector))
        previous, largest = largest, float(torch.linalg.vector_norm(vector))
        if largest <= (1 + EIGENVALUE_TOLERANCE) * previous:
            return largest, iteration
    return largest, MAX_POWER_ITERATIONS

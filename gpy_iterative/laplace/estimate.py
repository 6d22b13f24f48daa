"""Value and gradient of a training objective."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.surrogate import surrogate


@dataclass(frozen=True)
class ObjectiveEstimate:
    """An objective L, not divided by n, and the factors of its gradient; float64.

    Attributes:
        value, value_sem: L and its standard error, [].
        left, right: dL/dK = left right^T, [n C, k] each; without right, left is dL/dK [n C, n C].
        mean_weights: dL/dm [n C].
        likelihood_terms: a scalar with L's gradient for the likelihood's parameters.
        status: of the mode or the worst solve.
        advice: for a mode with another status than CONVERGED.
        diagonal: further gradient for K's diagonal blocks [n, C, C].
        probe_epochs: see `LaplaceReport`.
    """

    value: Tensor
    value_sem: Tensor
    left: Tensor
    right: Tensor | None
    mean_weights: Tensor
    likelihood_terms: Callable[[], Tensor]
    status: SolveStatus
    advice: str
    diagonal: Tensor | None = None
    probe_epochs: float = 0.0

    def __post_init__(self) -> None:
        for name, tensor in (("value", self.value), ("gradient", self.mean_weights)):
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(
                    f"The objective's {name} is not finite: bound the hyperparameters, or use float64."
                )

    def with_gradient(self, prior: LatentPrior, likelihood: PointwiseLikelihood) -> Tensor:
        """L [] in the prior's dtype, differentiable in all parameters."""
        dtype = prior.operator.dtype
        value = surrogate(
            prior.operator,
            self.value.to(dtype),
            self.left.to(dtype),
            None if self.right is None else self.right.to(dtype),
            self.mean_weights.to(dtype),
            -prior.mean.flatten(),
        )
        if torch.is_grad_enabled() and self.diagonal is not None:
            value = value + _gradient_alone((self.diagonal * prior.point_blocks().double()).sum()).to(dtype)
        if torch.is_grad_enabled() and likelihood.has_parameters:
            value = value + _gradient_alone(self.likelihood_terms()).to(dtype)
        return value


def _gradient_alone(term: Tensor) -> Tensor:
    """Zero with a gradient."""
    return term - term.detach()

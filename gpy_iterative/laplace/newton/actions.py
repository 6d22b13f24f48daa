"""Which direction the kernel is multiplied with next: the policy of a computation-aware solver."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gpy_iterative.laplace.likelihoods.curvature import Curvature

PolicyName = Literal["weighted_residual", "residual", "unit"]


@dataclass(frozen=True)
class ActionState:
    """What a policy may look at.

    Attributes:
        residual: r = rhs - (K + W^+) v of the current Newton system, [n, C].
        weighted_residual: W r, [n, C].
        gradient: g - v at the Newton iterate, of the log joint density, [n, C].
        latent: f, [n, C].
        curvature: W.
        variance: what is left of the prior variance, [n, C]; evaluated where it is called for.
        used: flat indices of the unit vectors that were taken.
    """

    residual: Tensor
    weighted_residual: Tensor
    gradient: Tensor
    latent: Tensor
    curvature: Curvature
    variance: Callable[[], Tensor]
    used: set[int] = field(default_factory=set)


Policy = Callable[[ActionState], Tensor]


def weighted_residual(state: ActionState) -> Tensor:
    """W r: conjugate gradients on I + R^T K R, which divides by W nowhere and stays in its range."""
    return state.weighted_residual


def residual(state: ActionState) -> Tensor:
    """r: conjugate gradients on K + W^+, the paper's choice; in the range of W."""
    return state.curvature.project(state.residual.reshape(-1, 1)).view_as(state.residual)


def unit(state: ActionState) -> Tensor:
    """The unit vector of the value that is least known: a partial Cholesky factor, or a subset of the data."""
    variance = state.variance().flatten().clone()
    if state.used:
        variance[torch.tensor(sorted(state.used), device=variance.device)] = -torch.inf
    index = int(variance.argmax())
    action = torch.zeros_like(variance)
    if variance[index] > -torch.inf:
        state.used.add(index)
        action[index] = 1
    return state.curvature.project(action.unsqueeze(-1)).view_as(state.residual)


POLICIES: dict[str, Policy] = {"weighted_residual": weighted_residual, "residual": residual, "unit": unit}


def policy_of(value: PolicyName | Policy) -> Policy:
    """The policy of a name, or the caller's own. Raises ValueError for an unknown name."""
    if callable(value):
        return value
    if value not in POLICIES:
        raise ValueError(f"policy must be a function or one of {', '.join(POLICIES)}, got {value!r}.")
    return POLICIES[value]

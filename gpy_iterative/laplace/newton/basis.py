"""Orthonormal actions S, images T = K S, and M = S^T (K + W^+) S.

Only kernel products and orthogonal changes of basis change T: T = K S holds to rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpy_iterative.laplace.likelihoods.curvature import Curvature

#: A smaller rest of an action is rounding; a larger one needs only one orthogonalisation.
DEPENDENT, ORTHOGONAL_ENOUGH = 100 * torch.finfo(torch.float64).eps, 0.7


class ActionBasis:
    """S and T [N, B] for N = `size`, in buffers for the most actions that there will be, `capacity`."""

    def __init__(self, size: int, capacity: int, like: Tensor) -> None:
        capacity = min(capacity, size)
        empty = lambda *shape: torch.empty(*shape, dtype=torch.float64, device=like.device)
        self._actions, self._images = empty(capacity, size), empty(capacity, size)
        self.count = 0

    @property
    def actions(self) -> Tensor:
        return self._actions[: self.count].mT

    @property
    def images(self) -> Tensor:
        return self._images[: self.count].mT

    def orthonormalised(self, action: Tensor, curvature: Curvature, beside: Sequence[Tensor] = ()) -> Tensor | None:
        """An action [N] orthonormalised against basis and `beside`, or None."""
        rest, left = action / torch.linalg.vector_norm(action), 1.0
        for _ in range(2):
            rest = rest - self.actions @ (self.actions.mT @ rest)
            for other in beside:
                rest = rest - other * (other @ rest)
            # An action outside the range of W would count as a noise-free observation.
            rest = curvature.project(rest.unsqueeze(-1)).squeeze(-1)
            norm = float(torch.linalg.vector_norm(rest))
            left *= norm
            if not left >= DEPENDENT:  # also true for NaN, from an action of zero
                return None
            rest = rest / norm
            if norm > ORTHOGONAL_ENOUGH:
                break
        return rest

    def append(self, action: Tensor, image: Tensor) -> None:
        self._actions[self.count], self._images[self.count] = action, image
        self.count += 1

    def replace(self, actions: Tensor, images: Tensor) -> None:
        self.count = actions.shape[-1]
        self._actions[: self.count], self._images[: self.count] = actions.mT, images.mT


class GalerkinSystem:
    """M for one W; `transform` A [B, r] has A A^T = M^-1. Costs O(N B^2)."""

    def __init__(self, basis: ActionBasis, curvature: Curvature) -> None:
        self.basis, self.curvature = basis, curvature
        self.transform = _transform(basis, curvature)

    def solve(self, rhs: Tensor) -> Tensor:
        """Coefficients a [B, b] of solutions S a for rhs [N, b]."""
        return self.transform @ (self.transform.mT @ (self.basis.actions.mT @ rhs))

    def append(self, action: Tensor, image: Tensor, rhs: Tensor) -> Tensor:
        """Adds an orthonormal action; returns the change of `solve(rhs)`."""
        weighted = self.curvature.pinv(action.unsqueeze(-1)).squeeze(-1)
        column = self.basis.images.mT @ action + self.basis.actions.mT @ weighted
        corner = action @ image + action @ weighted
        known = self.transform.mT @ column
        pivot = corner - known @ known
        size, rank = self.transform.shape
        if not pivot > 1e-14 * corner:  # rounding: M is factored again
            before = self.solve(rhs)
            self.basis.append(action, image)
            self.transform = _transform(self.basis, self.curvature)
            after = self.solve(rhs)
            after[:size] -= before
            return after
        self.basis.append(action, image)
        transform = self.transform.new_zeros(size + 1, rank + 1)
        transform[:size, :rank] = self.transform
        direction = torch.cat([-self.transform @ known, known.new_ones(1)]) / pivot.sqrt()
        transform[:, rank] = direction
        self.transform = transform
        return direction.unsqueeze(-1) * ((self.basis.actions @ direction) @ rhs)  # O(N (B + b)), not O(N B b)

    def compress(self, rhs: Tensor, rank: int) -> None:
        """Keeps the solution and the largest variance reductions in `rank` actions."""
        # The variance falls by tr(M^-1 T^T T): the best u have the largest eta in T^T T u = eta M u.
        whitened = self.basis.images @ self.transform
        reduction = whitened.mT @ whitened
        mean = self.transform.mT @ (self.basis.actions.mT @ rhs)  # in whitened coordinates
        norm = torch.linalg.vector_norm(mean)
        kept = mean.unsqueeze(-1) / norm if norm > 0 else mean.new_zeros(len(mean), 0)
        rest = reduction - kept @ (kept.mT @ reduction)
        rest = rest - (rest @ kept) @ kept.mT
        count = min(rank, len(mean)) - kept.shape[-1]
        others = torch.linalg.eigh((rest + rest.mT) / 2)[1].flip(-1)[:, :count]
        # S is orthonormal: these actions are, too.
        combinations, _ = torch.linalg.qr(self.transform @ torch.cat([kept, others], dim=-1))
        self.basis.replace(self.basis.actions @ combinations, self.basis.images @ combinations)
        self.transform = _transform(self.basis, self.curvature)


def _transform(basis: ActionBasis, curvature: Curvature) -> Tensor:
    actions = basis.actions
    return inverse_root(actions.mT @ (basis.images + curvature.pinv(actions)), torch.finfo(actions.dtype).eps)


def inverse_root(matrix: Tensor, eps: float) -> Tensor:
    """A [B, r], A A^T the pseudo-inverse of a matrix with rounding `eps`."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values > 10 * len(values) * eps * values.amax() if len(values) else values > 0
    return vectors[:, kept] / values[kept].sqrt()

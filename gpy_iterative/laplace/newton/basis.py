"""The subspace of an iterative Newton method: actions S, their images T = K S, and M = S^T (K + W^+) S.

S is kept orthonormal and T is only ever computed from it by a kernel product (or an orthogonal change of basis), so that
T = K S holds to the rounding of the product. Newton steps change W, never K: the whole subspace is used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.laplace.likelihoods.curvature import Curvature

#: The part of an action that is left after two orthogonalisations is rounding below this.
DEPENDENT = 100 * torch.finfo(torch.float64).eps
#: One orthogonalisation is enough where it leaves so much of an action.
ORTHOGONAL_ENOUGH = 0.7


class ActionBasis:
    """Actions [N, B] and their images, in rows of a buffer that grows; N = `size`, on the device of `like`."""

    def __init__(self, size: int, capacity: int, like: Tensor) -> None:
        capacity = max(min(capacity, size), 1)
        empty = lambda *shape: torch.empty(*shape, dtype=torch.float64, device=like.device)
        self._actions, self._images = empty(capacity, size), empty(capacity, size)
        self._gram = empty(capacity, capacity)
        self.count = 0

    @property
    def actions(self) -> Tensor:
        """S [N, B], orthonormal."""
        return self._actions[: self.count].mT

    @property
    def images(self) -> Tensor:
        """T = K S [N, B]."""
        return self._images[: self.count].mT

    @property
    def gram(self) -> Tensor:
        """S^T K S [B, B]."""
        return self._gram[: self.count, : self.count]

    def orthonormalised(self, action: Tensor, curvature: Curvature, beside: Sequence[Tensor] = ()) -> Tensor | None:
        """The part of an action [N] orthogonal to the basis and to `beside`, of norm 1; None where that is rounding."""
        size = torch.linalg.vector_norm(action)
        if not size > 0:
            return None
        rest, left = action / size, 1.0
        for _ in range(2):
            rest = rest - self.actions @ (self.actions.mT @ rest)
            for other in beside:
                rest = rest - other * (other @ rest)
            # Outside the range of W nothing is observed: there an action would count as an observation without noise.
            rest = curvature.project(rest.unsqueeze(-1)).squeeze(-1)
            norm = float(torch.linalg.vector_norm(rest))
            left *= norm
            if left < DEPENDENT:
                return None
            rest = rest / norm
            if norm > ORTHOGONAL_ENOUGH:
                break
        return rest

    def append(self, action: Tensor, image: Tensor) -> None:
        """Takes an orthonormalised action [N] and its image [N]."""
        self._reserve(self.count + 1)
        row = self.images.mT @ action
        self._actions[self.count], self._images[self.count] = action, image
        self._gram[self.count, : self.count], self._gram[: self.count, self.count] = row, row
        self._gram[self.count, self.count] = action @ image
        self.count += 1

    def replace(self, actions: Tensor, images: Tensor) -> None:
        """Another basis: S [N, B] orthonormal and T = K S."""
        self.count = 0
        self._reserve(actions.shape[-1])
        self.count = actions.shape[-1]
        self._actions[: self.count], self._images[: self.count] = actions.mT, images.mT
        gram = actions.mT @ images
        self._gram[: self.count, : self.count] = (gram + gram.mT) / 2

    def _reserve(self, count: int) -> None:
        capacity = self._gram.shape[-1]
        if count <= capacity:
            return
        larger = max(2 * capacity, count)
        actions, images = (kept.new_empty(larger, kept.shape[-1]) for kept in (self._actions, self._images))
        gram = self._gram.new_empty(larger, larger)
        actions[: self.count], images[: self.count] = self.actions.mT, self.images.mT
        gram[: self.count, : self.count] = self.gram
        self._actions, self._images, self._gram = actions, images, gram


@dataclass
class GalerkinSystem:
    """M = S^T (K + W^+) S for one W, and `transform` A [B, r] with A A^T = M^-1.

    S A A^T S^T is the inverse of K + W^+ within the subspace.
    """

    basis: ActionBasis
    curvature: Curvature
    transform: Tensor

    @classmethod
    def of(cls, basis: ActionBasis, curvature: Curvature) -> "GalerkinSystem":
        """Factors M; no kernel product, O(N B^2)."""
        return cls(basis, curvature, _transform(basis, curvature))

    def solve(self, rhs: Tensor) -> Tensor:
        """The coefficients a [B, b] of the solutions S a for right-hand sides [N, b]; [B] for [N]."""
        return self.transform @ (self.transform.mT @ (self.basis.actions.mT @ rhs))

    def append(self, action: Tensor, image: Tensor, rhs: Tensor) -> Tensor:
        """Takes an orthonormalised action; returns its change of `solve(rhs)`, as coefficients [B + 1]."""
        weighted = self.curvature.pinv(action.unsqueeze(-1)).squeeze(-1)
        column = self.basis.images.mT @ action + self.basis.actions.mT @ weighted
        corner = action @ image + action @ weighted
        known = self.transform.mT @ column
        pivot = corner - known @ known
        size, rank = self.transform.shape
        if not pivot > 1e-14 * corner:  # M is factored again, and the answer is the whole difference
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
        return direction.unsqueeze(-1) * (direction @ (self.basis.actions.mT @ rhs))

    def compress(self, rhs: Tensor, rank: int) -> None:
        """Keeps `rank` combinations of the actions: the solution for rhs [N], and the largest variance reductions."""
        # A basis reduces the predictive variance by tr(M^-1 T^T T): best are the largest solutions of T^T T u = eta M u.
        whitened = self.basis.images @ self.transform
        reduction = whitened.mT @ whitened
        mean = self.transform.mT @ (self.basis.actions.mT @ rhs)  # in the whitened coordinates
        norm = torch.linalg.vector_norm(mean)
        kept = mean.unsqueeze(-1) / norm if norm > 0 else mean.new_zeros(len(mean), 0)
        rest = reduction - kept @ (kept.mT @ reduction)
        rest = rest - (rest @ kept) @ kept.mT
        count = min(rank, len(mean)) - kept.shape[-1]
        others = torch.linalg.eigh((rest + rest.mT) / 2)[1].flip(-1)[:, :count]
        # S is orthonormal: the orthonormal basis of S A is S times that of A.
        combinations, _ = torch.linalg.qr(self.transform @ torch.cat([kept, others], dim=-1))
        self.basis.replace(self.basis.actions @ combinations, self.basis.images @ combinations)
        self.transform = _transform(self.basis, self.curvature)


def _transform(basis: ActionBasis, curvature: Curvature) -> Tensor:
    """A [B, r] with A A^T = M^-1, without directions of rounding size."""
    actions = basis.actions
    matrix = basis.gram + actions.mT @ curvature.pinv(actions)
    scale = matrix.diagonal().clamp_min(torch.finfo(matrix.dtype).tiny).rsqrt()
    return scale.unsqueeze(-1) * inverse_root(scale.unsqueeze(-1) * matrix * scale, torch.finfo(matrix.dtype).eps)


def inverse_root(matrix: Tensor, eps: float) -> Tensor:
    """A [B, r] with A A^T the pseudo-inverse of a positive semi-definite matrix whose entries have rounding `eps`."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values > 10 * len(values) * eps * values.amax() if len(values) else values > 0
    return vectors[:, kept] / values[kept].sqrt()

"""A smaller subspace of the actions, chosen for what it keeps.

The reduction of the predictive variance that a basis achieves is tr(M^-1 T^T T). The paper keeps the largest eigenvalues
of M; its argument assumes actions that are eigenvectors, and no noise. Where the reduction counts, the best subspace is
that of the largest solutions of T^T T u = eta M u; and where the mean counts too, its direction has to be kept with it.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from gpy_iterative.laplace.newton.basis import ActionBasis, GalerkinSystem

Compression = Literal["keep_mean", "variance", "paper"]


def check_compression(value: str | None) -> None:
    """Raises ValueError for anything but None or a rule's name."""
    if value is not None and value not in get_args(Compression):
        raise ValueError(f"compression must be None or one of {', '.join(get_args(Compression))}, got {value!r}.")


def compress(system: GalerkinSystem, rhs: Tensor, rank: int, rule: Compression) -> None:
    """Replaces the system's basis by `rank` combinations of its actions, and factors it anew.

    Args:
        system: the basis and M.
        rhs: [N], of the current Newton step: "keep_mean" leaves its solution unchanged.
        rank: actions that are kept.
        rule: "keep_mean" (the mean, and the largest variance reductions), "variance" (the reductions alone), or "paper"
            (the largest eigenvalues of M).

    Cost O(N B^2), no kernel product.
    """
    basis = system.basis
    if basis.count <= rank:
        return
    chosen = combinations(system, rhs, rank, rule)
    _change_basis(basis, chosen)
    system.transform = GalerkinSystem.of(basis, system.curvature).transform


def combinations(system: GalerkinSystem, rhs: Tensor, rank: int, rule: Compression) -> Tensor:
    """The coefficients [B, rank] of the actions that a rule keeps."""
    if rule == "paper":
        actions = system.basis.actions
        matrix = system.basis.gram + actions.mT @ system.curvature.pinv(actions)
        return torch.linalg.eigh((matrix + matrix.mT) / 2)[1][:, -rank:]
    whitened = system.basis.images @ system.transform
    reduction = whitened.mT @ whitened
    if rule == "variance":
        return system.transform @ torch.linalg.eigh(reduction)[1][:, -rank:]
    # In the whitened coordinates the mean is A^T S^T rhs.
    mean = system.transform.mT @ (system.basis.actions.mT @ rhs)
    norm = torch.linalg.vector_norm(mean)
    if not norm > 0:
        return combinations(system, rhs, rank, "variance")
    mean = (mean / norm).unsqueeze(-1)
    rest = reduction - mean @ (mean.mT @ reduction)
    rest = rest - (rest @ mean) @ mean.mT
    vectors = torch.linalg.eigh((rest + rest.mT) / 2)[1][:, max(rest.shape[-1] - (rank - 1), 1) :] if rank > 1 else None
    return system.transform @ (mean if vectors is None else torch.cat([mean, vectors], dim=-1))


def _change_basis(basis: ActionBasis, coefficients: Tensor) -> None:
    # S is orthonormal, so that the orthonormal basis of S A is S times that of A: nothing large is factored.
    orthonormal, _ = torch.linalg.qr(coefficients)
    basis.replace(basis.actions @ orthonormal, basis.images @ orthonormal)

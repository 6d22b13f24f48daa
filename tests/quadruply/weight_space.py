"""Dense references of the quadruply stochastic estimators, and small problems for them. Nothing of the package is used."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def subsets(pool: Sequence[int], size: int) -> list[list[int]]:
    """All of that size."""
    return [list(chosen) for chosen in itertools.combinations(pool, size)]


def quasi_normal(*shape: int, root: float) -> Tensor:
    """Numbers that look normal and need no seed, float64."""
    k = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    u, v = (k * math.sqrt(root)) % 1, (k * math.sqrt(root + 4)) % 1
    return ((-2 * torch.log1p(-u)).sqrt() * torch.cos(2 * math.pi * v)).reshape(shape)


def elbo_terms(phi: Tensor, prior: Tensor, y: Tensor, noise: float, mean: Tensor, root: Tensor) -> Tensor:
    """L_mu, L_Sigma, L_const, whose sum is -2 ELBO; phi [n, m], prior precision [m, m], root of the covariance [m, m]."""
    n, m = phi.shape
    l_mean = (-2 * y @ phi @ mean + (phi @ mean).square().sum()) / noise + mean @ prior @ mean
    l_root = (phi @ root).square().sum() / noise + torch.trace(prior @ root @ root.mT)
    l_root = l_root - 2 * root.diagonal().log().sum()
    constant = -torch.logdet(prior) - m + n * math.log(2 * math.pi * noise) + y @ y / noise
    return torch.stack([l_mean, l_root, constant])


def log_marginal(phi: Tensor, prior: Tensor, y: Tensor, noise: float) -> Tensor:
    """Log N(y | 0, phi S^-1 phi^T + noise I)."""
    covariance = phi @ torch.linalg.solve(prior, phi.mT) + noise * torch.eye(len(y), dtype=phi.dtype)
    return torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)


def best_weights(phi: Tensor, prior: Tensor, y: Tensor, noise: float, num_dense: int) -> tuple[Tensor, Tensor]:
    """The optimal mean and chevron root. Columns decouple: a dense one regresses its feature on the later ones."""
    a = phi.mT @ phi / noise + prior
    m = len(a)
    root = torch.diag(a.diagonal().rsqrt())
    for r in range(min(num_dense, m - 1)):
        later = torch.arange(r + 1, m)
        solution = torch.linalg.solve(a[later][:, later], a[later, r])
        root[r, r] = (a[r, r] - a[r, later] @ solution).rsqrt()
        root[later, r] = -solution * root[r, r]
    return torch.linalg.solve(a, phi.mT @ y / noise), root

"""Naive twin: the estimator as printed, theorems 1 and 2 and proposition 2 of Evans and Nair 2018.

Unbiased, like the one that training uses, with a variance that is larger by far: the triple sum over i, j and r is alive on
their intersection alone where columns have a diagonal entry only.
"""

import math

import torch
from torch import Tensor

from gpy_iterative.quadruply.model import QuadruplyStochasticGP


def printed_estimate(
    model: QuadruplyStochasticGP,
    x: Tensor,
    residual: Tensor,
    noise: Tensor,
    num_data: int,
    first: Tensor,
    second: Tensor,
    columns: Tensor,
) -> Tensor:
    """L_mu + L_Sigma + L_const = -2 ELBO, [].

    Args:
        model: whose basis has no head of its own.
        x: sampled rows [b, d].
        residual: their targets minus the prior mean, [b].
        noise: their variances, [b].
        num_data: n.
        first, second: independent sets of groups i and j, of all groups of the basis.
        columns: r, features whose columns of C are summed, a set independent of both.

    Cost O(b t + (b + t) t k) for t features; O(m) for gathering parameters, with dense gradients.
    """
    basis, weights, k = model.basis, model.weights, model.weights.num_dense_columns
    i, j = (_positions(model, groups) for groups in (first, second))
    m, n = basis.num_features, num_data
    feature_scale, column_scale, weight = m / len(i), m / len(columns), n / len(x)
    head = basis.head_features(x)
    phi_i, phi_j = (basis.group_features(x, head, groups) for groups in (first, second))
    mean = torch.cat([weights.head_mean, weights.tail_mean.squeeze(-1)])
    dense = torch.cat([weights.dense_head_columns, weights.tail_columns])
    tail = weights.tail_log_diagonal.squeeze(-1)
    log_diagonal = torch.cat(
        [weights.head_log_diagonal, tail.expand(weights.num_tail) if weights.shared_diagonal else tail]
    )
    prior = _prior_block(model, first, second, i, j)

    mu_i, mu_j = mean[i], mean[j]
    latent_i, latent_j = phi_i @ mu_i, phi_j @ mu_j
    total = -2 * weight * feature_scale * (residual * latent_i / noise).sum()
    total = total + weight * feature_scale**2 * (latent_i * latent_j / noise).sum()
    total = total + feature_scale**2 * mu_j @ prior @ mu_i

    in_head = columns[columns < k]
    c_i, c_j = dense[i][:, in_head], dense[j][:, in_head]
    own = columns[columns >= k]  # one entry each: alive where the column's own row is in both sets
    at_i, at_j = i.unsqueeze(-1) == own, j.unsqueeze(-1) == own
    scale = log_diagonal[own].exp()
    c_i = torch.cat([c_i, at_i * scale], dim=-1)
    c_j = torch.cat([c_j, at_j * scale], dim=-1)
    products = ((phi_j @ c_j) * (phi_i @ c_i) / noise.unsqueeze(-1)).sum()
    total = total + column_scale * feature_scale**2 * (weight * products + (c_j * (prior @ c_i)).sum())
    total = total - 2 * column_scale * log_diagonal[columns].sum()

    constant = weight * (residual.square() / noise + noise.log() + math.log(2 * math.pi)).sum() - m
    if basis.has_diagonal_prior:
        precision = basis.prior_precision(first)
        return total + constant - feature_scale * precision.log().sum()
    log_determinant = basis.prior_log_determinant()
    return total + constant - (0 if log_determinant is None else log_determinant)


def _positions(model: QuadruplyStochasticGP, groups: Tensor) -> Tensor:
    """Where the features of groups are among the parameters of head and tail together."""
    size, lead, head = model.basis.group_size, model.num_leading_groups, model.weights.num_head
    members = torch.arange(size, device=groups.device).unsqueeze(-1)
    # The head's are in the order in which they are evaluated: first members first.
    return torch.where(groups < lead, members * lead + groups, head + (groups - lead) * size + members).flatten()


def _prior_block(model: QuadruplyStochasticGP, first: Tensor, second: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """S at rows j and columns i."""
    if not model.basis.has_diagonal_prior:
        return model.basis.prior_precision_block(second, first)
    same = (j.unsqueeze(-1) == i).to(model.weights.head_mean.dtype)
    precision = model.basis.prior_precision(first)
    return same * precision

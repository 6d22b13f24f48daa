"""Twice the Kullback-Leibler divergence of q(w) from the prior, estimated from samples of groups.

2 KL = mu^T S mu + tr(S C C^T) - log|C C^T| - log|S| - m. For a diagonal S every term is a sum over features, and one sample
does. For S = k(Z, Z) the two quadratic forms are double sums, and two independent samples make them unbiased.
"""

import torch
from torch import Tensor

from gpy_iterative.quadruply.feature_samples import Sample
from gpy_iterative.quadruply.model import QuadruplyStochasticGP


def twice_divergence(model: QuadruplyStochasticGP, first: Sample, second: Sample) -> Tensor:
    """Unbiased where the samples are independent and uniform; exact where both have all groups.

    Cost O(h k) for the head, O(t k) for samples with a diagonal S, O(t^2) for another.
    """
    weights, k = model.weights, model.weights.num_dense_columns
    total = -2 * weights.head_log_diagonal.sum() - model.basis.num_features
    if weights.shared_diagonal:
        total = total + weights.num_tail * (weights.shared_variance - weights.shared_variance.log())
    if not model.basis.has_diagonal_prior:
        return total + _dense_prior(model, first, second)
    head_precision = model.head_precision()
    precision = torch.ones_like(weights.head_mean) if head_precision is None else head_precision
    total = total + (precision * (weights.head_mean.square() + weights.dense_head_columns.square().sum(-1))).sum()
    total = total + (precision[k:] * weights.head_variances).sum()
    if head_precision is not None:
        total = total - head_precision.log().sum()
    return total + (first.prior_terms() + second.prior_terms()) / 2


def _dense_prior(model: QuadruplyStochasticGP, first: Sample, second: Sample) -> Tensor:
    """The terms of S, whose head is all dense columns; log|S| where it is known."""
    weights, basis = model.weights, model.basis
    lead = torch.arange(model.num_leading_groups, device=model.device)
    parts = []
    for sample in (first, second):
        groups = torch.cat([lead, sample.groups + model.num_leading_groups])
        mean = torch.cat([weights.head_mean, sample.weight * sample.rows.mean])
        columns = torch.cat([weights.dense_head_columns, sample.weight * sample.rows.columns])
        parts.append((groups, torch.cat([mean.unsqueeze(-1), columns], dim=-1)))
    (rows, left), (columns, right) = parts
    total = (left * (basis.prior_precision_block(rows, columns) @ right)).sum()
    variances = (2 * first.rows.log_diagonal).exp()
    total = total + first.weight * (first.precision * variances - 2 * first.rows.log_diagonal).sum()
    log_determinant = basis.prior_log_determinant()
    return total if log_determinant is None else total - log_determinant

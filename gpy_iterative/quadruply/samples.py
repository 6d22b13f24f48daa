"""Sampled groups of features, and unbiased estimates of sums over all features."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.quadruply.feature_weights import Head
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.random_numbers import integers, permutation

#: Larger shares are drawn by a permutation.
LARGE_SHARE = 0.25


def ring_block(total: int, size: int, generator: torch.Generator) -> Tensor:
    """Consecutive numbers modulo `total`, [size]; each has probability size / total."""
    start = integers(total, (), generator)
    return (start + torch.arange(size, device=generator.device)) % total


def uniform_subset(total: int, size: int, generator: torch.Generator) -> Tensor:
    """Distinct uniform numbers, [size]."""
    if size > LARGE_SHARE * total:
        return permutation(total, generator)[:size]
    found = torch.empty(0, dtype=torch.int64, device=generator.device)
    while len(found) < size:
        more = integers(total, (2 * size,), generator)
        found = torch.cat([found, more]).unique()
    return found[permutation(len(found), generator)[:size]]


def draw_set(total: int, size: int, generator: torch.Generator, *, ring: bool = False) -> Tensor:
    if size == total:
        return torch.arange(total, device=generator.device)
    return (ring_block if ring else uniform_subset)(total, size, generator)


@dataclass(frozen=True)
class KnownValues:
    """Latent moments from all features at p points, with two samples' gradient."""

    head: Head
    mean: Tensor  # minus prior mean, [p]
    root: Tensor  # [p, k]
    left: Tensor  # first sample's features, [p, t]
    right: Tensor  # second sample's, [p, t]


class Sample:
    """Sampled groups, int64 [g]; methods estimate sums over the tail."""

    def __init__(self, model: QuadruplyStochasticGP, groups: Tensor, *, sparse: bool) -> None:
        self.groups = groups
        self.index = model.basis.feature_index(groups)  # rows of the parameters, [t]
        self.weight = model.num_tail_groups / len(groups) if len(groups) else 1.0
        self.rows = model.weights.tail_rows(self.index, sparse=sparse)
        self.precision = model.tail_precision(groups)  # of the prior, [t]

    def mean(self, features: Tensor) -> Tensor:
        """Latent mean [b] from features [b, t]."""
        return self.weight * (features @ self.rows.mean)

    def root(self, features: Tensor) -> Tensor:
        return self.weight * (features @ self.rows.columns)

    def variance(self, features: Tensor) -> Tensor:
        """Variance [b] from the diagonal of C."""
        return self.weight * (features.square() @ (2 * self.rows.log_diagonal).exp())

    def prior_terms(self) -> Tensor:
        """Terms of `twice_divergence` for diagonal S."""
        total = (self.precision * (self.rows.mean.square() + self.rows.columns.square().sum(-1))).sum()
        if self.rows.log_diagonal is not None:
            total = total + (self.precision * (2 * self.rows.log_diagonal).exp() - 2 * self.rows.log_diagonal).sum()
        return self.weight * (total - self.precision.log().sum())


def twice_divergence(model: QuadruplyStochasticGP, first: Sample, second: Sample) -> Tensor:
    """Twice the KL divergence of q(w) from the prior: mu^T S mu + tr(S C C^T) - log|C C^T| - log|S| - m.

    Unbiased; a dense S needs independent samples. Cost O((h + t) k) for diagonal S, else O(t^2).
    """
    weights, k = model.weights, model.weights.num_dense_columns
    total = -2 * weights.head_log_diagonal.sum() - model.basis.num_features
    if weights.shared_diagonal:
        total = total + weights.num_tail * (weights.shared_variance - weights.shared_variance.log())
    if not model.basis.has_diagonal_prior:
        return total + _dense_prior_terms(model, first, second)
    precision = model.head_precision()
    total = total + (precision * (weights.head_mean.square() + weights.dense_head_columns.square().sum(-1))).sum()
    total = total + (precision[k:] * weights.head_variances).sum() - precision.log().sum()
    return total + (first.prior_terms() + second.prior_terms()) / 2


def _dense_prior_terms(model: QuadruplyStochasticGP, first: Sample, second: Sample) -> Tensor:
    """Terms of S, with log|S| if known."""
    weights, basis = model.weights, model.basis
    lead = torch.arange(model.num_leading_groups, device=model.device)
    head = torch.cat([weights.head_mean.unsqueeze(-1), weights.dense_head_columns], dim=-1)
    (rows, left), (columns, right) = (
        (
            torch.cat([lead, sample.groups + model.num_leading_groups]),
            torch.cat([head, sample.weight * sample.rows.joined]),
        )
        for sample in (first, second)
    )
    total = (left * (basis.prior_precision_block(rows, columns) @ right)).sum()
    variances = (2 * first.rows.log_diagonal).exp()
    total = total + first.weight * (first.precision * variances - 2 * first.rows.log_diagonal).sum()
    log_determinant = basis.prior_log_determinant()
    return total if log_determinant is None else total - log_determinant

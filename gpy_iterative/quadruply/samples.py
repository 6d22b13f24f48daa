"""Sampled groups of features: how they are drawn, and sums over all features that they estimate without bias."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.quadruply.feature_weights import WeightRows
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Larger shares are drawn by a permutation of all numbers.
LARGE_SHARE = 0.25


def ring_block(total: int, size: int, generator: torch.Generator) -> Tensor:
    """Consecutive numbers modulo `total` from a uniform start, [size]: each is drawn with probability size / total."""
    start = torch.randint(total, (), generator=generator, device=generator.device)
    return (start + torch.arange(size, device=generator.device)) % total


def uniform_subset(total: int, size: int, generator: torch.Generator) -> Tensor:
    """A uniform draw of distinct numbers below total, [size]; O(size log size) where size is a small share of total."""
    if size > LARGE_SHARE * total:
        return torch.randperm(total, generator=generator, device=generator.device)[:size]
    found = torch.empty(0, dtype=torch.int64, device=generator.device)
    while len(found) < size:
        more = torch.randint(total, (2 * size,), generator=generator, device=generator.device)
        found = torch.cat([found, more]).unique()
    return found[torch.randperm(len(found), generator=generator, device=generator.device)[:size]]


def draw_set(total: int, size: int, generator: torch.Generator, *, ring: bool = False) -> Tensor:
    """A ring block or a uniform subset; all numbers in order where size is total."""
    if size == total:
        return torch.arange(total, device=generator.device)
    return (ring_block if ring else uniform_subset)(total, size, generator)


@dataclass(frozen=True)
class Head:
    """The features that every step evaluates, at b inputs, and what they contribute to the latent moments."""

    features: Tensor  # [b, h]
    mean: Tensor  # [b]
    root: Tensor  # to phi(x) times the dense columns of C, [b, k]
    variance: Tensor  # from the diagonal columns of C, [b]

    @classmethod
    def of(cls, model: QuadruplyStochasticGP, features: Tensor) -> "Head":
        """At the model's current weights."""
        weights = model.weights
        return cls(
            features,
            features @ weights.head_mean,
            features @ weights.dense_head_columns,
            features[:, weights.num_dense_columns :].square() @ weights.head_variances,
        )


@dataclass(frozen=True)
class KnownValues:
    """What all features give at p points, with the gradient of two samples."""

    head: Head
    total: Tensor  # Phi (mu, C_d) over all sampled groups, [p, 1 + k]
    left: Tensor  # features of the first sample, [p, t]
    right: Tensor  # features of the second sample, [p, t]

    @property
    def mean(self) -> Tensor:
        """The latent mean without the mean module's, [p]."""
        return self.head.mean + self.total[:, 0]

    @property
    def root(self) -> Tensor:
        """Phi(x) times the dense columns of C, [p, k]."""
        return self.head.root + self.total[:, 1:]


@dataclass(frozen=True)
class Sample:
    """A set of sampled groups, with its rows of the parameters."""

    groups: Tensor  # [g], int64
    index: Tensor  # rows of their features in the parameters, [t]
    weight: float  # number of all groups over g, the factor of a sum over the sample
    rows: WeightRows
    precision: Tensor  # of their prior, [t]

    @classmethod
    def of(cls, model: QuadruplyStochasticGP, groups: Tensor, *, sparse: bool) -> "Sample":
        """Gathers the rows, whose gradients are sparse on request; cost O(g)."""
        index = model.basis.feature_index(groups)
        weight = model.num_tail_groups / len(groups) if len(groups) else 1.0
        rows = model.weights.tail_rows(index, sparse=sparse)
        return cls(groups, index, weight, rows, model.tail_precision(groups))

    def mean(self, features: Tensor) -> Tensor:
        """Estimate of all groups' part of the latent mean, [b], from the sample's features [b, t]."""
        return self.weight * (features @ self.rows.mean)

    def root(self, features: Tensor) -> Tensor:
        """Estimate of all groups' part of phi(x) times the dense columns of C, [b, k]."""
        return self.weight * (features @ self.rows.columns)

    def variance(self, features: Tensor) -> Tensor:
        """Estimate of the variance from all groups' own diagonal entries of C, [b]."""
        return self.weight * (features.square() @ (2 * self.rows.log_diagonal).exp())

    def prior_terms(self) -> Tensor:
        """Estimate of mu^T S mu + tr(S C C^T) - log|C C^T| - log|S| for a diagonal S, without a shared diagonal of C."""
        total = (self.precision * (self.rows.mean.square() + self.rows.columns.square().sum(-1))).sum()
        if self.rows.log_diagonal is not None:
            total = total + (self.precision * (2 * self.rows.log_diagonal).exp() - 2 * self.rows.log_diagonal).sum()
        return self.weight * (total - self.precision.log().sum())


def twice_divergence(model: QuadruplyStochasticGP, first: Sample, second: Sample) -> Tensor:
    """Twice the KL divergence of q(w) from the prior: mu^T S mu + tr(S C C^T) - log|C C^T| - log|S| - m.

    Unbiased for independent uniform samples (which S = k(Z, Z) needs two of), exact where both have all groups. Cost O(h k)
    for the head, O(t k) for samples with a diagonal S, O(t^2) for another.
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
    """The terms of S, with log|S| where it is known. The head has dense columns only."""
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

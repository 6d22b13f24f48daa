"""Products with features of which only a sample is evaluated: unbiased for every index set drawn uniformly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.quadruply.feature_weights import WeightRows
from gpy_iterative.quadruply.model import QuadruplyStochasticGP


@dataclass(frozen=True)
class Head:
    """The features that are always evaluated, at some rows.

    Attributes:
        features: [b, h].
        mean: their part of the latent mean, [b].
        root: their part of phi(x) times the dense columns of C, [b, k].
        variance: from the columns of C with a diagonal entry alone, [b].
    """

    features: Tensor
    mean: Tensor
    root: Tensor
    variance: Tensor

    @classmethod
    def of(cls, model: QuadruplyStochasticGP, features: Tensor) -> "Head":
        """At the model's current parameters."""
        weights = model.weights
        return cls(
            features,
            features @ weights.head_mean,
            features @ weights.dense_head_columns,
            features[:, weights.num_dense_columns :].square() @ weights.head_variances,
        )


@dataclass(frozen=True)
class Sample:
    """A set of the groups that are sampled, with its rows of the parameters.

    Attributes:
        groups: [g], int64.
        index: their features' rows, [t].
        weight: all groups over g: what a sum over the sample is multiplied by.
        rows: of the parameters.
        precision: of their prior, [t]; None for ones.
    """

    groups: Tensor
    index: Tensor
    weight: float
    rows: WeightRows
    precision: Tensor | None

    @classmethod
    def of(cls, model: QuadruplyStochasticGP, groups: Tensor, *, sparse: bool) -> "Sample":
        """Gathers the rows; cost O(g)."""
        index = model.basis.feature_index(groups)
        weight = model.num_tail_groups / len(groups) if len(groups) else 1.0
        rows = model.weights.tail_rows(index, sparse=sparse)
        return cls(groups, index, weight, rows, model.tail_precision(groups))

    def mean(self, features: Tensor) -> Tensor:
        """Unbiased for the sampled groups' part of the latent mean: [b] for their features [b, t]."""
        return self.weight * (features @ self.rows.mean)

    def root(self, features: Tensor) -> Tensor:
        """Unbiased for their part of phi(x) times the dense columns of C: [b, k]."""
        return self.weight * (features @ self.rows.columns)

    def prior_terms(self) -> Tensor:
        """Unbiased for mu^T S mu + tr(S C C^T) - log|C C^T| - log|S| over the tail with a diagonal S.

        Without what a shared diagonal entry of C contributes.
        """
        precision = torch.ones_like(self.rows.mean) if self.precision is None else self.precision
        total = (precision * (self.rows.mean.square() + self.rows.columns.square().sum(-1))).sum()
        if self.rows.log_diagonal is not None:
            total = total + (precision * (2 * self.rows.log_diagonal).exp() - 2 * self.rows.log_diagonal).sum()
        if self.precision is not None:
            total = total - precision.log().sum()
        return self.weight * total

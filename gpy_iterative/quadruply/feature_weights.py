"""Variational distribution of the weights: q(w) = N(mu, C C^T).

The first k columns of C are dense below the diagonal, the others diagonal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import _VariationalDistribution
from linear_operator.operators import DiagLinearOperator, PsdSumLinearOperator, RootLinearOperator
from torch import Tensor
from torch.nn import Parameter, functional


@dataclass(frozen=True)
class WeightRows:
    """Rows of the tail's parameters."""

    mean: Tensor  # [t]
    columns: Tensor  # of C's dense columns, [t, k]
    log_diagonal: Tensor | None  # of C, [t]; None if shared

    @property
    def joined(self) -> Tensor:
        """Mean and dense columns, [t, 1 + k]."""
        return torch.cat([self.mean.unsqueeze(-1), self.columns], dim=-1)


@dataclass(frozen=True)
class SeenRows:
    """Rows of a backward pass, for `HeadNaturalGradient`."""

    features: Tensor  # of the head, [b, h]
    curvature: Tensor  # minus the bound's second derivative in each latent mean, over n, [b]
    # E_q log p(y | f) after a change [b] of latent means; None for Gaussian noise.
    fit: Callable[[Tensor], Tensor] | None


class FeatureWeights(_VariationalDistribution):
    """Mean and C of all weights.

    `like` gives dtype and device.

    Attributes:
        initialized: data have set the diagonal of C (0 or 1).
        seen: rows whose gradient is in `.grad`; None if no optimiser needs them.
    """

    def __init__(
        self,
        num_head: int,
        num_tail: int,
        num_dense_columns: int,
        *,
        shared_diagonal: bool,
        like: Tensor,
    ) -> None:
        super().__init__(num_head + num_tail)
        zeros = lambda *shape: Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        self.num_head, self.num_tail, self.num_dense_columns = num_head, num_tail, num_dense_columns
        self.seen: list[SeenRows] | None = None
        self.shared_diagonal = shared_diagonal
        self.register_parameter("head_mean", zeros(num_head))
        self.register_parameter("head_columns", zeros(num_head, num_dense_columns))
        self.register_parameter("head_log_diagonal", zeros(num_head))
        self.register_parameter("tail_mean", zeros(num_tail, 1))
        self.register_parameter("tail_columns", zeros(num_tail, num_dense_columns))
        self.register_parameter("tail_log_diagonal", zeros(1 if shared_diagonal and num_tail else num_tail, 1))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8, device=like.device))

    def tail_rows(self, index: Tensor, *, sparse: bool) -> WeightRows:
        """Rows [t]; `sparse` is for their gradients."""
        rows = lambda parameter: functional.embedding(index, parameter, sparse=sparse)
        k = self.num_dense_columns
        columns = rows(self.tail_columns) if k else self.tail_columns.new_zeros(len(index), 0)
        diagonal = None if self.shared_diagonal else rows(self.tail_log_diagonal).squeeze(-1)
        return WeightRows(rows(self.tail_mean).squeeze(-1), columns, diagonal)

    def watch(self, features: Tensor, variance: Tensor, fit: Callable[[Tensor], Tensor] | None = None) -> None:
        """Adds `SeenRows` in the backward pass through the latent variance [b]."""
        if self.seen is None or not variance.requires_grad:
            return
        features = features.detach()
        # Price's theorem: the derivative in the variance is half the second one in the mean.
        note = lambda gradient: self.seen.append(SeenRows(features, 2 * gradient, fit))
        variance.register_hook(note)

    @property
    def dense_head_columns(self) -> Tensor:
        """Lower triangular, [h, k]."""
        diagonal = self.head_log_diagonal[: self.num_dense_columns].exp()
        below = self.head_columns.tril(-1)
        return below + functional.pad(torch.diag(diagonal), (0, 0, 0, self.num_head - self.num_dense_columns))

    @property
    def head_variances(self) -> Tensor:
        """Squared diagonal entries after dense columns, [h - k]."""
        return (2 * self.head_log_diagonal[self.num_dense_columns :]).exp()

    @property
    def shared_variance(self) -> Tensor:
        """Squared diagonal entry of the tail; 1 without tail."""
        return (2 * self.tail_log_diagonal).exp().prod()

    @property
    def mean(self) -> Tensor:
        """Mu [m]."""
        return torch.cat([self.head_mean.detach(), self.tail_mean.detach().squeeze(-1)])

    @property
    def variance(self) -> Tensor:
        """Diagonal of C C^T [m]; O(m k)."""
        return self().lazy_covariance_matrix.diagonal()

    def forward(self) -> MultivariateNormal:
        """Low rank plus diagonal, O(m k)."""
        root = torch.cat([self.dense_head_columns.detach(), self.tail_columns.detach()])
        head = functional.pad(self.head_variances.detach(), (self.num_dense_columns, 0))
        tail = (2 * self.tail_log_diagonal.detach().squeeze(-1)).exp()
        variances = torch.cat([head, tail.expand(self.num_tail) if self.shared_diagonal else tail])
        # Samples are sums of samples.
        return MultivariateNormal(
            self.mean, PsdSumLinearOperator(RootLinearOperator(root), DiagLinearOperator(variances))
        )

    def initialize_variational_distribution(self, prior_dist: MultivariateNormal) -> None:
        """Sets mean and variance [m]; the first step keeps them."""
        columns = self.head_columns.new_zeros(self.num_head + self.num_tail, self.num_dense_columns)
        self.assign(prior_dist.mean, columns, prior_dist.variance.log() / 2)

    @torch.no_grad()
    def assign(self, mean: Tensor, columns: Tensor, log_diagonal: Tensor) -> None:
        """Sets mean [m], columns [m, k] below the diagonal, log diagonal [m]."""
        h = self.num_head
        tail = log_diagonal[h:].unsqueeze(-1)
        self.head_mean.copy_(mean[:h])
        self.tail_mean.copy_(mean[h:].unsqueeze(-1))
        self.head_columns.copy_(columns[:h])
        self.tail_columns.copy_(columns[h:])
        self.head_log_diagonal.copy_(log_diagonal[:h])
        self.tail_log_diagonal.copy_(tail.mean(0, keepdim=True) if self.shared_diagonal and len(tail) else tail)
        self.initialized.fill_(1)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"seen": None if self.seen is None else []}


class Head:
    """Head features [b, h] and their part of the latent moments."""

    def __init__(self, weights: FeatureWeights, features: Tensor) -> None:
        self.features = features
        self.mean = features @ weights.head_mean  # [b]
        self.root = features @ weights.dense_head_columns  # [b, k]
        # From C's diagonal columns, [b].
        self.variance = features[:, weights.num_dense_columns :].square() @ weights.head_variances

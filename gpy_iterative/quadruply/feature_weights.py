"""Variational distribution of the weights: q(w) = N(mu, C C^T) with a chevron C.

The first k columns of C are dense below the diagonal, the others have a diagonal entry only. Every step moves the
parameters of the head, and a few rows of those of the tail, whose gradients are sparse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import _VariationalDistribution
from linear_operator.operators import DiagLinearOperator, RootLinearOperator
from torch import Tensor
from torch.nn import Parameter, functional


@dataclass(frozen=True)
class WeightRows:
    """Rows of the tail's parameters."""

    mean: Tensor  # [t]
    columns: Tensor  # of the dense columns of C, [t, k]
    log_diagonal: Tensor | None  # of C, [t]; None where all share one

    @property
    def joined(self) -> Tensor:
        """Mean and columns, [t, 1 + k]."""
        return torch.cat([self.mean.unsqueeze(-1), self.columns], dim=-1)


@dataclass(frozen=True)
class SeenRows:
    """Rows of an evaluation whose gradient was taken."""

    features: Tensor  # of the head, [b, h]
    curvature: Tensor  # minus the second derivative of the bound in each latent mean, over n, [b]
    # E_q log p(y | f), weighted as in the bound, after a change [b] of the latent means; None for Gaussian noise.
    fit: Callable[[Tensor], Tensor] | None


class FeatureWeights(_VariationalDistribution):
    """Mean and factor C of all weights.

    Args:
        num_head: features of the head.
        num_tail: all others.
        num_dense_columns: k, at most num_head.
        shared_diagonal: one diagonal entry of C for the whole tail.
        like: gives dtype and device.

    Attributes:
        initialized: whether the diagonal of C has been set from data (0 or 1, part of the state_dict).
        seen: rows whose gradient is in `.grad`; None where no optimiser uses them.
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
        # Without a tail its deviation is that of the prior: there is nothing to learn.
        self.register_parameter("tail_log_diagonal", zeros(1 if shared_diagonal and num_tail else num_tail, 1))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8, device=like.device))

    def tail_rows(self, index: Tensor, *, sparse: bool) -> WeightRows:
        """Rows [t] of the tail; cost O(t). Their gradient is sparse on request."""
        rows = lambda parameter: functional.embedding(index, parameter, sparse=sparse)
        k = self.num_dense_columns
        columns = rows(self.tail_columns) if k else self.tail_columns.new_zeros(len(index), 0)
        diagonal = None if self.shared_diagonal else rows(self.tail_log_diagonal).squeeze(-1)
        return WeightRows(rows(self.tail_mean).squeeze(-1), columns, diagonal)

    def watch(self, features: Tensor, variance: Tensor, fit: Callable[[Tensor], Tensor] | None = None) -> None:
        """Adds rows to `seen` in the backward pass: features of the head [b, h], latent variance [b], `SeenRows.fit`."""
        if self.seen is None or not variance.requires_grad:
            return
        features = features.detach()
        # The derivative in the variance is half the second one in the mean, of any density (Price's theorem).
        note = lambda gradient: self.seen.append(SeenRows(features, 2 * gradient, fit))
        variance.register_hook(note)

    @property
    def dense_head_columns(self) -> Tensor:
        """The head's rows of the dense columns of C: [h, k], lower triangular."""
        diagonal = self.head_log_diagonal[: self.num_dense_columns].exp()
        below = self.head_columns.tril(-1)
        return below + functional.pad(torch.diag(diagonal), (0, 0, 0, self.num_head - self.num_dense_columns))

    @property
    def head_variances(self) -> Tensor:
        """Squared diagonal entries of the head's diagonal columns, [h - k]."""
        return (2 * self.head_log_diagonal[self.num_dense_columns :]).exp()

    @property
    def shared_variance(self) -> Tensor:
        """Squared diagonal entry that the tail shares, []; 1 where there is no tail."""
        return (2 * self.tail_log_diagonal).exp().prod()

    @property
    def mean(self) -> Tensor:
        """Mu [m], detached; O(m)."""
        return torch.cat([self.head_mean.detach(), self.tail_mean.detach().squeeze(-1)])

    @property
    def variance(self) -> Tensor:
        """The diagonal of C C^T [m], detached; O(m k)."""
        return self().lazy_covariance_matrix.diagonal()

    def forward(self) -> MultivariateNormal:
        """q(w) as low rank plus diagonal, O(m k)."""
        root = torch.cat([self.dense_head_columns.detach(), self.tail_columns.detach()])
        head = functional.pad(self.head_variances.detach(), (self.num_dense_columns, 0))
        tail = (2 * self.tail_log_diagonal.detach().squeeze(-1)).exp()
        variances = torch.cat([head, tail.expand(self.num_tail) if self.shared_diagonal else tail])
        return MultivariateNormal(self.mean, RootLinearOperator(root) + DiagLinearOperator(variances))

    def initialize_variational_distribution(self, prior_dist: MultivariateNormal) -> None:
        """Takes mean and variance of a distribution [m], which the first step keeps; dense columns become diagonal."""
        columns = self.head_columns.new_zeros(self.num_head + self.num_tail, self.num_dense_columns)
        self.assign(prior_dist.mean, columns, prior_dist.variance.log() / 2)

    @torch.no_grad()
    def assign(self, mean: Tensor, columns: Tensor, log_diagonal: Tensor) -> None:
        """Sets mean [m], dense columns [m, k] below the diagonal, and log diagonal of C [m]."""
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

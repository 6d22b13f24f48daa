"""Kernels that are inner products of finitely many features."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from gpytorch.kernels import Kernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy, LinearPredictionStrategy
from linear_operator import LinearOperator
from linear_operator.operators import LowRankRootLinearOperator, MatmulLinearOperator, RootLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.from_gpytorch import are_same_inputs


@dataclass(frozen=True)
class WeightSpaceFeatures:
    """k(x, x') = sum_j variances_j basis_j(x) basis_j(x'): a linear model whose weights are N(0, variances) a priori.

    Attributes:
        basis: [*b, n, m].
        variances: of the weights, [*b, m], positive. Outputscales go here and not into the basis, so that a distribution
            of the weights does not have to follow them.
    """

    basis: Tensor
    variances: Tensor

    @classmethod
    def standard(cls, basis: Tensor) -> "WeightSpaceFeatures":
        """Weights of variance 1."""
        return cls(basis, basis.new_ones(*basis.shape[:-2], basis.shape[-1]))

    def scaled(self) -> Tensor:
        """phi(x) [*b, n, m] with k(x, x') = phi(x)^T phi(x')."""
        return self.basis * self.variances.sqrt().unsqueeze(-2)


class FiniteFeatureKernel(Kernel):
    """Base of kernels k(x, x') = features(x)^T features(x') with m features.

    A subclass gives `features`. Everything else follows: covariances under GPyTorch's own ExactGP and its marginal log
    likelihood (through m x m matrices where m < n), and mini-batch training by `VariationalFeatureMarginalLogLikelihood`.
    Where a scale can be pulled out of the features, `weight_space_features` says so.
    """

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """phi(x) [*b, n, m] at inputs [*b, n, d] that are already reduced to the active dims.

        A row depends on the row of the inputs alone: batches of rows must have the features of these rows.
        """
        raise NotImplementedError(f"{type(self).__name__} must define features(x).")

    def weight_space_features(self, x: Tensor) -> WeightSpaceFeatures:
        """The features, with the scales of their weights apart where there are any.

        Raises ValueError where `features` gives other rows than the input has.
        """
        features = self.features(x)
        if features.shape[-2:-1] != x.shape[-2:-1]:
            raise ValueError(
                f"{type(self).__name__}.features must map [*b, n, d] to [*b, n, m]; it mapped {tuple(x.shape)} to "
                f"{tuple(features.shape)}."
            )
        return WeightSpaceFeatures.standard(features)

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> LinearOperator | Tensor:
        """The operator k(x1, x2), or its diagonal; a root of m columns where x1 is x2."""
        if last_dim_is_batch or params:
            raise ValueError(
                f"{type(self).__name__} takes no further arguments, got {', '.join(params) or 'last_dim_is_batch'}."
            )
        left = self.features(x1)
        if are_same_inputs(x1, x2):
            if diag:
                return left.square().sum(-1)
            low_rank = left.shape[-1] < left.shape[-2]
            return LowRankRootLinearOperator(left) if low_rank else RootLinearOperator(left)
        right = self.features(x2)
        return (left * right).sum(-1) if diag else MatmulLinearOperator(left, right.mT)

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: Any, train_labels: Any, likelihood: Any
    ) -> DefaultPredictionStrategy:
        """GPyTorch's own for kernels with features."""
        return LinearPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood)

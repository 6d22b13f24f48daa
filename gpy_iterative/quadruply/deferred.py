"""Latent distributions that are computed when read."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator
from torch import Tensor
from torch.distributions import Distribution

from gpy_iterative.exact.prediction.covariance import DenseOnRequestLinearOperator

if TYPE_CHECKING:
    from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Relative change of variances that shows changed weights.
MOVED = 1e-3
#: Rounding error of k(x, x) - |phi(x)|^2 over eps |phi(x)|^2.
ROUNDING = 100


class DeferredPrediction(MultivariateNormal):
    """`model.posterior(x)`, computed when mean or covariance is read."""

    def __new__(cls, *args: Any, **kwargs: Any) -> MultivariateNormal:
        # GPyTorch calls `self.__class__(mean, covariance)`.
        if kwargs or (args and isinstance(args[0], Tensor)):
            return MultivariateNormal(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, model: "QuadruplyStochasticGP", x: Tensor) -> None:
        Distribution.__init__(self, torch.Size(), x.shape[:1], validate_args=False)
        self.model, self.x = model, x
        self._islazy = True
        self._MultivariateNormal__unbroadcasted_scale_tril = None  # GPyTorch's cache

    @cached_property
    def _prediction(self) -> MultivariateNormal:
        return self.model.posterior(self.x)

    @property
    def loc(self) -> Tensor:
        """The mean, [n]."""
        return self._prediction.loc

    @property
    def _covar(self) -> LinearOperator:
        return self._prediction.lazy_covariance_matrix


class WeightSpaceCovarianceLinearOperator(DenseOnRequestLinearOperator):
    """phi(x) C C^T phi(x)^T [t, t]; `root` [t, k] comes from dense columns of C, `diagonal` [t] from others."""

    def __init__(self, x: Tensor, root: Tensor, diagonal: Tensor, *, model: "QuadruplyStochasticGP") -> None:
        super().__init__(x, root, diagonal, model=model)
        self.x, self.root, self.diagonal_part, self.model = x, root, diagonal, model

    def _size(self) -> torch.Size:
        return torch.Size((self.x.shape[0], self.x.shape[0]))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _diagonal(self) -> Tensor:
        return self.root.square().sum(-1) + self.diagonal_part

    def _evaluated(self) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.x.requires_grad):
            others = self.model.diagonal_part(self.x)
            if not torch.allclose(others.diagonal(), self.diagonal_part, rtol=MOVED, atol=self._tolerance()):
                raise RuntimeError(
                    "The model's weights or hyperparameters have changed since this prediction: predict again, or read the "
                    "covariance before the next step."
                )
            return self.root @ self.root.mT + others

    @torch.no_grad()
    def _tolerance(self) -> float:
        if not len(self.x):
            return 0.0
        # A posterior variance may be as small as this rounding error.
        head = self.model.head_features(self.x).square().sum(-1).amax()
        return float(MOVED * self.diagonal_part.abs().amax() + ROUNDING * torch.finfo(head.dtype).eps * head)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if isinstance(row_index, slice) and row_index == col_index and not batch_indices:
            parts = (self.x, self.root, self.diagonal_part)
            return type(self)(*(part[row_index] for part in parts), model=self.model)
        return super()._getitem(row_index, col_index, *batch_indices)

"""Gaussian process in weight space, f(x) = mean(x) + phi(x) w."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator
from torch import Tensor
from torch.distributions import Distribution

from gpy_iterative.checks import check_autocast, check_count, check_finite, check_same_kind
from gpy_iterative.linear_operators.predicted import DenseOnRequestLinearOperator
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.quadruply.bases.feature_basis import FeatureBasis
from gpy_iterative.quadruply.feature_weights import FeatureWeights, Head, WeightRows

#: Features evaluated at a time.
BLOCK = 8192
#: Relative change of variances that shows changed weights.
MOVED = 1e-3
#: Rounding error of k(x, x) - |phi(x)|^2 over eps |phi(x)|^2.
ROUNDING = 100


class QuadruplyStochasticGP(gpytorch.models.GP):
    """The model of `mlls.QuadruplyStochasticELBO` (Evans and Nair 2018, "Quadruply stochastic Gaussian processes").

    Args:
        basis: phi; begin with `NystromBasis`.
        mean_module: prior mean; None is zero.
        num_dense_columns: k. The covariance of w is C C^T; C has k dense columns, then diagonal ones. Sampled features of
            a basis with a `group_prior_variance` share one diagonal entry; their variance is then exact.

    Train with `QuadruplyStochasticOptimizer`. Memory: m (1 + k) numbers; the optimiser takes as many.

    Raises:
        ValueError: num_dense_columns exceeds the features or splits a group.

    Examples:
        >>> kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).requires_grad_(False)
        >>> model = gpi.models.QuadruplyStochasticGP(gpi.models.NystromBasis(kernel, train_x[:10]))
        >>> mll = gpi.mlls.QuadruplyStochasticELBO(likelihood, model, generator=0)
        >>> (-mll(model(train_x), train_y)).backward()
        >>> model.eval()(test_x).mean.shape
        torch.Size([20])
    """

    def __init__(
        self,
        basis: FeatureBasis,
        mean_module: gpytorch.means.Mean | None = None,
        *,
        num_dense_columns: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(basis, FeatureBasis):
            raise TypeError(f"basis must be a FeatureBasis such as RandomFourierBasis, got {type(basis).__name__}.")
        beyond = _dense_columns_beyond_head(basis, num_dense_columns)
        self.basis = basis
        self.mean_module = gpytorch.means.ZeroMean() if mean_module is None else mean_module
        self.num_leading_groups = beyond // basis.group_size
        head = basis.num_head_features + beyond
        self.weights = FeatureWeights(
            head,
            basis.num_features - head,
            num_dense_columns,
            shared_diagonal=type(basis).group_prior_variance is not FeatureBasis.group_prior_variance,
            like=basis.like,
        )

    @property
    def num_tail_groups(self) -> int:
        """Number of sampled groups."""
        return self.basis.num_groups - self.num_leading_groups

    @property
    def device(self) -> torch.device:
        """Of basis and parameters."""
        return self.basis.like.device

    def forward(self, x: Tensor) -> MultivariateNormal:
        """`posterior(x)`; in train mode computed when it is read."""
        return DeferredPrediction(self, self.check_inputs(x)) if self.training else self.posterior(x)

    def posterior(self, x: Tensor) -> MultivariateNormal:
        """Latent distribution at x [t, d] from all features; its covariance is computed when it is read.

        Only x receives gradients. Cost: t m (d + k); memory t (k + 8,192). Raises ValueError for unfit or non-finite x.
        """
        x = self.check_inputs(x)
        check_finite("x", x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            mean, root, diagonal = self._moments(x)
            covariance = WeightSpaceCovarianceLinearOperator(x, root, diagonal, model=self)
            return MultivariateNormal(self.prior_mean(x) + mean, covariance)

    def prior_mean(self, x: Tensor) -> Tensor:
        """Prior mean [n]."""
        mean = self.mean_module(x)
        if mean.shape != x.shape[:1]:
            raise ValueError(
                f"The mean module must return a mean of shape ({len(x)},), got {tuple(mean.shape)}: a batch of models or "
                "several outputs are not supported."
            )
        return mean

    def head_features(self, x: Tensor) -> Tensor:
        """[n, h]: the basis' head, or groups with dense columns."""
        head = self.basis.head_features(x)
        if not self.num_leading_groups:
            return head
        return self.basis.group_features(x, head, torch.arange(self.num_leading_groups, device=self.device))

    def tail_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        """Features [n, g * group_size]."""
        if not len(groups):
            return x.new_empty(x.shape[0], 0)
        own = head[:, : self.basis.num_head_features]
        return self.basis.group_features(x, own, groups + self.num_leading_groups)

    def tail_prior_variance(self, x: Tensor, head: Tensor) -> Tensor:
        """Prior variance [n]."""
        own = head[:, : self.basis.num_head_features]
        variance = self.basis.group_prior_variance(x, own)
        return variance * (self.num_tail_groups / self.basis.num_groups) if self.basis.num_groups else variance

    def head_precision(self) -> Tensor:
        """Prior precision [h]."""
        if not self.num_leading_groups:
            return torch.ones_like(self.weights.head_mean)
        return self.basis.prior_precision(torch.arange(self.num_leading_groups, device=self.device))

    def tail_precision(self, groups: Tensor) -> Tensor:
        """Prior precision [g * group_size]."""
        return self.basis.prior_precision(groups + self.num_leading_groups)

    def tail_blocks(self, used: Tensor | None = None) -> Iterator[Tensor]:
        """Sampled groups [g] of about `BLOCK` features; `used` is a mask."""
        groups = torch.arange(self.num_tail_groups, device=self.device)
        groups = groups if used is None else groups[used]
        return iter(groups.split(max(1, BLOCK // self.basis.group_size)) if len(groups) else ())

    def diagonal_part(self, x: Tensor) -> Tensor:
        """Covariance [t, t] from C's diagonal columns; cost t^2 m."""
        weights, head = self.weights, self.head_features(x)
        own = head[:, weights.num_dense_columns :]
        result = (own * weights.head_variances) @ own.mT
        if weights.shared_diagonal:
            prior = self.basis.group_prior_covariance(x, head[:, : self.basis.num_head_features])
            if prior is not None:
                return result + weights.shared_variance * prior
        for features, rows in self._tail(x, head):
            variances = weights.shared_variance if rows.log_diagonal is None else (2 * rows.log_diagonal).exp()
            result = result + (features * variances) @ features.mT
        return result

    def check_inputs(self, x: Tensor) -> Tensor:
        """Inputs as [n, d]."""
        check_autocast()
        if not isinstance(x, Tensor):
            raise ValueError(
                f"The inputs must be a tensor, got {type(x).__name__}: convert them with torch.as_tensor(...)."
            )
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        if x.dim() != 2:
            raise ValueError(f"The inputs must be [n, d], got {tuple(x.shape)}: a batch of models is not supported.")
        check_same_kind("The model", self.basis.like, "the inputs", x)
        KernelProducts().check(x.dtype)
        return x

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean [t] without prior mean, `root` and `diagonal` of the covariance."""
        head = Head(self.weights, self.head_features(x))
        mean, root, diagonal = head.mean, head.root, head.variance
        if self.weights.shared_diagonal:
            diagonal = diagonal + self.weights.shared_variance * self.tail_prior_variance(x, head.features)
        for features, rows in self._tail(x, head.features):
            mean, root = mean + features @ rows.mean, root + features @ rows.columns
            if rows.log_diagonal is not None:
                diagonal = diagonal + features.square() @ (2 * rows.log_diagonal).exp()
        return mean, root, diagonal

    def _tail(self, x: Tensor, head: Tensor) -> Iterator[tuple[Tensor, WeightRows]]:
        for groups in self.tail_blocks():
            rows = self.weights.tail_rows(self.basis.feature_index(groups), sparse=False)
            yield self.tail_features(x, head, groups), rows


def _dense_columns_beyond_head(basis: FeatureBasis, num_dense_columns: int) -> int:
    check_count("num_dense_columns", num_dense_columns, least=0)
    most = basis.num_head_features or basis.num_features
    if num_dense_columns > most:
        part = "head" if basis.num_head_features else "features"
        raise ValueError(
            f"num_dense_columns must be at most {most}, the {part} of the {type(basis).__name__}; got {num_dense_columns}."
        )
    beyond = 0 if basis.num_head_features else num_dense_columns
    if beyond % basis.group_size:
        raise ValueError(
            f"num_dense_columns must be a multiple of {basis.group_size}, the features of a group; got {num_dense_columns}."
        )
    return beyond


class DeferredPrediction(MultivariateNormal):
    """`model.posterior(x)`, computed when mean or covariance is read."""

    def __new__(cls, *args: Any, **kwargs: Any) -> MultivariateNormal:
        # GPyTorch calls `self.__class__(mean, covariance)`.
        if kwargs or (args and isinstance(args[0], Tensor)):
            return MultivariateNormal(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, model: QuadruplyStochasticGP, x: Tensor) -> None:
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

    def __init__(self, x: Tensor, root: Tensor, diagonal: Tensor, *, model: QuadruplyStochasticGP) -> None:
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
        if isinstance(row_index, slice) and row_index == col_index:
            parts = (self.x, self.root, self.diagonal_part)
            return type(self)(*(part[row_index] for part in parts), model=self.model)
        return super()._getitem(row_index, col_index, *batch_indices)

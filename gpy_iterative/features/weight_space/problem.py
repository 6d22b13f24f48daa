"""GPyTorch's prior, likelihood and targets as a linear model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from linear_operator import LinearOperator
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_finite
from gpy_iterative.errors import NonFiniteError, UnsupportedLikelihoodError
from gpy_iterative.linear_operators.from_gpytorch import (
    check_kernel_dtype,
    check_noise,
    noise_operator,
    operator_of_kernel,
)
from gpy_iterative.linear_operators.prior_parts import KernelTerm, prior_parts
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial_inputs import value_dtype
from gpy_iterative.spectral.finite import WeightSpaceFeatures, concatenated, feature_map, has_feature_map
from gpy_iterative.training.progress import Progress, reporting

CHUNK_SIZE = 4096


@dataclass(frozen=True)
class FeatureBatch:
    """Rows of a linear model in float64."""

    basis: Tensor  # u_i, [b, m]
    variances: Tensor  # c, [m]
    residual: Tensor  # y_i - mean_i, [b]
    noise: Tensor  # s_i, [b]
    weight: float  # n / b

    def uncentred(self) -> "FeatureBatch":
        """Scaled features, weights of variance 1."""
        features = WeightSpaceFeatures(self.basis, self.variances).scaled()
        return replace(self, basis=features, variances=torch.ones_like(self.variances))

    def gram(self) -> Tensor:
        """Weighted sum of P, [m, m]."""
        return self.weight * (self.basis.mT @ (self.basis / self.noise.unsqueeze(-1)))

    def moment(self) -> Tensor:
        """Weighted h, [m]."""
        return self.weight * (self.basis.mT @ (self.residual / self.noise))

    def precision(self) -> Tensor:
        """Unbiased estimate of P, [m, m]."""
        return torch.diag(1 / self.variances) + self.gram()


def check_one_output(function_dist: MultivariateNormal) -> None:
    if isinstance(function_dist, MultitaskMultivariateNormal) or function_dist.batch_shape:
        raise ValueError(
            f"One output and one model are supported, not a {type(function_dist).__name__} of batch shape "
            f"{tuple(function_dist.batch_shape)}. Independent outputs: one model each, with SumMarginalLogLikelihood."
        )


class WeightSpacePrior:
    def __init__(self, function_dist: MultivariateNormal) -> None:
        parts = prior_parts(function_dist.lazy_covariance_matrix)
        if parts.others:
            raise ValueError(
                f"The prior covariance contains a {parts.name_of_other()}, which cannot be evaluated for a batch "
                "of rows: return MultivariateNormal(mean, kernel(x)) from forward, with sums and products inside it. "
                "In evaluation mode call model.train() first."
            )
        self.terms, self.jitter = parts.terms, parts.diagonal
        for term in self.terms:
            check_kernel_dtype(term.kernel, term.inputs)
            KernelProducts().check(value_dtype(term.kernel, term.inputs))

    def features(self, rows: Tensor | None = None) -> WeightSpaceFeatures:
        """Basis [*b, n, m] and variances [m] at all or some rows."""
        return concatenated([_term_features(term, rows) for term in self.terms])

    def covariance(self, rows: Tensor) -> Tensor:
        """K [b, b] of some rows, float64."""
        return torch.stack([_term_covariance(term, rows).double() for term in self.terms]).sum(0)


class WeightSpaceProblem:
    """A prior at all training inputs [n], independent noise and targets [n]."""

    def __init__(
        self,
        likelihood: Likelihood,
        function_dist: MultivariateNormal,
        target: Tensor,
        params: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        progress: Progress = False,
    ) -> None:
        check_one_output(function_dist)
        if target.shape != function_dist.loc.shape:
            raise ValueError(
                f"The target's shape {tuple(target.shape)} is not the prior's, {tuple(function_dist.loc.shape)}: use one "
                "model for each set of targets."
            )
        self.prior = WeightSpacePrior(function_dist)
        self._progress = progress
        self._distribution, self._target = function_dist, target
        self._likelihood, self._params, self._kwargs = likelihood, params, kwargs or {}

    @property
    def num_data(self) -> int:
        return self._distribution.loc.shape[-1]

    def batch(self, rows: Tensor, noise: LinearOperator | None = None) -> FeatureBatch:
        """Rows [b]; `noise` is the covariance at all data, if known."""
        features = self.prior.features(rows)
        residual, variances = self.residual_and_noise(rows, noise)
        self._check_finite("kernel's features are", features.basis, features.variances)
        weight = self.num_data / max(len(rows), 1)
        return FeatureBatch(features.basis.double(), features.variances.double(), residual, variances, weight)

    def batches(self) -> Iterator[FeatureBatch]:
        """All rows in chunks, with weight 1."""
        noise = self._noise_covariance()  # once: it may be costly
        with reporting(self._progress, "pass", "rows", self.num_data) as tell:
            done = 0
            for rows in torch.arange(self.num_data, device=self._distribution.loc.device).split(CHUNK_SIZE):
                yield replace(self.batch(rows, noise), weight=1.0)
                done += len(rows)
                tell(done, {})

    def residual_and_noise(self, rows: Tensor, noise: LinearOperator | None = None) -> tuple[Tensor, Tensor]:
        """Targets minus mean [b] and noise variances [b], float64."""
        target, mean = self._target[rows], self._distribution.loc[rows]
        if not torch.isfinite(target).all():
            check_finite("target", self._target)
        self._check_finite("mean function's values are", mean)
        covariance = self._noise_covariance() if noise is None else noise
        return (target - mean).double(), self._noise(rows, covariance).double()

    def _check_finite(self, what: str, *tensors: Tensor) -> None:
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            for term in self.prior.terms:
                check_finite("inputs", term.inputs)
            raise NonFiniteError(
                f"The {what} not finite. Use a smaller learning rate, or constraints on the hyperparameters."
            )

    def _noise_covariance(self) -> LinearOperator:
        return noise_operator(self._likelihood, self._distribution, *self._params, **self._kwargs)

    def _noise(self, rows: Tensor, covariance: LinearOperator) -> Tensor:
        if isinstance(covariance, ConstantDiagLinearOperator):
            noise = covariance.diag_values.expand(len(rows))  # no vector of all data in the graph
        elif isinstance(covariance, DiagLinearOperator):
            noise = covariance.diagonal(dim1=-1, dim2=-2)[rows]
        else:
            raise UnsupportedLikelihoodError(
                f"Mini-batches need independent noise; the noise covariance of {type(self._likelihood).__name__} is not "
                "diagonal. HutchinsonMarginalLogLikelihood takes any."
            )
        if not (torch.isfinite(noise) & (noise > 0)).all():
            check_noise(covariance.diagonal(dim1=-1, dim2=-2))  # its message names an index
        return noise if self.prior.jitter is None else noise + self.prior.jitter[rows]


def _term_features(term: KernelTerm, rows: Tensor | None) -> WeightSpaceFeatures:
    features = feature_map(term.kernel)(term.inputs if rows is None else term.inputs[rows])
    return features if term.scale is None else replace(features, variances=features.variances * term.scale)


def _term_covariance(term: KernelTerm, rows: Tensor) -> Tensor:
    if has_feature_map(term.kernel):
        features = _term_features(term, rows).scaled()
        return features @ features.mT
    dense = operator_of_kernel(term.kernel, term.inputs[rows], None, KernelProducts()).to_dense()
    return dense if term.scale is None else dense * term.scale

"""Prior covariances as sums of kernels."""

from dataclasses import dataclass
from functools import reduce

import torch
from gpytorch import kernels
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.extensions import sum_terms
from gpy_iterative.linear_operators.from_gpytorch import masked_covariance
from gpy_iterative.linear_operators.masked import ObservedLinearOperator


@dataclass(frozen=True)
class KernelTerm:
    """One kernel of a prior covariance.

    Attributes:
        inputs: [*b, n, d], reduced to the kernel's active dims.
        scale: None for 1.
    """

    kernel: kernels.Kernel
    inputs: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class PriorParts:
    """The terms of a prior covariance.

    Attributes:
        terms: unevaluated kernels.
        diagonal: [*b, n] or [n], jitter from the model's `forward`, or None.
        others: the model's own matrices, without factors.
    """

    terms: list[KernelTerm]
    diagonal: Tensor | None
    others: list[LinearOperator | Tensor]

    def name_of_other(self) -> str:
        """Of the first one, for messages."""
        name = type(self.others[0]).__name__
        if isinstance(self.others[0], ObservedLinearOperator):
            return f"{name} (missing targets of several outputs make one)"
        if not isinstance(self.others[0], DenseLinearOperator):
            return name
        return f"{name} (ProductStructureKernel makes one unless it is inside a ScaleKernel)"


def prior_parts(covariance: LinearOperator | Tensor) -> PriorParts:
    terms, diagonals, others = [], [], []
    for part, factor in sum_terms(covariance):
        scale = factor.squeeze(-1).squeeze(-1) if isinstance(factor, Tensor) else None
        if isinstance(part, LazyEvaluatedKernelTensor):
            terms.append(KernelTerm(part.kernel, part.x1, scale))
        elif isinstance(part, DiagLinearOperator):
            jitter = part.diagonal(dim1=-2, dim2=-1)
            diagonals.append(jitter if scale is None else jitter * scale.unsqueeze(-1))
        else:
            others.append(part)
    return PriorParts(terms, reduce(torch.add, diagonals) if diagonals else None, others)


def kernel_terms(covariance: LinearOperator | Tensor, observed: Tensor | None = None) -> list[KernelTerm]:
    """The kernels of a prior covariance at the observed inputs; SpectralDensityMissingError for other parts."""
    parts = prior_parts(covariance if observed is None else masked_covariance(covariance, observed))
    if parts.others:
        raise SpectralDensityMissingError(
            f"The prior covariance contains a {parts.name_of_other()}, which is no kernel and has no random "
            "features. HutchinsonMarginalLogLikelihood needs none; PathwiseMarginalLogLikelihood(prior='exact') serves "
            "small data; posterior(x).rsample() draws from a posterior without them."
        )
    return parts.terms

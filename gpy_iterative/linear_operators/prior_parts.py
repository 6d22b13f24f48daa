"""The sum of kernels that a prior covariance is, for those who need them one by one: random features, feature maps."""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from gpytorch import kernels
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import AddedDiagLinearOperator, ConstantMulLinearOperator, SumLinearOperator
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.from_gpytorch import added_diagonal, masked_covariance


@dataclass(frozen=True)
class KernelTerm:
    """One kernel of the sum that a prior covariance is.

    Attributes:
        kernel: the kernel.
        inputs: [*b, n, d], already reduced to the kernel's active dims.
        scale: multiplies the kernel; None for 1.
    """

    kernel: kernels.Kernel
    inputs: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True)
class PriorParts:
    """What a prior covariance is the sum of.

    Attributes:
        terms: kernels that nobody has evaluated yet.
        diagonal: [*b, n], jitter that the model's `forward` added; None for none.
        others: matrices that the model built.
    """

    terms: list[KernelTerm]
    diagonal: Tensor | None
    others: list[LinearOperator]


def prior_parts(covariance: LinearOperator | Tensor) -> PriorParts:
    """Takes sums, constants and added diagonals apart; evaluates nothing."""
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        return PriorParts([KernelTerm(covariance.kernel, covariance.x1)], None, [])
    if isinstance(covariance, AddedDiagLinearOperator):
        inner = prior_parts(covariance._linear_op)
        jitter = added_diagonal(covariance)
        return replace(inner, diagonal=jitter if inner.diagonal is None else inner.diagonal + jitter)
    if isinstance(covariance, SumLinearOperator):
        parts = [prior_parts(part) for part in covariance.linear_ops]
        diagonals = [part.diagonal for part in parts if part.diagonal is not None]
        return PriorParts(
            [term for part in parts for term in part.terms],
            reduce(torch.add, diagonals) if diagonals else None,
            [other for part in parts for other in part.others],
        )
    if isinstance(covariance, ConstantMulLinearOperator):
        constant, inner = covariance._constant, prior_parts(covariance.base_linear_op)
        return PriorParts(
            [
                KernelTerm(term.kernel, term.inputs, constant if term.scale is None else constant * term.scale)
                for term in inner.terms
            ],
            None if inner.diagonal is None else inner.diagonal * constant.unsqueeze(-1),
            [other * constant for other in inner.others],
        )
    return PriorParts([], None, [to_linear_operator(covariance)])


def kernel_terms(covariance: LinearOperator | Tensor, observed: Tensor | None = None) -> list[KernelTerm]:
    """The sum of kernels that a prior covariance is, at the observed inputs.

    Raises:
        SpectralDensityMissingError: a part of the covariance is no kernel but a matrix that the model built.
    """
    parts = prior_parts(covariance if observed is None else masked_covariance(covariance, observed))
    if parts.others:
        raise SpectralDensityMissingError(
            f"The prior covariance contains a {type(parts.others[0]).__name__}, which is no kernel and has no random "
            "features. HutchinsonMarginalLogLikelihood needs none; PathwiseMarginalLogLikelihood(prior='exact') serves "
            "small data; posterior(x).rsample() draws from a posterior without them."
        )
    return parts.terms

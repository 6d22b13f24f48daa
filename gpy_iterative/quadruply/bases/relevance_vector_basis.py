"""Relevance vectors: kernel functions with a learned prior precision each, and the removal of irrelevant ones."""

import copy
import math

import torch
from gpytorch import kernels
from torch import Tensor
from torch.nn import functional

from gpy_iterative.checks import check_positive
from gpy_iterative.quadruply.bases.inducing_point_basis import KernelFunctionBasis
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Precisions stay between these.
MIN_PRECISION, LARGEST_PRECISION = 1e-10, 1e12


class RelevanceVectorBasis(KernelFunctionBasis):
    """phi(x) = k(x, Z) with S = diag(s), learned by empirical Bayes (Tipping 2001; Evans and Nair 2018, appendix I.3).

    Args:
        kernel: any, without a batch shape.
        centers: Z [m, d], usually the training inputs.
        max_precision: functions of this precision or more are irrelevant. It depends on the scales of the targets
            (standardise them) and of phi^T phi / noise.
        sparse_gradients: whether the precisions' gradients hold sampled rows only; False for optimisers that refuse those.

    Raises:
        ValueError: as `KernelFunctionBasis`; a max_precision that is not positive and finite.
    """

    def __init__(
        self, kernel: kernels.Kernel, centers: Tensor, *, max_precision: float = 1e4, sparse_gradients: bool = True
    ) -> None:
        super().__init__(kernel, centers)
        check_positive("max_precision", max_precision)
        self.max_precision, self.sparse_gradients = max_precision, sparse_gradients
        self.register_parameter("log_precision", torch.nn.Parameter(centers.new_zeros(self.num_groups, 1)))

    def sampled_parameters(self) -> list[torch.nn.Parameter]:
        return [self.log_precision]

    def prior_precision(self, groups: Tensor) -> Tensor:
        rows = functional.embedding(groups, self.log_precision, sparse=self.sparse_gradients).squeeze(-1)
        return rows.clamp(math.log(MIN_PRECISION), math.log(LARGEST_PRECISION)).exp()

    @property
    def precision(self) -> Tensor:
        """All of s, [m], detached."""
        return self.prior_precision(torch.arange(self.num_groups, device=self.points.device)).detach()

    def relevant(self) -> Tensor:
        """Functions whose precision is below `max_precision`, int64 [*]."""
        return (self.precision < self.max_precision).nonzero().squeeze(-1)

    @torch.no_grad()
    def update_precision(self, mean: Tensor, variance: Tensor) -> None:
        """One fixed-point update of all precisions by MacKay's rule, (1 - s variance) / mean^2; cost O(m).

        Args:
            mean: of the weights, [m] (`model.weights.mean`).
            variance: the diagonal of their covariance, [m] (`model.weights.variance`).

        Raises ValueError for shapes that do not fit. A precision stays where the data do not determine the weight, so that
        s variance = 1 to rounding.
        """
        shape = (self.num_groups,)
        if mean.shape != shape or variance.shape != shape:
            raise ValueError(f"mean and variance must be {shape}, got {tuple(mean.shape)} and {tuple(variance.shape)}.")
        square, limits = mean.square(), torch.finfo(mean.dtype)
        determined = (1 - self.precision * variance).clamp_min(0)
        moved = determined / square.clamp_min(limits.tiny)
        precision = torch.where(determined > limits.eps, moved, self.precision)
        self.log_precision.copy_(precision.clamp(MIN_PRECISION, LARGEST_PRECISION).log().unsqueeze(-1))


@torch.no_grad()
def prune_relevance_vectors(model: QuadruplyStochasticGP) -> QuadruplyStochasticGP:
    """A new model with the relevant functions only, and their weights; the given model stays as it is.

    Dense columns of irrelevant functions are dropped. Make new optimisers for the new parameters.

    Args:
        model: with a RelevanceVectorBasis.

    Raises:
        ValueError: another basis, or one without a relevant function.
    """
    basis = model.basis
    if not isinstance(basis, RelevanceVectorBasis):
        raise ValueError(
            f"prune_relevance_vectors needs a model with a RelevanceVectorBasis, got {type(basis).__name__}."
        )
    kept = basis.relevant()
    if not len(kept):
        raise ValueError(
            f"No function has a precision below max_precision = {basis.max_precision:g}. Raise it, or standardise the "
            "targets."
        )
    old, k = model.weights, model.weights.num_dense_columns
    columns = kept[kept < k]
    smaller = RelevanceVectorBasis(copy.deepcopy(basis.kernel), basis.points[kept], max_precision=basis.max_precision)
    smaller.log_precision.copy_(basis.log_precision[kept])
    result = QuadruplyStochasticGP(smaller, copy.deepcopy(model.mean_module), num_dense_columns=len(columns))
    root = torch.cat([old.dense_head_columns, old.tail_columns])[kept][:, columns]
    log_diagonal = torch.cat([old.head_log_diagonal, old.tail_log_diagonal.squeeze(-1)])[kept]
    result.weights.assign(old.mean[kept], root, log_diagonal)
    return result.train(model.training)

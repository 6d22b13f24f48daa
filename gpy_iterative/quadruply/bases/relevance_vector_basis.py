"""Relevance vectors and their pruning."""

import copy
import math

import torch
from gpytorch import kernels
from torch import Tensor
from torch.nn import functional

from gpy_iterative.checks import check_flag, check_positive
from gpy_iterative.quadruply.bases.inducing_point_basis import KernelFunctionBasis
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Precisions stay between these.
MIN_PRECISION, LARGEST_PRECISION = 1e-10, 1e12


class RelevanceVectorBasis(KernelFunctionBasis):
    """phi(x) = k(x, Z) with S = diag(s), learned by empirical Bayes (Tipping 2001; Evans and Nair 2018, appendix I.3).

    Args:
        kernel: any without batch shape.
        centers: Z [m, d], usually the training inputs.
        max_precision: functions of at least this precision are irrelevant; for standardised targets.
        sparse_gradients: as in `QuadruplyStochasticELBO`.

    Raises:
        ValueError: unfit or non-finite centers, an invalid option.
    """

    def __init__(
        self, kernel: kernels.Kernel, centers: Tensor, *, max_precision: float = 1e4, sparse_gradients: bool = True
    ) -> None:
        super().__init__(kernel, centers)
        check_positive("max_precision", max_precision)
        check_flag("sparse_gradients", sparse_gradients)
        self.max_precision, self.sparse_gradients = max_precision, sparse_gradients
        self.register_parameter("log_precision", torch.nn.Parameter(centers.new_zeros(self.num_groups, 1)))

    def sampled_parameters(self) -> list[torch.nn.Parameter]:
        return [self.log_precision]

    def prior_precision(self, groups: Tensor) -> Tensor:
        rows = functional.embedding(groups, self.log_precision, sparse=self.sparse_gradients).squeeze(-1)
        return rows.clamp(math.log(MIN_PRECISION), math.log(LARGEST_PRECISION)).exp()

    @property
    def precision(self) -> Tensor:
        """All precisions [m], detached."""
        return self.prior_precision(torch.arange(self.num_groups, device=self.points.device)).detach()

    def relevant(self) -> Tensor:
        """Indices of relevant functions."""
        return (self.precision < self.max_precision).nonzero().squeeze(-1)

    @torch.no_grad()
    def update_precision(self, mean: Tensor, variance: Tensor) -> None:
        """MacKay's fixed-point update of all precisions, (1 - s variance) / mean^2; cost O(m).

        Precisions of weights that the data do not determine (s variance = 1) stay.

        Args:
            mean: `model.weights.mean` [m].
            variance: `model.weights.variance` [m].
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
    """A new model with only the relevant functions and their weights. It needs new optimisers.

    Raises ValueError for another basis than a `RelevanceVectorBasis`, or no relevant function.
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
    options = {"max_precision": basis.max_precision, "sparse_gradients": basis.sparse_gradients}
    smaller = RelevanceVectorBasis(copy.deepcopy(basis.kernel), basis.points[kept], **options)
    smaller.log_precision.copy_(basis.log_precision[kept])
    result = QuadruplyStochasticGP(smaller, copy.deepcopy(model.mean_module), num_dense_columns=len(columns))
    root = torch.cat([old.dense_head_columns, old.tail_columns])[kept][:, columns]
    log_diagonal = torch.cat([old.head_log_diagonal, old.tail_log_diagonal.squeeze(-1)])[kept]
    result.weights.assign(old.mean[kept], root, log_diagonal)
    return result.train(model.training)

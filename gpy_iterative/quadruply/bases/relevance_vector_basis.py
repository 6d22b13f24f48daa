"""Relevance vectors: kernel functions, each with a prior precision of its own that training may drive to infinity."""

import math
from typing import Literal

import torch
from gpytorch import kernels
from torch import Tensor
from torch.nn import functional

from gpy_iterative.checks import check_positive
from gpy_iterative.quadruply.bases.inducing_point_basis import KernelFunctionBasis

#: Precisions stay between these.
MIN_PRECISION, LARGEST_PRECISION = 1e-10, 1e12


class RelevanceVectorBasis(KernelFunctionBasis):
    """phi(x) = k(x, Z) with S = diag(s), every s_t learned by empirical Bayes (Tipping 2001; Evans and Nair, appendix I.3).

    Args:
        kernel: any, without a batch shape.
        centers: Z [m, d], usually the training inputs.
        max_precision: a function counts as pruned from there on. What is large depends on the scales of targets (take
            standardised ones) and of phi^T phi / noise.
        sparse_gradients: gradients of precisions hold the rows of a step alone; their optimiser must take sparse ones.

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
        """The logarithms of s."""
        return [self.log_precision]

    def prior_precision(self, groups: Tensor) -> Tensor:
        """S at the functions of groups, [g]."""
        rows = functional.embedding(groups, self.log_precision, sparse=self.sparse_gradients).squeeze(-1)
        return rows.clamp(math.log(MIN_PRECISION), math.log(LARGEST_PRECISION)).exp()

    @property
    def precision(self) -> Tensor:
        """All of s, [m], detached."""
        return self.prior_precision(torch.arange(self.num_groups, device=self.points.device)).detach()

    def relevant(self) -> Tensor:
        """The functions whose precision is below `max_precision`, int64 [*]."""
        return (self.precision < self.max_precision).nonzero().squeeze(-1)

    @torch.no_grad()
    def update_precision(self, mean: Tensor, variance: Tensor, rule: Literal["mackay", "em"] = "mackay") -> None:
        """One fixed-point update of all precisions, O(m).

        Args:
            mean: of the weights, [m] (`model.weights.mean`).
            variance: the diagonal of their covariance, [m] (`model.weights.variance`).
            rule: "mackay" is (1 - s variance) / mean^2, "em" 1 / (mean^2 + variance), slower and never lower in evidence.
                MacKay's leaves an s of which the data have determined nothing, s variance = 1 to rounding.

        Raises:
            ValueError: another rule, or shapes that do not fit.
        """
        if rule not in ("mackay", "em"):
            raise ValueError(f"rule must be 'mackay' or 'em', got {rule!r}.")
        shape = (self.num_groups,)
        if mean.shape != shape or variance.shape != shape:
            raise ValueError(f"mean and variance must be {shape}, got {tuple(mean.shape)} and {tuple(variance.shape)}.")
        square = mean.square()
        if rule == "mackay":
            determined = (1 - self.precision * variance).clamp_min(0)
            moved = determined / square.clamp_min(torch.finfo(square.dtype).tiny)
            precision = torch.where(determined > torch.finfo(square.dtype).eps, moved, self.precision)
        else:
            precision = 1 / (square + variance)
        self.log_precision.copy_(precision.clamp(MIN_PRECISION, LARGEST_PRECISION).log().unsqueeze(-1))

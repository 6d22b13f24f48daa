"""The log density of N(0, Phi Phi^T + D) at a residual, for parts of one feature matrix that share its Gram matrix."""

import math
from functools import cached_property

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError


class FeatureDensity:
    """Log densities for parts of a feature matrix, differentiable once in all three arguments.

    Args:
        features: Phi [*b, n, F], float64: where few data are left unexplained, what is left is a small difference.
        noise: D [*b, n], positive, float64.
        residual: r [*b, n], float64.

    Cost: n F^2 multiply-adds for the Gram matrix; k^3 for a part of k < n columns, n^2 k + n^3 for one of more; three times
    as much with the derivatives. Memory: four times Phi, F^2, and n^2 where k >= n.
    """

    def __init__(self, features: Tensor, noise: Tensor, residual: Tensor) -> None:
        root = noise.sqrt().unsqueeze(-1)
        self._features, self._noise, self._residual = features, noise, residual.unsqueeze(-1)
        self._weighted, self._whitened = features / root, self._residual / root

    def log_density(self, columns: Tensor, scale: Tensor) -> Tensor:
        """The log density [*b] of N(0, Phi_k Phi_k^T + D) at r, Phi_k = Phi[:, columns] * scale.

        Raises NonFiniteError where an entry of the covariance is not finite.
        """
        num_data = self._features.shape[-2]
        by_parts = self._by_woodbury if len(columns) < num_data else self._by_dense_factor
        quadratic, log_determinant = by_parts(columns, scale)
        return -0.5 * (quadratic + log_determinant + num_data * math.log(2 * math.pi))

    @cached_property
    def _gram(self) -> Tensor:
        """Phi^T D^-1 Phi; its two equal derivatives take one product."""
        gram = self._weighted.mT @ self._weighted.detach()
        return 2 * gram - gram.detach()

    def _by_woodbury(self, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        gram = self._gram[..., columns, :][..., columns] * (scale.unsqueeze(-1) * scale)
        lower = _factor(gram + torch.eye(len(columns), dtype=gram.dtype, device=gram.device))
        with torch.no_grad():  # the quadratic form is smallest at these coefficients: its gradient needs none of theirs
            projected = (self._weighted.mT @ self._whitened)[..., columns, :] * scale.unsqueeze(-1)
            coefficients = torch.cholesky_solve(projected, lower)
            spread = torch.zeros_like(self._weighted[..., 0, :].unsqueeze(-1))
            spread[..., columns, :] = coefficients * scale.unsqueeze(-1)
        # Two squares: r^T D^-1 r less the explained part would cancel.
        rest = self._whitened - self._weighted @ spread
        quadratic = rest.square().sum((-2, -1)) + coefficients.square().sum((-2, -1))
        return quadratic, _log_determinant(lower) + self._noise.log().sum(-1)

    def _by_dense_factor(self, columns: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        features = self._features[..., columns] * scale
        lower = _factor(features @ features.mT + torch.diag_embed(self._noise))
        quadratic = (self._residual * torch.cholesky_solve(self._residual, lower)).sum((-2, -1))
        return quadratic, _log_determinant(lower)


def _log_determinant(lower: Tensor) -> Tensor:
    return 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _factor(matrix: Tensor) -> Tensor:
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any() or not torch.isfinite(lower).all():  # positive definite whenever it is finite
        raise NonFiniteError(
            "The covariance of random features has entries that are not finite, or too large for their noise: check data, "
            "hyperparameters and noise (a noise constraint keeps it away from zero)."
        )
    return lower

"""The log density of N(0, Phi Phi^T + D) at a residual, for leading parts of one feature matrix, and its derivatives.

Nested parts share one Gram matrix. Derivatives are in closed form: with a = S^-1 r,

    d log N = <a (Phi^T a)^T - S^-1 Phi, dPhi> + 1/2 <a^2 - diag(S^-1), dD> - <a, dr>.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.errors import NonFiniteError

#: Rows that are converted to float64 at a time.
CHUNK = 4096


@dataclass(frozen=True)
class FeatureDensityTerm:
    """A Gaussian log density whose covariance is made of features, with its derivatives.

    Attributes:
        value: log N(r; 0, S) [*b], float64.
        columns: of Phi that S is made of, [k].
        by_features: derivative with respect to these columns, [*b, n, k].
        by_noise: with respect to D, [*b, n].
        by_residual: with respect to r, [*b, n].
    """

    value: Tensor
    columns: Tensor
    by_features: Tensor
    by_noise: Tensor
    by_residual: Tensor


class FeatureDensity:
    """Log densities for parts of a feature matrix.

    Args:
        features: Phi [*b, n, F], detached.
        noise: D [*b, n], positive.
        residual: r [*b, n].

    Cost: n F^2 multiply-adds for the Gram matrix, in float64; n k^2 + k^3 for a part of k < n columns, n^2 k + n^3 for
    one of more. Memory: three times Phi, F^2, and n^2 where k >= n.
    """

    def __init__(self, features: Tensor, noise: Tensor, residual: Tensor) -> None:
        self._features, self._noise, self._residual = features, noise, residual
        self._root = noise.sqrt()
        self._weighted = features / self._root.unsqueeze(-1)
        self._gram: Tensor | None = None

    @torch.no_grad()
    def term(self, columns: Tensor, scale: Tensor) -> FeatureDensityTerm:
        """The density for S = Phi_k Phi_k^T + D, Phi_k = Phi[:, columns] * scale.

        Raises:
            NonFiniteError: an entry of S is not finite.
        """
        if len(columns) < self._features.shape[-2]:
            return self._by_woodbury(columns, scale)
        return self._dense(columns, scale)

    def _by_woodbury(self, columns: Tensor, scale: Tensor) -> FeatureDensityTerm:
        gram = self._all_gram()[..., columns, :][..., columns] * (scale.unsqueeze(-1) * scale)
        inner = gram + torch.eye(len(columns), dtype=gram.dtype, device=gram.device)
        lower = _factor(inner)
        weighted = self._weighted[..., columns] * scale.to(self._weighted)
        whitened = (self._residual.double() / self._root.double()).unsqueeze(-1)
        # In float64: where few data are left unexplained, what is left is a small difference.
        parts = zip(weighted.split(CHUNK, dim=-2), whitened.split(CHUNK, dim=-2), strict=True)
        projected = sum(rows.mT.double() @ part for rows, part in parts)
        coefficients = torch.cholesky_solve(projected, lower)
        inverse = torch.cholesky_inverse(lower)
        solved, explained, fitted = [], [], []
        for rows in weighted.split(CHUNK, dim=-2):
            exact = rows.double()
            part = exact @ inverse
            solved.append(part.to(weighted))
            explained.append((part * exact).sum(-1))
            fitted.append(exact @ coefficients)
        # Two squares: r^T D^-1 r less the explained part would cancel.
        rest = (whitened - torch.cat(fitted, dim=-2)).squeeze(-1)
        quadratic = rest.square().sum(-1) + coefficients.square().sum((-2, -1))
        logdet = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1) + self._noise.double().log().sum(-1)

        root = self._root.unsqueeze(-1)
        outer = rest.to(weighted).unsqueeze(-1) * coefficients.mT.to(weighted)
        weights = rest / self._root.double()
        by_noise = 0.5 * (weights.square() - (1 - torch.cat(explained, dim=-1)) / self._noise.double())
        return FeatureDensityTerm(
            value=-0.5 * (quadratic + logdet + self._size * math.log(2 * math.pi)),
            columns=columns,
            by_features=(outer - torch.cat(solved, dim=-2)) / root * scale.to(weighted),
            by_noise=by_noise.to(weighted),
            by_residual=-weights.to(weighted),
        )

    def _dense(self, columns: Tensor, scale: Tensor) -> FeatureDensityTerm:
        features = self._features[..., columns].double() * scale
        matrix = features @ features.mT + torch.diag_embed(self._noise.double())
        lower = _factor(matrix)
        residual = self._residual.double().unsqueeze(-1)
        weights = torch.cholesky_solve(residual, lower)
        inverse = torch.cholesky_inverse(lower)
        quadratic = (residual * weights).sum((-2, -1))
        logdet = 2 * lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        by_features = weights @ (weights.mT @ features) - inverse @ features
        by_noise = 0.5 * (weights.squeeze(-1).square() - inverse.diagonal(dim1=-2, dim2=-1))
        like = self._features
        return FeatureDensityTerm(
            value=-0.5 * (quadratic + logdet + self._size * math.log(2 * math.pi)),
            columns=columns,
            by_features=(by_features * scale).to(like),
            by_noise=by_noise.to(like),
            by_residual=-weights.squeeze(-1).to(like),
        )

    def _all_gram(self) -> Tensor:
        """Phi^T D^-1 Phi in float64, made once."""
        if self._gram is None:
            columns = self._weighted.shape[-1]
            gram = torch.zeros(
                *self._weighted.shape[:-2], columns, columns, dtype=torch.float64, device=self._weighted.device
            )
            for rows in self._weighted.split(CHUNK, dim=-2):
                gram += rows.mT.double() @ rows.double()
            self._gram = gram
        return self._gram

    @property
    def _size(self) -> int:
        return self._features.shape[-2]


def _factor(matrix: Tensor) -> Tensor:
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any() or not torch.isfinite(lower).all():  # positive definite whenever it is finite
        raise NonFiniteError(
            "The covariance of random features has entries that are not finite, or too large for their noise: check data, "
            "hyperparameters and noise (a noise constraint keeps it away from zero)."
        )
    return lower

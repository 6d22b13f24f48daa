"""Low-rank preconditioner of Newton systems, for K ~ L L^T:

(L L^T + W^+)^-1 r = W r - W L (I + L^T W L)^-1 L^T W r needs no W^+.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpy_iterative.laplace.likelihoods.curvature import Curvature
from gpy_iterative.linear_operators.latent import LatentPrior, function_kernels
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_solvers.cholesky import block_cholesky
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankRecipe

WEIGHTED_COLUMNS = 32


@dataclass(frozen=True)
class LatentFactor:
    columns: Tensor  # of L [n C, q]: [C, n, k] for independent functions, [1, n C, q] for coupled ones
    build_epochs: float  # passes over the kernel matrix

    def weighted_gram(self, curvature: Curvature) -> Tensor:
        """L^T W L [q, q]."""
        count, _, rank = self.columns.shape
        if count == 1:
            parts = self.columns[0].split(WEIGHTED_COLUMNS, dim=-1)
            weighted = [curvature.matmul(part.double()).to(part) for part in parts]
            return torch.cat([(self.columns[0].mT @ part).double() for part in weighted], dim=-1)
        blocks = curvature.blocks().to(self.columns)
        gram = torch.empty(count, rank, count, rank, dtype=torch.float64, device=self.columns.device)
        for first in range(count):
            for second in range(first, count):
                weighted = self.columns[second] * blocks[:, first, second].unsqueeze(-1)
                part = (self.columns[first].mT @ weighted).double()
                gram[first, :, second], gram[second, :, first] = part, part.mT
        return gram.view(count * rank, count * rank)

    def matmul(self, coefficients: Tensor) -> Tensor:
        """L z [n C] for z [q]."""
        count, _, rank = self.columns.shape
        by_function = self.columns @ coefficients.view(count, rank, 1).to(self.columns)
        return by_function.squeeze(-1).mT.double().flatten()

    def t_matmul(self, column: Tensor) -> Tensor:
        """L^T x [q] for x [n C]."""
        by_function = column.view(-1, len(self.columns)).mT.unsqueeze(-1).to(self.columns)
        return (self.columns.mT @ by_function).double().flatten()


class NewtonPreconditioner:
    def __init__(self, factor: LatentFactor, curvature: Curvature) -> None:
        inner = factor.weighted_gram(curvature)
        inner.diagonal().add_(1)
        self.factor, self.curvature, self.cholesky = factor, curvature, block_cholesky(inner)

    def solve(self, weighted_residual: Tensor) -> Tensor:
        """(L L^T + W^+)^-1 r from W r."""
        projected = self.factor.t_matmul(weighted_residual).unsqueeze(-1)
        explained = self.factor.matmul(self.cholesky.solve(projected).squeeze(-1))
        return weighted_residual - self.curvature.matmul(explained.unsqueeze(-1)).squeeze(-1)


def latent_factor(
    recipe: LowRankRecipe, prior: LatentPrior, curvature: Curvature, generator: torch.Generator
) -> LatentFactor:
    operator, latents = prior.operator, prior.num_latents
    mean = curvature.blocks().diagonal(dim1=-2, dim2=-1).mean()
    noise = float(1 / mean) if mean > 0 else 1.0
    kernels = function_kernels(operator)
    whole = operator if kernels is None else kernels
    parts = [whole[member] for member in range(latents)] if whole.batch_shape else [whole]
    noises = torch.full((whole.shape[-1],), noise, dtype=operator.dtype, device=operator.device)
    built = [recipe.build(NoisyLinearOperator(part, noises), generator=generator) for part in parts]
    # Ranks may differ.
    rank = max(member.factor.shape[-1] for member in built)
    columns = torch.stack([functional.pad(member.factor, (0, rank - member.factor.shape[-1])) for member in built])
    epochs = sum(member.build_epochs for member in built) / len(built)
    return LatentFactor(columns if kernels is None else columns.expand(latents, -1, -1), epochs)

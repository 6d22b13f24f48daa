"""Randomized Nystrom approximation of a kernel matrix, plus noise.

Frangella et al. 2021, "Randomized Nystrom preconditioning".
"""

from dataclasses import dataclass
from typing import cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.noisy import kernel_and_noise
from gpy_iterative.preconditioners.low_rank_plus_diagonal import LowRankRecipe, NystromFactor
from gpy_iterative.preconditioners.pivoted_cholesky import factor_on
from gpy_iterative.random_numbers import given_or_seeded, normal


@dataclass(frozen=True)
class Nystrom(LowRankRecipe):
    """Recipe for K C (C^T K C)^-1 C^T K plus noise, with a random subspace C of dimension `rank`, at most n."""

    rank: int = 100

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    @torch.no_grad()
    def build(self, operator: LinearOperator, *, generator: torch.Generator | None = None) -> NystromFactor:
        """See `PreconditionerRecipe.build`.

        The mean remaining diagonal replaces unknown noise. Cost: one product with k columns, 3 n k^2 multiply-adds.
        """
        kernel, diagonal, noise = kernel_and_noise(operator)
        generator = given_or_seeded(generator)
        shape = (*diagonal.shape, min(self.rank, diagonal.shape[-1]))
        drawn = normal(shape, generator, operator.device, operator.dtype)
        test_matrix = cast(Tensor, torch.linalg.qr(drawn).Q)  # basis C
        product = kernel._matmul(test_matrix).detach()
        block = test_matrix.mT.double() @ product.double()
        block = (block + block.mT) / 2
        batch, (size, rank) = product.shape[:-2], product.shape[-2:]
        factors = [
            factor_on(rows, inner)
            for rows, inner in zip(product.mT.reshape(-1, rank, size), block.reshape(-1, rank, rank), strict=True)
        ]
        factor = torch.stack(factors).reshape(*batch, size, rank)
        least = torch.finfo(diagonal.dtype).eps * diagonal.mean(-1, keepdim=True)
        if noise is None:
            noise = (diagonal - factor.square().sum(-1)).clamp_min(0).mean(-1, keepdim=True).expand(diagonal.shape)
        return NystromFactor(factor, noise.maximum(least), build_epochs=1.0)

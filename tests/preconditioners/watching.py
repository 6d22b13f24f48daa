"""A kernel matrix that notes which of its parts are evaluated."""

import torch
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator


def watched(matrix: Tensor) -> tuple[NoisyLinearOperator, list[tuple[int, ...]]]:
    """K + I for K [n, n], and the list that the shapes of evaluated parts of K go to."""
    formed: list[tuple[int, ...]] = []

    class Watching(DenseLinearOperator):
        def to_dense(self) -> Tensor:
            formed.append(tuple(self.shape))
            return super().to_dense()

        def dense_rows(self, rows: Tensor) -> Tensor:
            formed.append((len(rows), self.shape[-1]))
            return self.tensor[rows]

    return NoisyLinearOperator(Watching(matrix), torch.ones(len(matrix)).to(matrix)), formed

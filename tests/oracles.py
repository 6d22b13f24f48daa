"""Naive dense twins of what the package does matrix-free: short, slow, and obviously right."""

import math

import torch
from torch import Tensor

from gpy_iterative.preconditioners import LowRankPlusDiagonal


def problem(n: int = 120, d: int = 3, noise: float = 0.04) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [n, d], a Matern-3/2 system H [n, n] and targets [n]; no random numbers."""
    index = torch.arange(1, n + 1, dtype=torch.float64)
    x = (index[:, None] * torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)[:d].sqrt()) % 1.0 * 4 - 2
    r = math.sqrt(3) * (x[:, None] - x[None]).square().sum(-1).sqrt()
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * torch.cos(37.0 * index)
    kernel = 1.44 * (1 + r) * torch.exp(-r)
    return x, kernel + noise * torch.eye(n, dtype=torch.float64), (y - y.mean()) / y.std()


def pivoted_cholesky(matrix: Tensor, rank: int) -> tuple[Tensor, list[int]]:
    """Greedy factor [n, r] and its pivots."""
    rest, columns, pivots = matrix.clone(), [], []
    for _ in range(rank):
        diagonal = rest.diagonal().clone()
        diagonal[pivots] = 0
        pivot = int(diagonal.argmax())
        column = rest[:, pivot] / rest[pivot, pivot].sqrt()
        columns.append(column)
        pivots.append(pivot)
        rest = rest - torch.outer(column, column)
    return torch.stack(columns, 1), pivots


def conjugate_gradients(matrix: Tensor, rhs: Tensor, steps: int, inverse: Tensor | None = None) -> Tensor:
    """`steps` iterations from zero for one right-hand side; `inverse` is the dense inverse preconditioner."""
    value, residual = torch.zeros_like(rhs), rhs.clone()
    inverse = torch.eye(len(rhs), dtype=rhs.dtype) if inverse is None else inverse
    preconditioned = inverse @ residual
    direction = preconditioned
    for _ in range(steps):
        length = (residual @ preconditioned) / (direction @ matrix @ direction)
        value = value + length * direction
        updated = residual - length * matrix @ direction
        following = inverse @ updated
        direction = following + (updated @ following) / (residual @ preconditioned) * direction
        residual, preconditioned = updated, following
    return value


def alternating_projections(matrix: Tensor, rhs: Tensor, steps: int, block_size: int) -> Tensor:
    """`steps` greedy block updates from zero, [n, s]."""
    value, residual = torch.zeros_like(rhs), rhs.clone()
    blocks = torch.arange(len(rhs)).split(block_size)
    for _ in range(steps):
        block = max(blocks, key=lambda rows: float(residual[rows].square().sum()))
        value[block] += torch.linalg.solve(matrix[block][:, block], residual[block])
        residual = rhs - matrix @ value
    return value


def stochastic_gradient_descent(
    matrix: Tensor, rhs: Tensor, batches: list[Tensor], learning_rate: float, momentum: float
) -> Tensor:
    """Heavy ball from zero, one step for each batch of rows, [n, s]."""
    value, velocity = torch.zeros_like(rhs), torch.zeros_like(rhs)
    for rows in batches:
        gradient = torch.zeros_like(rhs)
        gradient[rows] = (matrix @ value - rhs)[rows] / len(rows)
        velocity = momentum * velocity - learning_rate * gradient
        value = value + velocity
    return value


def krylov_logarithms(lengths: Tensor, products: Tensor) -> Tensor:
    """e_1^T log(T_j) e_1 [J] of one column of conjugate gradients, by the eigenvalues of every leading block."""
    beta = products[1:] / products[:-1]
    diagonal = 1 / lengths
    diagonal[1:] += beta / lengths[:-1]
    beside = beta.sqrt() / lengths[:-1]
    matrix = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
    result = []
    for j in range(1, len(lengths) + 1):
        values, vectors = torch.linalg.eigh(matrix[:j, :j])
        result.append(vectors[0].square() @ values.log())
    return torch.stack(result)


def stochastic_dual_descent(
    matrix: Tensor, rhs: Tensor, batches: list[Tensor], learning_rate: float, momentum: float, averaging: float
) -> Tensor:
    """Algorithm 1 of the paper from zero, with the mean gradient's learning rate: the averaged iterate [n, s]."""
    value, velocity, average = torch.zeros_like(rhs), torch.zeros_like(rhs), torch.zeros_like(rhs)
    for rows in batches:
        gradient = torch.zeros_like(rhs)
        gradient[rows] = (matrix @ (value + momentum * velocity) - rhs)[rows] / len(rows)
        velocity = momentum * velocity - learning_rate * gradient
        value = value + velocity
        average = averaging * value + (1 - averaging) * average
    return average


def sketch_and_project(matrix: Tensor, rhs: Tensor, blocks: list[Tensor], convexity: float) -> Tensor:
    """Accelerated projections onto blocks from zero, [n, s], in the paper's letters."""
    nu = len(rhs) / len(blocks[0])
    beta, gamma = 1 - math.sqrt(convexity / nu), 1 / math.sqrt(convexity * nu)
    alpha = 1 / (1 + gamma * nu)
    w, v, z = torch.zeros_like(rhs), torch.zeros_like(rhs), torch.zeros_like(rhs)
    for rows in blocks:
        d = torch.zeros_like(rhs)
        d[rows] = torch.linalg.solve(matrix[rows][:, rows], (matrix @ z - rhs)[rows])
        w, v = z - d, beta * v + (1 - beta) * z - gamma * d
        z = alpha * v + (1 - alpha) * w
    return w


def low_rank_plus_diagonal(factor: LowRankPlusDiagonal, rhs: Tensor) -> Tensor:
    """(L L^T + diag(d)) rhs [*b, n, s]."""
    return factor.factor @ (factor.factor.mT @ rhs) + factor.diagonal.unsqueeze(-1) * rhs

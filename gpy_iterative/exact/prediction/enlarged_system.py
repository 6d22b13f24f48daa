"""What was solved for n data, carried over to n + m: the new rows are last, hyperparameters and old rows are the same.

The solves for n data, with zeros for the rest, leave residuals in the new rows alone. Relative to all targets these are
small: a solver that started there would stop at once, with the new data ignored. So each new datum is first solved for
together with the data that it is most correlated with, which is where almost all of its effect lies. The solver goes on
from there, and mostly finds nothing left to do.
"""

import torch
from linear_operator import LinearOperator
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.exact.prediction.blocks import principal_blocks
from gpy_iterative.exact.prediction.projection import jittered_factor
from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.training.training_system import TrainingSystem

#: New rows that are solved for at a time, and old rows that are solved for with them.
NEW_ROWS, NEIGHBOURS = 1024, 1024
#: Old rows that are looked at to see whether they are what they were.
ROWS_COMPARED = 4
#: Rows of the matrix that are held at a time.
ROWS_AT_A_TIME = 128


def new_rows(operator: LinearOperator, size: int) -> Tensor:
    """Dense rows of H [*b, n, n] from number `size` on, [*b, n - size, n]."""
    return dense_rows(operator, torch.arange(size, operator.shape[-1], device=operator.device))


def has_grown_from(before: TrainingSystem, after: TrainingSystem) -> bool:
    """Whether the first rows of a system are those of an earlier one, with further data behind them.

    They are not where a prior looks at all inputs together (a deep kernel that scales its features by their range, a
    grid that follows the data). Compared are means, diagonals and a few rows, up to rounding.
    """
    old, new = before.operator, after.operator
    size, dtype = old.shape[-1], old.dtype
    index = torch.linspace(0, size - 1, ROWS_COMPARED, device=old.device).long()
    pairs = (
        (before.residual, after.residual),
        (old.diagonal(dim1=-2, dim2=-1), new.diagonal(dim1=-2, dim2=-1)),
        (dense_rows(old, index), dense_rows(new, index)),
    )
    tolerance = max(torch.finfo(dtype).eps ** 0.5, 1e-6)
    return all(bool(((a - b[..., :size]).abs() <= tolerance * b.abs().amax()).all()) for a, b in pairs)


def padded(columns: Tensor, shape: torch.Size) -> Tensor:
    """[*a, n, s] for n data to [*b, n + m, s] for a system of the shape [*b, n + m], with zeros."""
    columns = columns.expand(*shape[:-1], *columns.shape[-2:])
    return pad(columns, (0, 0, 0, shape[-1] - columns.shape[-2]))


def locally_corrected(operator: LinearOperator, rhs: Tensor, guess: Tensor, size: int) -> tuple[Tensor, float]:
    """A guess that solves the new rows exactly, each block of them in turn, and the epochs that it took.

    Args:
        operator: H [*b, n, n].
        rhs: B [*b, n, s].
        guess: V [*b, n, s], with zeros in the rows from number `size` on.
        size: number of the first new row.

    Cost: a product for every 1,024 new rows, the new rows' entries, and a dense factor of at most 2,048 rows.
    """
    epochs = 0.0
    for rows in torch.arange(size, operator.shape[-1], device=operator.device).split(NEW_ROWS):
        index = _neighbourhood(operator, rows)
        residual = rhs - operator._matmul(guess)
        columns = index.unsqueeze(-1).expand(*index.shape, rhs.shape[-1])
        lower = jittered_factor(principal_blocks(operator, index.unsqueeze(-2)).squeeze(-3).double())
        step = torch.cholesky_solve(residual.gather(-2, columns).double(), lower)
        guess = guess.scatter_add(-2, columns, step.to(guess.dtype))
        epochs += 1.0 + len(rows) / operator.shape[-1]
    return guess, epochs


def _neighbourhood(operator: LinearOperator, rows: Tensor) -> Tensor:
    """The rows and those most correlated with them, [*b, k]."""
    score = sum(dense_rows(operator, part).square().sum(-2) for part in rows.split(ROWS_AT_A_TIME))
    score[..., rows] = torch.inf
    return score.topk(min(len(rows) + NEIGHBOURS, operator.shape[-1]), dim=-1).indices

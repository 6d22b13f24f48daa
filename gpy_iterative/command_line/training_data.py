"""Inputs and targets of a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpy_iterative.command_line.columns import PARSERS, Column, first_strange, hint
from gpy_iterative.command_line.table import BadInputError, Table, counted_rows, read_table

#: Least rows for training and testing.
LEAST_ROWS = 20


@dataclass(frozen=True)
class TrainingData:
    """Complete rows."""

    columns: tuple[Column, ...]  # of the inputs
    inputs: Tensor  # [n, d], float64
    targets: Tensor  # [n], float64
    constant: tuple[str, ...]  # names of excluded constant columns


def read_training_data(path: Path, target: str, dropped: Sequence[str], *, drop_incomplete: bool) -> TrainingData:
    """Reads a CSV file. Raises BadInputError with advice."""
    if target in dropped:
        raise BadInputError(f"{target!r} is the target: it cannot be left out by --drop.")
    table = read_table(path, (target, *dropped))
    _check_target(target, table[target])
    table = {name: table[name] for name in table if name not in dropped}
    values = _encoded(table, target)
    kept = _complete_rows(values, drop_incomplete)
    if len(kept) < len(table[target]):  # levels and kinds may change
        table = {name: [cells[row] for row in kept] for name, cells in table.items()}
        values = _encoded(table, target)
    constant = tuple(column.name for column, rows in values.items() if (rows == rows[0]).all())
    if target in constant:
        raise BadInputError(f"Target {target!r} is {table[target][0]} in every row: there is nothing to predict.")
    columns = tuple(column for column in values if column.name not in (target, *constant))
    if not columns:
        raise BadInputError(f"{path} has no column that varies beside the target {target!r}.")
    inputs = np.concatenate([values[column] for column in columns], axis=1)
    targets = values[Column(target, "number")][:, 0]
    return TrainingData(columns, torch.tensor(inputs), torch.tensor(targets), constant)


def _check_target(name: str, cells: Sequence[str]) -> None:
    row = first_strange(cells, PARSERS["number"])
    if row is not None:
        raise BadInputError(
            f"Target {name!r} has texts ({cells[row]!r} in row {row + 1}), and fit learns numbers only: correct them."
            f"{hint(cells[row]) or ' For labels see Classification in the documentation.'}"
        )


def _encoded(table: Table, target: str) -> dict[Column, np.ndarray]:
    """Values [n, k] of each column; target values are numbers."""
    columns = [Column(name, "number") if name == target else Column.of(name, table[name]) for name in table]
    return {column: column.encode(table[column.name]) for column in columns}


def _complete_rows(values: dict[Column, np.ndarray], drop_incomplete: bool) -> np.ndarray:
    """Numbers of the complete rows. Raises BadInputError for gaps without `drop_incomplete`, or too few rows."""
    gaps = {column.name: np.isnan(rows[:, 0]) for column, rows in values.items()}
    counts = [f"{name} ({rows.sum()})" for name, rows in gaps.items() if rows.any()]
    has_gap = np.any(list(gaps.values()), axis=0)
    (kept,) = np.nonzero(~has_gap)
    if counts and not drop_incomplete:
        raise BadInputError(
            f"Values are missing or infinite in {', '.join(counts)}: fill them in, leave the columns out (--drop), "
            f"or leave the rows out (--drop-incomplete keeps {len(kept)} of {len(has_gap)})."
        )
    if len(kept) < LEAST_ROWS:
        few = f"{counted_rows(len(kept))} {'is' if len(kept) == 1 else 'are'} too few to learn from"
        raise BadInputError(f"{few}: at least {LEAST_ROWS} are needed.")
    return kept

"""Numeric columns: numbers, ISO dates in days, a 0-1 input per level of a category."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpy_iterative.command_line.table import BadInputError, Table, counted_rows, read_table

MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none"})
EMPTY = "(empty)"
MAX_LEVELS = 20
HINTS = {
    r"[+-]?\d+,\d+": " Numbers need a decimal point.",
    r"\d+([./])\d+\1\d+( .*)?": " Dates need the form 2019-05-25.",
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LEAST_ROWS = 20


def number(cell: str) -> float:
    """NaN if missing or infinite. Raises ValueError for text."""
    if "_" in cell:  # Python reads 1_1 as 11
        raise ValueError
    value = math.nan if cell.lower() in MISSING else float(cell)
    return value if math.isfinite(value) else math.nan


def days(cell: str) -> float:
    """Days from 1970 to an ISO date or time (default UTC), NaN if missing. Raises ValueError."""
    if cell.lower() in MISSING:
        return math.nan
    when = datetime.fromisoformat(cell)
    return ((when if when.tzinfo else when.replace(tzinfo=UTC)) - EPOCH) / timedelta(days=1)


PARSERS: dict[str, Callable[[str], float]] = {"number": number, "date": days}


@dataclass(frozen=True)
class Column:
    name: str
    kind: str  # "number", "date" or "category"
    levels: tuple[str, ...] = ()  # of a category, "" if missing

    @classmethod
    def of(cls, name: str, cells: Sequence[str]) -> "Column":
        """The first kind that fits all cells. Raises BadInputError for more than `MAX_LEVELS` levels."""
        strange = {kind: first_strange(cells, parse) for kind, parse in PARSERS.items()}
        for kind, row in strange.items():
            if row is None:
                return cls(name, kind)
        levels = tuple(sorted(set(cells)))
        if len(levels) > MAX_LEVELS:
            row = max(strange.values())
            raise BadInputError(
                f"Column {name!r} has {cells[row]!r} in row {row + 1}, neither a number nor an ISO date, and "
                f"{len(levels)} different texts, {MAX_LEVELS} at most for categories: correct it, or leave it out (--drop)."
                f"{hint(cells[row])}"
            )
        return cls(name, "category", levels)

    @property
    def inputs(self) -> list[str]:
        return [f"{self.name}={level or EMPTY}" for level in self._input_levels] or [self.name]

    def __str__(self) -> str:
        advice = next(filter(None, map(hint, self.levels)), "")  # such texts may be meant as numbers or dates
        shown = f"{self.name}: {self.kind} {', '.join(level or EMPTY for level in self.levels)}".rstrip()
        return f"{shown}.{advice}" if advice else shown

    @property
    def _input_levels(self) -> tuple[str, ...]:
        """Two levels need only one input."""
        return self.levels[1:] if len(self.levels) == 2 else self.levels

    def encode(self, cells: Sequence[str]) -> np.ndarray:
        """Inputs [n, k], NaN for missing numbers and dates. Raises BadInputError."""
        if self.kind == "category":
            self._check_levels(cells)
            return np.array([[float(cell == level) for level in self._input_levels] for cell in cells])
        row = first_strange(cells, PARSERS[self.kind])
        if row is not None:
            raise BadInputError(
                f"Column {self.name!r} has {cells[row]!r} in row {row + 1}, which is no {self.kind}: correct it."
                f"{hint(cells[row])}"
            )
        return np.array([[PARSERS[self.kind](cell)] for cell in cells])

    def _check_levels(self, cells: Sequence[str]) -> None:
        for row, cell in enumerate(cells, 1):
            if cell not in self.levels:
                strange, *known = (repr(text) if text else EMPTY for text in (cell, *self.levels))
                raise BadInputError(
                    f"Column {self.name!r} has {strange} in row {row}, but the model knows only {', '.join(known)}: "
                    "correct it, or leave the row out."
                )


def hint(cell: str) -> str:
    return next((advice for form, advice in HINTS.items() if re.fullmatch(form, cell)), "")


def first_strange(cells: Sequence[str], parse: Callable[[str], float]) -> int | None:
    for row, cell in enumerate(cells):
        try:
            parse(cell)
        except ValueError:
            return row
    return None


@dataclass(frozen=True)
class TrainingData:
    columns: tuple[Column, ...]
    inputs: Tensor  # [n, d], float64
    targets: Tensor  # [n], float64
    constant: tuple[str, ...]  # names of left out columns
    num_incomplete: int  # left out


def read_training_data(path: Path, target: str, dropped: Sequence[str], *, drop_incomplete: bool) -> TrainingData:
    if target in dropped:
        raise BadInputError(f"{target!r} is the target: it cannot be left out by --drop.")
    table = read_table(path, (target, *dropped))
    _check_target(target, table[target])
    table = {name: table[name] for name in table if name not in dropped}
    values = _encoded(table, target)
    kept = _complete_rows(values, drop_incomplete)
    num_incomplete = len(table[target]) - len(kept)
    if num_incomplete:  # levels and kinds may change
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
    return TrainingData(columns, torch.tensor(inputs), torch.tensor(targets), constant, num_incomplete)


def _check_target(name: str, cells: Sequence[str]) -> None:
    row = first_strange(cells, PARSERS["number"])
    if row is not None:
        raise BadInputError(
            f"Target {name!r} has texts ({cells[row]!r} in row {row + 1}), and fit learns numbers only: correct them."
            f"{hint(cells[row]) or ' For labels see Classification in the documentation.'}"
        )


def _encoded(table: Table, target: str) -> dict[Column, np.ndarray]:
    columns = [Column(name, "number") if name == target else Column.of(name, table[name]) for name in table]
    return {column: column.encode(table[column.name]) for column in columns}


def _complete_rows(values: dict[Column, np.ndarray], drop_incomplete: bool) -> np.ndarray:
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

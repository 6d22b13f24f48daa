import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

DELIMITERS = ",;\t"

#: Stripped cells by column name.
Table = dict[str, Sequence[str]]


class BadInputError(ValueError):
    """The message is one line for the user."""


def read_table(path: Path, needed: Iterable[str]) -> Table:
    """Reads a UTF-8 CSV file with column names, separated by commas, semicolons or tabs.

    Raises BadInputError for any other file, or a missing needed column.
    """
    names, *rows = _read_lines(path)
    names = [name or f"column {number}" for number, name in enumerate(names, 1)]
    for name in names:
        if names.count(name) > 1:
            raise BadInputError(f"{path} has several columns of the name {name!r}: rename all but one.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise BadInputError(f"Row {number} of {path} has {len(row)} cells for {len(names)} names: correct it.")
    for name in needed:
        if name not in names:
            raise BadInputError(f"{path} has no column {name!r}; its columns are {', '.join(names)}.")
    if not rows:
        raise BadInputError(f"{path} has no rows below its column names.")
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _read_lines(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()  # a pipe can be read only once
        lines_by = lambda delimiter: csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        headers = {delimiter: next(filter(None, lines_by(delimiter)), []) for delimiter in DELIMITERS}
        delimiter = max(DELIMITERS, key=lambda each: len(headers[each]))
        lines = lines_by(delimiter)
        if len(headers[delimiter]) == 1:  # an empty line is an empty cell
            lines = (line or [""] for line in lines)
        found = [[cell.strip() for cell in line] for line in lines if line]
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8: save it as UTF-8.") from error
    except csv.Error as error:
        raise BadInputError(f"{path} is no CSV file: {error}.") from error
    if not found:
        raise BadInputError(f"{path} is empty: it needs a line of column names.")
    return found


def counted_rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def write_table(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))

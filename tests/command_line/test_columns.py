"""Tables as people have them: what becomes of their columns, and what is said about those that do not fit."""

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from gpy_iterative.command_line.columns import Column, TrainingData, read_training_data
from gpy_iterative.command_line.commands import data_lines
from gpy_iterative.command_line.table import BadInputError, read_table, write_table
from tests.command_line.homes import Homes, homes, written


def read(
    folder: Path, table: Homes, target: str = "price", *dropped: str, drop_incomplete: bool = False
) -> TrainingData:
    return read_training_data(written(folder / "homes.csv", table), target, dropped, drop_incomplete=drop_incomplete)


def test_numbers_dates_and_categories_become_inputs(tmp_path: Path) -> None:
    table = homes()
    table["garden"] = ["yes", "no"] * 40
    data = read(tmp_path, table, "price", "luck")
    assert [(column.name, column.kind) for column in data.columns] == [
        ("area", "number"),
        ("built", "date"),
        ("district", "category"),
        ("garden", "category"),
    ]
    names = [name for column in data.columns for name in column.inputs]
    assert names == ["area", "built", "district=Harbour", "district=North", "district=South", "garden=yes"]
    assert data.constant == ("floors",)
    np.testing.assert_array_equal(data.targets, np.array(table["price"], dtype=float))
    days = np.array(table["built"], dtype="datetime64[D]").astype(float)
    north = [float(cell == "North") for cell in table["district"]]
    np.testing.assert_array_equal(data.inputs[:, [1, 3, 5]], np.column_stack([days, north, [1.0, 0.0] * 40]))


def test_times_are_parts_of_days() -> None:
    cells = ["1970-01-02", "1970-01-02T06:00", "1970-01-02 06:00+06:00"]
    np.testing.assert_array_equal(Column.of("when", cells).encode(cells), [[1.0], [1.25], [1.0]])


def test_gaps_are_refused_or_their_rows_left_out(tmp_path: Path) -> None:
    table = homes()
    table["area"][3], table["area"][4], table["price"][4], table["built"][9] = "NaN", "", "inf", "n/a"
    said = r"missing or infinite in area \(2\), built \(1\), price \(1\): .*--drop-incomplete keeps 77 of 80"
    with pytest.raises(BadInputError, match=said):
        read(tmp_path, table)
    data = read(tmp_path, table, drop_incomplete=True)
    assert "Incomplete, and left out: 3 rows." in data_lines(data, 70)
    kept = np.delete(np.arange(80), [3, 4, 9])
    np.testing.assert_array_equal(data.targets, np.array(table["price"], dtype=float)[kept])
    assert data.inputs.isfinite().all()


def test_numbers_and_dates_of_another_form_that_become_categories_are_told(tmp_path: Path) -> None:
    table = homes() | {"area": ['"0,5"', "2", '"1,5"', "3"] * 20, "built": ["25/05/2019", "26/05/2019"] * 40}
    lines = data_lines(read(tmp_path, table, "price", "district"), 70)
    assert "  area: category 0,5, 1,5, 2, 3. Numbers need a decimal point." in lines
    assert "  built: category 25/05/2019, 26/05/2019. Dates need the form 2019-05-25." in lines


def test_a_gap_in_a_category_is_a_category(tmp_path: Path) -> None:
    table = homes()
    table["district"][0] = ""
    (column,) = (column for column in read(tmp_path, table).columns if column.name == "district")
    assert column.levels == ("", "Harbour", "North", "South")
    assert column.inputs[0] == "district=(empty)"
    assert str(column) == "district: category (empty), Harbour, North, South"
    with pytest.raises(
        BadInputError, match=r"'East' in row 1, but the model knows only \(empty\), 'Harbour', .*: correct"
    ):
        column.encode(["East"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"area": ["wide", *map(str, range(79))]},
            "Column 'area' has 'wide' in row 1, neither a number nor an ISO date, and 80 different texts",
        ),
        ({"built": [f"1.2.{year}" for year in range(1900, 1980)]}, "'1.2.1900' in row 1, .* Dates need the form"),
        ({"built": [f"25/05/{year} 14:30" for year in range(1900, 1980)]}, "in row 1, .* Dates need the form"),
        ({"area": [f'"{number},5"' for number in range(80)]}, "'0,5' in row 1, .* Numbers need a decimal point"),
        ({"price": ['"56,06"'] * 80}, "Target 'price' has texts .* Numbers need a decimal point"),
        (
            {"price": ["1", "dear"] * 40},
            r"Target 'price' has texts \('dear' in row 2\), .* For labels see Classification",
        ),
        ({"price": ["3.5"] * 80}, "Target 'price' is 3.5 in every row"),
        ({"price": ["NA"] * 80}, r"missing or infinite in price \(80\)"),
        (
            {"area": ["1"] * 80, "built": ["2"] * 80, "district": ["N"] * 80, "luck": ["3"] * 80},
            "no column that varies",
        ),
    ],
)
def test_says_what_is_wrong_with_a_column(change: Homes, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=said):
        read(tmp_path, homes() | change)


def test_says_that_rows_are_too_few_and_names_unknown(tmp_path: Path) -> None:
    for few, said in ((19, "19 rows are too few"), (1, "^1 row is too few")):
        with pytest.raises(BadInputError, match=said):
            read(tmp_path, homes(few))
    with pytest.raises(BadInputError, match="no column 'prise'; its columns are area, built"):
        read(tmp_path, homes(), "prise")
    with pytest.raises(BadInputError, match="'price' is the target"):
        read(tmp_path, homes(), "price", "price")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"price,area\n", "no rows below"),
        (b"price,stra\xdfe\n1,2\n", "is not UTF-8: save it as UTF-8.$"),
        (b"price,area\n1,2\n1,2,3\n", "Row 2 of .* has 3 cells for 2 names"),
        (b"price,price\n1,2\n", "several columns of the name 'price'"),
    ],
)
def test_says_what_is_no_table(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "homes.csv"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=said):
        read_table(path, ["price"])
    with pytest.raises(BadInputError, match=f"{re.escape(str(tmp_path))} cannot be read"):
        read_table(tmp_path, [])


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = {"a, b": ['"', "ü"], "column 2": ["1", ""]}
    write_table(tmp_path / "a.csv", table)
    assert read_table(tmp_path / "a.csv", []) == {name: tuple(cells) for name, cells in table.items()}
    (tmp_path / "a.csv").write_text("a\t\n1\t 2 \n\n")
    assert read_table(tmp_path / "a.csv", []) == {"a": ("1",), "column 2": ("2",)}


def test_underscores_are_no_part_of_a_number(tmp_path: Path) -> None:
    """Python reads 1_1 as 11: two codes became one number."""
    table = homes()
    table["code"] = ["1_1", "11"] * 40
    (column,) = (column for column in read(tmp_path, table).columns if column.name == "code")
    assert (column.kind, column.levels) == ("category", ("11", "1_1"))


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ('"area, m2";"b, x";price\n1;2;3\n', {"area, m2": ("1",), "b, x": ("2",), "price": ("3",)}),
        ("\na;b\n1,5;2\n", {"a": ("1,5",), "b": ("2",)}),
        ('"a\nb"\tc\n1\t2\n', {"a\nb": ("1",), "c": ("2",)}),
        ("a\n0.1\n\n0.3\n", {"a": ("0.1", "", "0.3")}),
        ("a,b\n0.1,1\n\n0.3,2\n", {"a": ("0.1", "0.3"), "b": ("1", "2")}),
    ],
)
def test_delimiters_and_empty_lines(text: str, table: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert read_table(tmp_path / "a.csv", ()) == table


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As in `zcat a.csv.gz | python -m gpy_iterative fit /dev/stdin`."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("a;b\n1;2\n",))
    writer.start()
    assert read_table(tmp_path / "pipe", ()) == {"a": ("1",), "b": ("2",)}
    writer.join()

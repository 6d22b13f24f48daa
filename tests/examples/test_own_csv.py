"""The example script on CSV files as people have them."""

import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from gpy_iterative.fitting import FitStatus

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_csv.py"))


def run(
    path: Path,
    *,
    dropped: Sequence[str] = (),
    drop_incomplete: bool = False,
    target: str = "price",
    steps: int | None = None,
    double: bool = False,
) -> None:
    SCRIPT["main"](path, target, dropped, drop_incomplete, steps, double)


@pytest.fixture
def table() -> pd.DataFrame:
    """Prices in thousands that follow area and age, not the constant column, with a noise of 2."""
    rng = np.random.default_rng(0)
    area, age = rng.uniform(20, 200, 400), rng.integers(0, 80, 400)
    price = 1000 + 3 * area + 60 * np.sin(age / 12) + rng.normal(scale=2, size=400)
    return pd.DataFrame({"area": area, "age": age, "floors": 1, "price": price})


def test_learns_predicts_in_the_targets_units_and_writes_both(
    table: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "homes.csv"
    table.to_csv(path, index=False)
    run(path)
    printed = capsys.readouterr().out
    assert "constant, and left out: floors" in printed
    assert "360 rows to learn from, 40 held out, 2 inputs" in printed
    assert "CONVERGED after" in printed
    assert FitStatus.CONVERGED.advice in printed
    ((low, high),) = re.findall(r"noise_covar\.noise: .* \((.*) to (.*)\)", printed)
    noise = (2 / table["price"].std(ddof=0)) ** 2  # of the standardised prices
    assert float(low) < 1.2 * noise
    assert noise / 1.2 < float(high) < 1.5 * float(low)

    predictions = pd.read_csv(tmp_path / "homes_predictions.csv", index_col=0)
    columns = ["area", "age", "price"]
    pd.testing.assert_frame_equal(  # whole rows, each its own
        predictions[columns], table.loc[predictions.index, columns], check_dtype=False
    )
    error = predictions["price_predicted"] - predictions["price"]
    assert np.sqrt(np.mean(error**2)) < 4  # twice the noise, and a thirtieth of the prices' own deviation
    assert (np.abs(error) < 1.96 * predictions["price_deviation"]).mean() >= 0.8
    assert predictions["price_deviation"].between(1, 10).all()

    new = tmp_path / "new.csv"  # columns in another order, and others among them
    table.loc[predictions.index, ["floors", "age", "area"]].assign(street="Elm").to_csv(new, index=False)
    SCRIPT["predict"](path, new)
    again = pd.read_csv(tmp_path / "new_predictions.csv", index_col=0)
    assert list(again.columns) == ["area", "age", "price_predicted", "price_deviation"]
    np.testing.assert_allclose(again["price_predicted"], predictions["price_predicted"], atol=0.1)
    np.testing.assert_allclose(again["price_deviation"], predictions["price_deviation"], rtol=0.05)

    table.drop(columns="age").to_csv(new, index=False)
    with pytest.raises(SystemExit, match=r"No column age in .*new\.csv"):
        SCRIPT["predict"](path, new)
    table.assign(age=np.nan).to_csv(new, index=False)
    with pytest.raises(SystemExit, match="Missing or infinite values in age"):
        SCRIPT["predict"](path, new)
    with pytest.raises(SystemExit, match="train first"):
        SCRIPT["predict"](new, path)


def test_columns_and_rows_that_do_not_fit_can_be_left_out(
    table: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "homes.csv"
    table.assign(street="Elm").replace({"age": {3: np.nan}}).to_csv(path, index=False)
    run(path, dropped=["street"], drop_incomplete=True)
    complete = int((table["age"] != 3).sum())
    assert 0 < complete < 400
    assert (
        f"{complete - complete // 10} rows to learn from, {complete // 10} held out, 2 inputs"
        in capsys.readouterr().out
    )


def test_inputs_are_named_by_their_columns_and_those_of_no_use_are_told(
    table: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "homes.csv"
    table.assign(luck=np.random.default_rng(1).uniform(size=len(table))).to_csv(path, index=False)
    run(path)
    printed = capsys.readouterr().out
    assert re.search(r"^  area: [\d.e+]+ \(", printed, re.MULTILINE)
    assert "the data may do without the inputs luck\n" in printed


@pytest.mark.parametrize("double", [False, True])
def test_many_rows_start_from_fits_to_few(
    double: bool,
    table: pd.DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SCRIPT["train"].__globals__, "ROWS_OF_CHEAP_STEPS", 300)
    path = tmp_path / "homes.csv"
    table.to_csv(path, index=False)
    run(path, steps=1, double=double)  # without the start, hyperparameters would still be near 1
    printed = capsys.readouterr().out
    assert "start from fits" in printed
    assert "after 1 steps" in printed
    saved = torch.load(tmp_path / "homes_model.pt", weights_only=True)
    assert saved["train_targets"].dtype == (torch.float64 if double else torch.float32)
    predictions = pd.read_csv(tmp_path / "homes_predictions.csv", index_col=0)
    assert np.sqrt(np.mean((predictions["price_predicted"] - predictions["price"]) ** 2)) < 8
    assert predictions["price_deviation"].max() < 50


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"street": "Elm", "year built": "1999-01-01"},
            {},
            r"No numbers: street \('Elm', ...\), year built .*--drop street 'year built'",
        ),
        ({"age": np.nan}, {}, r"Missing or infinite values: age \(400\), of 400 rows"),
        ({"price": np.inf}, {}, r"Missing or infinite values: price \(400\)"),
        ({"age": np.nan}, {"drop_incomplete": True}, "0 rows and 4 columns are left"),
        ({}, {"dropped": ["area", "age"]}, "400 rows and 1 columns are left"),
        ({"price": 3.5}, {}, r"price is 3\.5 in every row"),
        ({}, {"target": "prise"}, "No column prise in .*its columns are area, age, floors, price"),
        ({}, {"dropped": ["rooms"]}, "No column rooms"),
        ({}, {"dropped": ["price"]}, "price is the target"),
    ],
)
def test_says_what_is_wrong_with_the_file(
    table: pd.DataFrame, tmp_path: Path, change: dict[str, object], options: dict[str, object], message: str
) -> None:
    path = tmp_path / "homes.csv"
    table.assign(**change).to_csv(path, index=False)
    with pytest.raises(SystemExit, match=message):
        run(path, **options)
    assert list(tmp_path.iterdir()) == [path]


def test_says_that_there_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "homes.csv", tmp_path):
        with pytest.raises(SystemExit, match=f"There is no file {path}"):
            run(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no CSV file with a line of column names, in UTF-8"),
        (b"price,stra\xdfe\n1,2\n", "in UTF-8: .*can't decode"),
        (b"price,area\n1,2\n1,2,3\n", "Expected 2 fields"),
        (b"price,area\n", "no rows below its column names"),
    ],
)
def test_says_what_is_no_table(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "homes.csv"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        run(path)

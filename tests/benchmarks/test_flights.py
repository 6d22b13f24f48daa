"""The flights case: its data, its resumption, and that the rival gets the same time."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import runs
from benchmarks.__main__ import app
from benchmarks.cases import flights as case
from benchmarks.datasets import FLIGHT_COLUMNS, Split, flights, load_flights
from benchmarks.metrics import regression_scores
from benchmarks.runs import Measured
from benchmarks.suite import CASES, Preset
from benchmarks.variational import VariationalTraining

OPTIONS = case.Options(rows=300, steps=2, num_probes=3, rank=20)


@pytest.fixture(scope="module")
def data() -> Split:
    """Three hundred flights to train on."""
    return load_flights(rows=300)


def test_flights_are_those_that_arrived() -> None:
    table = flights()
    assert len(table) == 327_346
    assert not table.isna().any().any()
    # United 1545 to Houston on Tuesday, 1 January, with N14228 of 1999: 5:15 to 8:19, 227 minutes, 11 minutes late.
    assert dict(zip(FLIGHT_COLUMNS, table.iloc[0], strict=False)) == {
        "plane's age": 14,
        "distance": 1400,
        "air time": 227,
        "departure": 315,
        "arrival": 499,
        "day of the week": 1,
        "day of the month": 1,
        "month": 1,
    }
    assert table["delay"].iloc[0] == 11


def test_a_tenth_is_held_out_whatever_is_kept_for_training() -> None:
    whole, part = load_flights(), load_flights(rows=500)
    assert (len(whole.train_y), len(whole.test_y)) == (294_612, 32_734)
    assert part.train_x.shape == (500, 8)
    for split in (whole, part):
        torch.testing.assert_close(split.train_x.mean(0), torch.zeros(8), atol=1e-4, rtol=0)
        torch.testing.assert_close(split.train_y.std(correction=0), torch.tensor(1.0), atol=1e-4, rtol=0)
    # The same rows, in the units of their own training rows.
    ratio = part.target_scale / whole.target_scale
    shifted = whole.test_y - part.test_y * ratio
    torch.testing.assert_close(shifted, shifted[:1].expand_as(shifted), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_exactly(data: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "load_flights", lambda rows: {300: data}[rows])
    options = asdict(OPTIONS)
    whole = case.ours(folder=str(tmp_path / "whole"), keep_steps=True, **options)
    assert [row["step"] for row in whole["history"]] == [0, 1, 2]
    assert whole["seconds"] > sum(row["seconds"] for row in whole["history"])  # predictions are counted
    parts = tmp_path / "parts"
    first = case.ours(folder=str(parts), keep_steps=True, **options | {"steps": 1})
    last = case.ours(folder=str(parts), keep_steps=False, **options)
    assert last["history"][0] == first["history"][0]
    assert [row["value"] for row in last["history"]] == [row["value"] for row in whole["history"]]
    assert (last["rmse"], last["status"]) == (whole["rmse"], whole["status"])
    assert len((parts / "fit.log").read_text().splitlines()) == 4  # the step between is told twice
    assert (tmp_path / "whole" / "fit.pt").exists()
    assert not (parts / "fit.pt").exists()
    assert not (parts / "options.json").exists()
    with pytest.raises(ValueError, match="of a run with another num_probes: remove"):
        case.ours(folder=str(tmp_path / "whole"), keep_steps=True, **options | {"num_probes": 5})


def test_ours_says_how_the_solve_for_predictions_ended(
    data: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case, "load_flights", lambda rows: {300: data}[rows])
    outcome = case.ours(folder=str(tmp_path), keep_steps=False, **asdict(OPTIONS))
    assert outcome["prediction"]["status"] == "CONVERGED"
    assert outcome["prediction"]["residual"] <= 0.01
    assert outcome["training_rows"] == 300
    assert outcome["log_likelihood"] < 0
    json.dumps(outcome)


@pytest.fixture
def fixed_batches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rival takes sixty batches whatever its time is; the times that it was given."""
    asked: list[float] = []

    def train_for(training: VariationalTraining, seconds: float) -> int:
        asked.append(seconds)
        for _ in range(60):
            training.step(0.0)
        return 60

    monkeypatch.setattr(VariationalTraining, "train_for", train_for)
    return asked


@pytest.mark.slow
def test_the_rival_takes_the_rate_that_is_best_on_held_out_rows(
    data: Split, fixed_batches: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, test_x = data.train_x, data.test_x[:200]
    easy = replace(data, train_y=x[:, 0], test_x=test_x, test_y=test_x[:, 0])  # a function that is easy to learn
    monkeypatch.setattr(case, "load_flights", lambda rows: {300: easy}[rows])
    trained: list[VariationalTraining] = []
    train_rival: Callable[..., tuple[VariationalTraining, int]] = case.train_rival

    def remembered(*args: Any, **options: Any) -> tuple[VariationalTraining, int]:
        trained.append((found := train_rival(*args, **options))[0])
        return found

    monkeypatch.setattr(case, "train_rival", remembered)
    outcome = case.rival(rows=300, seconds=1000.0, num_inducing=20, rates=[1e-4, 0.1, 1e-3])
    assert [len(training.y) for training in trained] == [270, 270, 270, 300]
    assert [training.rate for training in trained] == [1e-4, 0.1, 1e-3, 0.1]
    # The search for inducing points is part of the time.
    assert all(given < whole for given, whole in zip(fixed_batches, [100, 100, 100, 1000], strict=True))
    scores = {}
    for training in trained[:3]:
        prediction = training.predict(x[:30])
        _, scores[str(training.rate)] = regression_scores(prediction.mean, prediction.variance, easy.train_y[:30])
    assert outcome["rate_scores"] == pytest.approx(scores, abs=1e-4)
    assert outcome["rate"] == 0.1
    assert outcome["rmse"] < 0.3 * float(easy.test_y.std())
    assert outcome["passes"] == 60 * 1024 / 300
    json.dumps(outcome)


FIGURES = {"rmse": 0.9, "log_likelihood": -1.0, "seconds": 123.0, "seconds_prediction": 1.0, "peak_memory_mb": 5.0}
FIGURES |= {"target_scale": 40.0, "training_rows": 500}
ROW = {"step": 1, "seconds": 2.0, "epochs": 7.0, "value": -1.25, "value_sem": 0.01}
FITTED = FIGURES | {"status": "BUDGET", "history": [ROW]}


def test_the_rival_has_the_time_that_ours_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    answers = {case.OURS: FITTED, "SVGP": FIGURES}
    fails = {case.OURS, "SVGP"}

    def run_apart(_: str, name: str, **options: Any) -> dict[str, Any]:
        asked.append((name, options))
        return {"error": ["out of luck"]} if name in fails else answers[name]

    monkeypatch.setattr(runs, "run_apart", run_apart)
    monkeypatch.setattr(case, "RESULTS", tmp_path)
    folder = tmp_path / "steps"
    arguments = ["flights", "--rows", "500", "--rates", "0.1", "--rates", "0.2", "--folder", str(folder)]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    fails.remove(case.OURS)
    assert CliRunner().invoke(app, arguments).exit_code == 1
    fails.clear()
    last = CliRunner().invoke(app, arguments)
    assert last.exit_code == 0
    # Without ours there is no time for the rival, and what was done is not done again.
    assert [name for name, _ in asked] == [case.OURS, case.OURS, "SVGP", "SVGP"]
    assert asked[1][1]["folder"] == str(folder / "flights_500")
    assert asked[1][1]["keep_steps"]
    assert asked[1][1]["rows"] == asked[3][1]["rows"] == 500
    assert asked[3][1]["seconds"] == 123
    assert list(asked[3][1]["rates"]) == [0.1, 0.2]
    saved = json.loads((tmp_path / "flights.json").read_text())
    assert [outcome["contender"] for outcome in saved["runs"].values()] == [case.OURS, "SVGP"]
    assert "500 flights" in last.output


def test_tables_have_minutes_peaks_and_steps() -> None:
    ours, rival = case.preset_runs(Preset.SMOKE)
    found = [Measured(ours, FITTED), Measured(rival, FIGURES)]
    predictions, history = case.tables(found)
    assert predictions.rows == [
        [case.OURS, "0.9000", "36.00", "-1.0000", "123", "1", "5"],
        ["SVGP", "0.9000", "36.00", "-1.0000", "123", "1", "5"],
    ]
    assert history.rows == [["1", "2", "7.00", "-1.2500", "0.01"]]
    assert len(history.rows[0]) == len(history.columns)
    assert case.tables([]) == []


def test_the_presets_are_a_few_hundred_flights_or_all() -> None:
    assert CASES["flights"].runs(Preset.QUICK) == []
    for preset, rows in ((Preset.SMOKE, 400), (Preset.PAPER, None)):
        ours, rival = CASES["flights"].runs(preset)
        assert (ours.options["rows"], rival.options["rows"], rival.same_time_as) == (rows, rows, ours)
        assert not ours.piece["keep_steps"]
    assert (ours.options["steps"], ours.options["num_probes"]) == (2, 8)

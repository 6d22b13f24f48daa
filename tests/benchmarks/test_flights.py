"""The flights case: its data, its resumption, and that the rival gets the same time."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.quality import scores
from typer.testing import CliRunner

from benchmarks import __main__ as command_line
from benchmarks import flights as case
from benchmarks import laplace_classification, runner
from benchmarks.datasets import FLIGHT_COLUMNS, flights, load_flights

OPTIONS = {
    "steps": 4,
    "max_epochs": 1.0,
    "block_size": 64,
    "num_probes": 3,
    "rate": 0.1,
    "subset_size": 50,
    "num_subsets": 1,
    "subset_steps": 2,
    "compiled": False,
}


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


def test_an_interrupted_run_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_flights(rows=300)
    whole = case.train(data, tmp_path / "whole" / "ours.pt", OPTIONS)

    path, step, taken = tmp_path / "parts" / "ours.pt", torch.optim.Adam.step, []

    def interrupted(optimizer: torch.optim.Adam) -> None:
        taken.append(optimizer)
        if len(taken) == OPTIONS["subset_steps"] + 3:
            raise KeyboardInterrupt
        step(optimizer)

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        case.train(data, path, OPTIONS)
    monkeypatch.undo()
    resumed = case.train(data, path, OPTIONS)
    assert len(resumed.steps) == len(whole.steps) == 5
    for ours, theirs in zip(resumed.mll.model.parameters(), whole.mll.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    measured = {"seconds", "peak_memory_mb"}
    for ours, theirs in zip(resumed.steps, whole.steps, strict=True):
        assert {k: v for k, v in ours.items() if k not in measured} == {
            k: v for k, v in theirs.items() if k not in measured
        }
    assert resumed.seconds == pytest.approx(sum(record["seconds"] for record in resumed.steps))
    assert len((path.with_suffix(".log")).read_text().splitlines()) == 5


def test_saved_steps_are_those_of_the_same_options(tmp_path: Path) -> None:
    data, path = load_flights(rows=300), tmp_path / "ours.pt"
    one_step = OPTIONS | {"steps": 1}
    first = case.train(data, path, one_step)
    assert first.steps[1]["status"] == "BUDGET_EXHAUSTED"
    assert first.steps[1]["epochs"] <= 1
    assert case.train(data, path, one_step).steps == first.steps
    assert case.train(data, path, OPTIONS | {"steps": 2}).steps[:2] == first.steps
    with pytest.raises(ValueError, match=r"another rate, max_epochs|another max_epochs, rate"):
        case.train(data, path, one_step | {"max_epochs": 100.0, "rate": 0.2})
    other = case.train(data, tmp_path / "other.pt", one_step | {"max_epochs": 100.0})
    assert other.steps[1]["status"] == "CONVERGED"


def test_ours_says_how_the_solve_for_predictions_ended(tmp_path: Path) -> None:
    options = OPTIONS | {"rows": 300, "steps": 1, "rank": 20, "max_epochs": 20.0}
    outcome = case.ours(folder=str(tmp_path), **options)
    assert outcome["prediction"]["status"] == "CONVERGED"
    assert outcome["prediction"]["residual_targets"] <= 0.01
    assert outcome["training_rows"] == 300
    assert outcome["log_likelihood"] < 0
    json.dumps(outcome)


def test_the_rival_learns_and_predicts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_flights(rows=400)
    x, y = data.train_x, data.train_x[:, 0]  # a function that is easy to learn
    ticks = itertools.count()
    monkeypatch.setattr(case, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    model, likelihood, batches = case.train_variational(x, y, num_inducing=20, rate=0.1, seconds=41.0)
    assert batches == 40  # a tick a batch
    whole = case.variational_scores(model, likelihood, x, y)
    assert whole[0] < 0.8 * float(y.std())
    monkeypatch.setattr(case, "CHUNK", 150)
    assert case.variational_scores(model, likelihood, x, y) == pytest.approx(whole, abs=1e-4)
    with torch.no_grad():
        prediction = likelihood(model(x))
    assert whole == pytest.approx(scores(prediction.mean, prediction.variance, y), abs=1e-6)


def test_the_rival_has_the_time_that_ours_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    figures = {"rmse": 0.9, "log_likelihood": -1.0, "seconds": 123.0, "seconds_prediction": 1.0, "peak_memory_mb": 5.0}
    start = {"seconds": 1.0, "peak_memory_mb": 7.0}
    answers = {
        "ours": figures | {"target_scale": 40.0, "training_rows": 500, "steps": [start]},
        "SVGP, rates": {"best": 0.03},
        "SVGP": figures,
    }
    fails = {"SVGP"}

    def run_apart(_: str, name: str, **options: Any) -> dict[str, Any]:
        asked.append((name, options))
        return {"error": ["out of luck"]} if name in fails else answers[name]

    monkeypatch.setattr(case, "run_apart", run_apart)
    for module in (runner, laplace_classification):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    arguments = ["flights", "--rows", "500", "--folder", str(tmp_path)]
    assert CliRunner().invoke(command_line.app, arguments).exit_code == 1
    fails.clear()
    assert CliRunner().invoke(command_line.app, arguments).exit_code == 0
    assert [name for name, _ in asked] == ["ours", "SVGP, rates", "SVGP", "SVGP"]  # what was done is not done again
    assert all(options["seconds"] == 123.0 for name, options in asked if name != "ours")
    assert asked[-1][1]["rate"] == 0.03
    saved = json.loads((tmp_path / "flights_500.json").read_text())
    assert set(saved["outcomes"]) == set(answers)

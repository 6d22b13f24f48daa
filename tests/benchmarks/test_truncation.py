"""What the truncation benchmarks' numbers rest on."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import datasets, runner, runs
from benchmarks.__main__ import app
from benchmarks.cases import bias, truncation_cost, truncation_table
from tests.exact.gaussian_models import data
from tests.monte_carlo import assert_within


def test_random_split_scales_by_its_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(size=(100, 4))
    rows[:, 1] = 3.0
    monkeypatch.setattr(datasets, "rows_of", lambda name: rows)
    split = datasets.load_random_split("random", 1, dtype=torch.float64)
    assert split.train_x.shape == (64, 2)  # without the constant column
    assert split.test_x.shape == (20, 2)
    assert split.train_x.amin(0).tolist() == [-1, -1]
    assert split.train_x.amax(0).tolist() == [1, 1]
    assert float(split.train_y.mean()) == pytest.approx(0, abs=1e-12)
    again = datasets.load_random_split("random", 1, rows=10, dtype=torch.float64)
    assert len(again.train_y) == 10
    other = datasets.load_random_split("random", 2, dtype=torch.float64)
    assert not torch.equal(other.train_x, split.train_x)
    taken = {tuple(row) for row in np.round(split.train_x.numpy(), 9)} & {tuple(r) for r in split.test_x.numpy()}
    assert not taken


@pytest.mark.slow
def test_bias_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias, "figure_data", lambda dataset, rows: data(rows))
    estimators = (
        bias.Estimator("truncated CG", 3, bias._truncated(3)),
        bias.Estimator("truncated CG", 60, bias._truncated(60)),
        bias.Estimator("Russian roulette", 20, bias._roulette(20)),
        bias.Estimator("random features", 20, bias._features(20)),
    )
    monkeypatch.setattr(bias, "ESTIMATORS", estimators)
    outcome = bias.measure(dataset="data", rows=40, draws=20)
    table = outcome["table"]
    assert list(table) == ["exact", *(estimator.name for estimator in estimators)]
    # Sixty steps solve forty data; three do not, and hold too good a fit for the whole of it.
    converged = table["truncated CG (60)"]
    assert_within(converged["mean"], 0.0, converged["sem"], max_sem=math.inf, floor=1e-6)
    assert abs(table["truncated CG (3)"]["mean"][0]) > 4 * table["truncated CG (3)"]["sem"][0]
    names = ["truncation_bias.svg", "truncation_unbiased.svg"]
    assert [path.name for path in bias.draw_pictures(outcome, tmp_path)] == names
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    cells = bias.table(outcome, "forty rows").rows
    assert cells[1][1] == f"{table['truncated CG (3)']['mean'][0]:+.2f} ± {table['truncated CG (3)']['sem'][0]:.2f}"
    # Of few rows, those single samples alone whose grid has an increment.
    several = tuple(bias.Estimator("single sample", count, bias._single_sample(count)) for count in (10, 20))
    monkeypatch.setattr(bias, "ESTIMATORS", several)
    assert list(bias.measure(dataset="data", rows=60, draws=2)["table"]) == ["exact", "single sample (10)"]


def test_a_table_of_unknown_data_or_methods_is_refused() -> None:
    for options in (["--dataset", "airfoil"], ["--method", "sgpr"]):
        result = CliRunner().invoke(app, ["truncation-table", *options])
        assert result.exit_code == 2
        assert options[1] in result.output


def test_a_failed_contender_is_told_and_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation_table, "RESULTS", tmp_path)
    monkeypatch.setattr(runs, "run_apart", lambda *_, **__: {"error": ["out of memory"]})
    options = ["--dataset", "pol", "--method", "cg", "--splits", "1", "--rows", "100"]
    result = CliRunner().invoke(app, ["truncation-table", *options])
    assert result.exit_code == 1
    assert "cg failed: out of memory" in result.output


def test_gradients_are_with_respect_to_logarithms() -> None:
    x, y = data(30)
    model = bias.figure_model(x, y)
    mll = bias.gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    found = bias.value_and_gradient(model, mll)
    noise = float(model.likelihood.noise.detach())
    values = []
    for sign in (1, -1):
        model.likelihood.noise = noise * np.exp(sign * 1e-4)
        values.append(float(bias.value_and_gradient(model, mll)[0]))
    assert float(found[3]) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)


@pytest.mark.parametrize("method", truncation_table.METHODS)
def test_a_row_of_the_table(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(40, dtype=torch.float32)
    split = datasets.Split("data", x[:30], y[:30], x[30:], y[30:])
    monkeypatch.setattr(truncation_table, "load_random_split", lambda *_, **__: split)
    for name, value in (("FREQUENCIES", 10), ("LEAST_FREQUENCIES", 5), ("FREQUENCY_STEP", 2)):
        monkeypatch.setattr(truncation_table, name, value)
    options = {"dataset": "data", "seed": 0, "rows": None, "steps": 5, "rate": 0.1}
    if method == "svgp":
        options["seconds"] = 0.2
    outcome = runner.CONTENDERS["truncation-table"][method](**options)
    assert outcome["train_rows"] == 30
    assert len(outcome["values"]) == 5 if method != "svgp" else outcome["steps_taken"] > 0
    assert 0 < outcome["rmse"] < 2
    json.dumps(outcome)


@pytest.mark.parametrize("method", ["rr-cg", "ss-rff", "cholesky"])
def test_a_run_in_pieces_is_the_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(40, dtype=torch.float32)
    split = datasets.Split("data", x[:30], y[:30], x[30:], y[30:])
    monkeypatch.setattr(truncation_table, "load_random_split", lambda *_, **__: split)
    monkeypatch.setattr(truncation_table, "CHECKPOINTS", tmp_path)
    for name, value in (("FREQUENCIES", 10), ("LEAST_FREQUENCIES", 5), ("FREQUENCY_STEP", 2)):
        monkeypatch.setattr(truncation_table, name, value)
    train = partial(runner.CONTENDERS["truncation-table"][method], dataset="data", seed=0, rows=None, steps=4, rate=0.1)
    whole = train()
    pieces = [train(minutes=0.0) for _ in range(4)]
    assert [piece["finished"] for piece in pieces] == [False, False, False, True]
    assert [piece["steps_taken"] for piece in pieces] == [1, 2, 3, 4]
    assert pieces[-1]["values"] == pytest.approx(whole["values"], rel=1e-5)
    assert pieces[-1]["rmse"] == pytest.approx(whole["rmse"], rel=1e-5)
    assert pieces[0]["seconds"] < pieces[-1]["seconds"]
    assert not list(tmp_path.iterdir())
    cells = truncation_table.table(
        [runs.Measured(runs.Run("", method, {"dataset": "pol", "seed": 0, "steps": 4}), piece) for piece in pieces]
    ).rows
    assert [row[2] for row in cells] == ["1, unfinished", "2, unfinished", "3, unfinished", "4"]


def test_costs_name_the_expected_lengths() -> None:
    lengths = {name: round(truncation_cost.expected_length(name), 1) for name in truncation_cost.SETTINGS}
    assert list(lengths.values()) == [100.0, 109.5, 133.9, 141.6]

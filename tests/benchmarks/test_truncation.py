"""What the truncation benchmarks' numbers rest on."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import bias, datasets, runner, truncation_cost, truncation_table
from benchmarks.__main__ import app
from tests.mlls.gaussian_models import data


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


def test_bias_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias, "figure_data", lambda dataset, rows: data(rows))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    contenders = (
        bias.Contender("truncated CG", 3, bias._truncated(3)),
        bias.Contender("truncated CG", 60, bias._truncated(60)),
        bias.Contender("Russian roulette", 20, bias._roulette(20)),
        bias.Contender("random features", 20, bias._features(20)),
    )
    console = Console(file=io.StringIO())
    path = bias.run(
        dataset="data", rows=40, draws=20, pictures=tmp_path / "pictures", console=console, contenders=contenders
    )
    table = json.loads(path.read_text())["table"]
    assert list(table) == ["exact", *(contender.name for contender in contenders)]
    # Sixty steps solve forty data; three do not, and hold too good a fit for the whole of it.
    converged = table["truncated CG (60)"]
    assert all(abs(m) < 4 * s + 1e-6 for m, s in zip(converged["mean"], converged["sem"], strict=True))
    assert abs(table["truncated CG (3)"]["mean"][0]) > 4 * table["truncated CG (3)"]["sem"][0]
    assert sorted(p.name for p in (tmp_path / "pictures").iterdir()) == [
        "truncation_bias.svg",
        "truncation_unbiased.svg",
    ]
    # Of few rows, those single samples alone whose grid has an increment.
    several = tuple(bias.Contender("single sample", count, bias._single_sample(count)) for count in (10, 20))
    path = bias.run(dataset="data", rows=60, draws=2, pictures=None, console=console, contenders=several)
    assert list(json.loads(path.read_text())["table"]) == ["exact", "single sample (10)"]


def test_a_table_of_unknown_data_or_methods_is_refused() -> None:
    for options in (["--dataset", "airfoil"], ["--method", "svgp"]):
        result = CliRunner().invoke(app, ["truncation-table", *options])
        assert result.exit_code == 2
        assert options[1] in result.output


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


def test_an_interrupted_table_goes_on(tmp_path: Path) -> None:
    progress = truncation_table.Progress(tmp_path / "table.json")
    options = {"dataset": "pol", "seed": 0, "rows": 10, "steps": 2, "rate": 0.1}
    key = progress.key("cg", options)
    assert key != progress.key("cg", options | {"steps": 3})
    progress.record(key, {"rmse": 0.5}, {"threads": 1})
    again = truncation_table.Progress(tmp_path / "table.json")
    assert again.runs[key]["rmse"] == 0.5


@pytest.mark.parametrize("method", truncation_table.METHODS)
def test_a_row_of_the_table(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(40, dtype=torch.float32)
    split = datasets.Split("data", x[:30], y[:30], x[30:], y[30:])
    monkeypatch.setattr(truncation_table, "load_random_split", lambda *_, **__: split)
    options = {"dataset": "data", "seed": 0, "rows": None, "steps": 5, "rate": 0.1}
    outcome = runner.CONTENDERS["truncation-table"][method](**options)
    assert outcome["train_rows"] == 30
    assert len(outcome["values"]) == 5
    assert 0 < outcome["rmse"] < 2
    json.dumps(outcome)


def test_costs_name_the_expected_lengths() -> None:
    lengths = {name: round(truncation_cost.expected_length(name), 1) for name in truncation_cost.SETTINGS}
    assert list(lengths.values()) == [100.0, 109.5, 133.9, 141.6]

"""The benchmark's runs go on where they were interrupted, and its figures are what they are called."""

from pathlib import Path

import pytest
import torch

from benchmarks.cases import quadruply as benchmark
from benchmarks.cases import quadruply_cost
from benchmarks.datasets import Split
from benchmarks.runner import CONTENDERS
from benchmarks.suite import Preset
from tests.exact.gaussian_models import data


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eighty rows in place of a data set, checkpoints in a folder of their own."""
    x, y = data(100, dtype=torch.float32)
    split = Split("small", x[:80], y[:80], x[80:], y[80:])
    monkeypatch.setattr(benchmark, "load", lambda *_: split)
    monkeypatch.setattr(benchmark, "rows_of", lambda _: torch.cat([x, y.unsqueeze(-1)], dim=-1).numpy())
    monkeypatch.setattr(benchmark, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(benchmark, "START_STEPS", 5)
    monkeypatch.setattr(benchmark, "START_ROWS", 40)
    return tmp_path


def options(method: str, **given: object) -> dict:
    sizes = {"features": 20, "rows": 30, "steps": 12, "feature_samples": 8} | given
    sizes |= {"dataset": "small", "split": 0, "minutes": 60.0, "seconds": None}
    return benchmark.method_options(method, **sizes) | {k: sizes[k] for k in ("dataset", "split", "minutes", "seconds")}


@pytest.mark.parametrize("method", ["nystrom", "rff", "svgp"])
def test_an_interrupted_run_ends_where_another_does(small: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # GPyTorch starts its variational mean at random
    whole = CONTENDERS["quadruply"][method](**options(method))
    torch.manual_seed(0)
    assert whole["finished"]
    assert whole["steps"] == 12
    calls = []
    owner = benchmark.VariationalTraining if method == "svgp" else benchmark.QuadruplyStochastic
    step = owner.step
    for piece in range(10):
        clock = iter(range(10**6))

        def counted(self: object, fraction: float) -> None:
            calls.append(fraction)
            step(self, fraction)

        monkeypatch.setattr(owner, "step", counted)
        with monkeypatch.context() as patch:
            patch.setattr(benchmark.time, "perf_counter", lambda clock=clock: float(next(clock)))
            found = CONTENDERS["quadruply"][method](**options(method) | {"minutes": 0.2})
        assert found["finished"] == (found["steps"] == 12), piece
        if found["finished"]:
            break
    assert piece > 0
    assert len(calls) == 12
    assert found["rmse"] == pytest.approx(whole["rmse"], rel=1e-4)
    assert found["nll"] == pytest.approx(whole["nll"], rel=1e-4)


def test_a_rival_whose_time_is_spent_takes_some_steps(small: Path) -> None:
    found = CONTENDERS["quadruply"]["svgp"](**options("svgp", steps=10**6) | {"seconds": 1e-9})
    assert found["finished"]
    assert found["steps"] == benchmark.LEAST_STEPS


def test_the_start_is_as_small_as_asked_in_smoke_alone(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    start = benchmark._start
    monkeypatch.setattr(benchmark, "_start", lambda data, *sizes: asked.append(sizes) or start(data, *sizes))
    smoke = benchmark.preset_runs(Preset.SMOKE)
    for run in smoke:
        CONTENDERS["quadruply"][run.contender](**run.options | {"steps": 1, "minutes": 60.0})
    CONTENDERS["quadruply"]["nystrom"](**options("nystrom"))
    assert len(smoke) == 2
    assert asked == [(200, 10), (200, 10), (40, 5)]
    # Saved runs of the other presets are found by their options.
    assert not any("start_rows" in run.options for run in benchmark.preset_runs(Preset.QUICK))


def test_control_variances_know_their_order(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadruply_cost, "load", benchmark.load)
    sizes = {"num_features": 60, "samples": 20, "rows": 40, "points": [60], "draws": 40, "lengthscale": 2.0}
    table = quadruply_cost.control_variances(dataset="small", **sizes)
    assert [row["estimator"] for row in table] == list(quadruply_cost.ESTIMATORS)
    deviation = {row["estimator"]: row["value_sd"] for row in table}
    assert deviation["with a control variate"] < deviation["residual product"]
    assert quadruply_cost.draw_variances(table, small / "pictures").exists()

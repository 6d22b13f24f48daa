"""Lin's tables: what a run records, and the ratios that are made of it."""

from typing import Any

import pytest
import torch

from benchmarks import published
from benchmarks.cases import budgets, pathwise, rivals, total, warm_starts
from benchmarks.datasets import Split
from benchmarks.models import MaternRegression
from benchmarks.runner import CONTENDERS, Outcome
from benchmarks.runs import Measured, Run
from benchmarks.suite import Preset
from tests.exact.gaussian_models import data


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Sixty rows and twenty more in place of every data set."""
    x, y = data(80, dtype=torch.float32)
    split = Split("data", x[:60], y[:60], x[60:], y[60:])
    for module in (pathwise, rivals, total):
        monkeypatch.setattr(module, "load", lambda *_, **__: split)
    return split


def outcome(name: str, **changed: Any) -> dict[str, Any]:
    options = {"dataset": "data", "split": 0, "rows": None, "steps": 3, "block_size": 20, "scales": True}
    options |= {"max_epochs": 1000, "rate": 0.1, "start_from": "ones"}
    return CONTENDERS["pathwise"][name](**options | changed)


@pytest.mark.slow
@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("solver", pathwise.SOLVERS)
def test_every_variant_is_solved_to_tolerance_and_arrives_at_the_same_predictions(solver: str) -> None:
    found = {variant: outcome(f"{solver}, {variant}") for variant in pathwise.VARIANTS}
    for one in found.values():
        assert one["statuses"] == ["CONVERGED"] * 3
        assert max(one["residual_targets"] + one["residual_probes"]) <= 0.01 * (1 + 1e-4)
        assert one["total"] == sum(one["epochs"]) > 0
        assert one["rmse"] == pytest.approx(found["standard, cold"]["rmse"], rel=0.05)
        assert one["log_likelihood"] == pytest.approx(found["standard, cold"]["log_likelihood"], abs=0.05)


@pytest.mark.usefixtures("split")
def test_budgets_bound_every_step() -> None:
    one = outcome("AP, standard, cold", max_epochs=1)
    assert one["epochs"] == [1.0] * 3
    assert "BUDGET_EXHAUSTED" in one["statuses"]


@pytest.mark.usefixtures("split")
def test_a_start_from_subsets_is_nearer_to_the_optimum() -> None:
    one_step = {"steps": 1, "rate": 1e-6}
    begun, plain = (outcome("CG, standard, cold", start_from=start, **one_step) for start in ("subsets", "ones"))
    assert begun["noise"] < 0.01 * plain["noise"]  # targets without noise


def test_scales_are_what_adam_moves() -> None:
    x, y = data(10, dtype=torch.float32)
    model = MaternRegression(Split("data", x, y, x, y), scales=True)
    assert model.likelihood.noise.item() == pytest.approx(1.0, rel=1e-5)
    raw = model.likelihood.noise_covar.raw_noise
    with torch.no_grad():
        raw.add_(0.3)
    scale = torch.nn.functional.softplus(raw.detach())
    assert model.likelihood.noise.item() == pytest.approx(float(scale.square()), rel=1e-5)


def measured(solver: str, variant: str, total: float, seconds: float, dataset: str = "pol") -> Measured:
    run = pathwise.planned_run(solver, variant, dataset=dataset, max_epochs=10, **pathwise.QUICK_SIZES)
    figures = {"total": total, "seconds": seconds, "rmse": 0.1, "log_likelihood": 1.0, "train_rows": 5000}
    lists = {"epochs": [total / 2] * 2, "statuses": ["CONVERGED", "BUDGET_EXHAUSTED"]}
    return Measured(run, figures | lists | {"residual_targets": [0.1, 0.3], "residual_probes": [0.2, 0.2]})


def test_speed_ups_are_means_of_ratios_beside_the_published() -> None:
    found = [
        measured("AP", "standard, cold", 100.0, 10.0),
        measured("AP", "pathwise, warm", 10.0, 2.0),
        measured("AP", "standard, cold", 60.0, 9.0, "elevators"),
        measured("AP", "pathwise, warm", 2.0, 1.0, "elevators"),
    ]
    averages, pol, elevators = pathwise.tables(found)
    assert averages.rows[1] == ["AP, pathwise, warm", "20.0", "7.0", "72.1"]
    assert pol.rows[1][1:6] == ["10 (1 steps at the limit)", "10.0", "2.0", "5.0", "126.5"]
    assert pol.rows[1][6:] == ["0.1000", "0.0758", "1.000", "1.267"]
    assert elevators.rows[1][2] == "30.0"
    (alone,) = pathwise.tables(found[:1])  # whose averages would be its own figures
    assert alone.rows[0][:2] == ["AP, standard, cold", "100 (1 steps at the limit)"]


def test_budgets_are_means_over_steps_beside_the_published() -> None:
    table, theirs = budgets.tables([measured("SGD", "standard, warm", 20.0, 1.0)])
    assert table.rows == [["pol, SGD, standard, warm", "0.200", "0.200", "20", "0.1000", "1.000"]]
    assert theirs.rows[0] == ["3droad, CG", "0.982 → 0.653", "0.917 → 0.900"]


def test_quick_is_as_large_as_it_says() -> None:
    for runs in (pathwise.preset_runs(Preset.QUICK), budgets.preset_runs(Preset.QUICK)):
        for run in runs:
            assert run.options["rows"] >= 5000
            assert run.options["steps"] >= 30
            assert run.options["rows"] / run.options["block_size"] >= 10


def test_published_speed_ups_follow_from_the_published_minutes() -> None:
    for solver, printed in published.LIN_SPEED_UPS.items():
        for variant, average in zip(published.LIN_VARIANTS, printed, strict=True):
            ratios = [pathwise.published_speed_up(dataset, solver, variant) for dataset in published.LIN]
            assert sum(ratios) / len(ratios) == pytest.approx(average, abs=0.06)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("name", ["ours", "ours, pathwise", "GPyTorch, CG", "GPyTorch, Cholesky", "SVGP"])
def test_rivals_have_their_time(name: str) -> None:
    seconds = {} if name.startswith("ours") else {"seconds": 1e-6}
    one = CONTENDERS["rivals"][name](dataset="data", split=0, rows=None, steps=3, **seconds)
    assert one["steps_taken"] == (1 if seconds else 3)
    assert one["seconds"] > 0
    assert 0 < one["rmse"] < 2
    figures = one | {"peak_memory_mb": 1.0}
    run = rivals.preset_runs(Preset.SMOKE)[0]
    assert rivals.tables([Measured(run, figures)])[0].rows[0][2] == "60"


@pytest.mark.usefixtures("split")
def test_neighbourhoods_prepare_a_training() -> None:
    options = {"dataset": "data", "split": 0, "rows": None, "steps": 3}
    prepared, plain = CONTENDERS["total"][total.PREPARED](**options), CONTENDERS["rivals"]["ours"](**options)
    assert prepared["steps_taken"] == plain["steps_taken"] == 3
    assert prepared["log_likelihood"] > plain["log_likelihood"]  # three steps from 1 go nowhere


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("name", ["ours", rivals.CLOSE])
def test_hyperparameters_on_the_way_are_scored_by_exact_predictions(name: str) -> None:
    options = {"dataset": "data", "split": 0, "rows": None}
    trained = CONTENDERS["rivals"][name](steps=4, every=2, **options)
    assert [step for step, _, _ in trained["way"]] == [2, 4]
    assert 0 < trained["way"][0][1] < trained["way"][1][1] == trained["seconds"]
    parameters = [values for _, _, values in trained["way"]]
    scores = CONTENDERS["total"][total.EXACT_SCORES](parameters=parameters, **options)["log_likelihoods"]
    assert scores[1] == pytest.approx(trained["log_likelihood"], abs=2e-3)  # few rows: its own predictions are close
    assert scores[0] != scores[1]


WARM_SIZES = {
    "dataset": "pol",
    "split": 0,
    "rows": None,
    "scales": True,
    "steps": 4,
    "every": 2,
    "block_size": 20,
    "rate": 0.1,
    "start_from": "ones",
    "max_epochs": 1000,
}


@pytest.mark.slow
@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("solver", warm_starts.SOLVERS)
def test_both_are_the_solves_of_whole_trainings(solver: str) -> None:
    one = CONTENDERS["warm-starts"][solver](**WARM_SIZES)
    whole = {name: outcome(f"{solver}, {name}", steps=4) for name in ("standard, cold", "pathwise, warm")}
    assert one["epochs"] == whole["pathwise, warm"]["epochs"]
    assert one["rmse"] == whole["pathwise, warm"]["rmse"]
    # the same probes, at hyperparameters that differ by what the first solves left
    assert one["cold_epochs"] == pytest.approx(whole["standard, cold"]["epochs"][1::2], rel=0.2)
    assert (one["at_limit"], one["cold_at_limit"]) == (0, 0)


@pytest.mark.usefixtures("split")
def test_solves_at_the_limit_are_counted() -> None:
    one = CONTENDERS["warm-starts"]["AP"](**WARM_SIZES | {"max_epochs": 1})
    assert (one["at_limit"], one["cold_at_limit"]) == (4, 2)
    assert one["cold_epochs"] == [1.0, 1.0]


def warm_run(solver: str, dataset: str, **changed: Any) -> Measured:
    done: Outcome = {
        "train_rows": 60,
        "epochs": [2.0] * 4,
        "cold_epochs": [10.0, 30.0],
        "at_limit": 0,
        "cold_at_limit": 0,
    }
    return Measured(Run("warm-starts", solver, {**WARM_SIZES, "dataset": dataset}), done | changed)


def test_ratios_are_of_the_means_over_steps_and_averages_of_data_sets() -> None:
    (table,) = warm_starts.tables(
        [warm_run("AP", "pol", cold_at_limit=1), warm_run("SGD", "wine"), warm_run("AP", "wine", epochs=[1.0] * 4)]
    )
    assert table.rows == [
        ["AP", "pol", "20.0 (1 of 2 at the limit)", "2.0", "at least 10.0", "126.5"],
        ["AP", "wine", "20.0", "1.0", "20.0", ""],
        ["SGD", "wine", "20.0", "2.0", "10.0", ""],
        ["AP", "average", "", "", "at least 15.0", "72.1"],
    ]


def test_quick_has_the_papers_hundred_steps() -> None:
    for run in warm_starts.preset_runs(Preset.QUICK):
        assert run.options["rows"] >= 5000
        assert run.options["steps"] == 100
        assert run.options["rows"] / run.options["block_size"] >= 10

"""Commands whose data are missing, or whose contenders failed, end with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from benchmarks import command_line, runner, runs
from benchmarks.__main__ import app
from benchmarks.cases import feature_kernels, total

BROKEN = {"error": ["RuntimeError: no [memory]"]}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Outcomes in place of processes, by contender; who is not in it fails. Results go into a folder of their own."""
    outcomes: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(command_line, "run_apart", lambda case, name, **options: dict(outcomes.get(name, BROKEN)))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    return outcomes


def commands_with_names() -> list[str]:
    commands = typer.main.get_group(app).commands
    return [name for name, command in commands.items() if any("--only" in p.opts for p in command.params)]


@pytest.mark.parametrize("command", commands_with_names())
def test_an_unknown_name_ends_a_command_before_anything_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(command_line, "run_apart", lambda case, name, **options: ran.append(name))
    monkeypatch.setattr(runs, "run_apart", lambda case, name, **options: ran.append(name))
    result = CliRunner(env={"COLUMNS": "2000"}).invoke(app, [command, "--only", "ours?", "--only", "theirs?"])
    assert result.exit_code == 2
    assert "ours?; theirs?: no such name. There are: " in result.output
    assert any(name in result.output for name in ("ours", "Adam", "Laplace", "standard, cold", "CG"))
    assert ran == []


@pytest.mark.parametrize(
    "options", [("run", "--threads"), ("step", "--rows"), ("bias", "--rows"), ("flights", "--rows")]
)
@pytest.mark.parametrize("count", ["0", "-5"])
def test_counts_below_one_end_a_command_before_anything_runs(options: tuple[str, str], count: str) -> None:
    result = CliRunner(env={"COLUMNS": "2000"}).invoke(app, [*options, count])
    assert result.exit_code == 2
    assert f"Invalid value for '{options[1]}'" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            ([command, "--dataset", "nosuch"], "Unknown data set 'nosuch'; known are airfoil, ")
            for command in (
                "bias",
                "epochs",
                "fit",
                "quality",
                "quadruply-variance",
                "scaling",
                "step",
                "total",
                "value",
            )
        ),
        (["truncation-cost", "--dataset", "nosuch"], "Unknown data set 'nosuch'"),
        (["optimum", "pol", "nosuch"], "Unknown data set 'nosuch'"),
        *(
            ([command, option, "nosuch"], "nosuch: no such name. There are: ")
            for command in ("feature-kernels", "quadruply")
            for option in ("--dataset", "--method")
        ),
        (["fit", "--split", "10"], "Invalid value for '--split'"),
        (["fit", "--start", "nosuch"], "Invalid value for '--start'"),
    ],
)
def test_unknown_data_end_a_command_before_anything_runs(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for module in (command_line, runs):
        monkeypatch.setattr(module, "run_apart", lambda case, name, **options: ran.append(name) or dict(BROKEN))
    result = CliRunner(env={"COLUMNS": "2000"}).invoke(app, words)
    assert result.exit_code == 2
    assert said in result.output
    assert ran == []


@pytest.mark.parametrize("command", ["variance", "gradient-quality", "solvers", "feature-order", "bias"])
def test_missing_data_end_a_command_with_the_reason(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPY_ITERATIVE_DATA", str(tmp_path))
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    result = CliRunner().invoke(app, [command, *(["--rows", "50"] if command == "variance" else [])])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"/data.csv.gz in {tmp_path}, the folder that GPY_ITERATIVE_DATA names." in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_process_hands_on_what_data_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPY_ITERATIVE_DATA", str(tmp_path))
    options = {"dataset": "pol", "split": 0, "rows": 9, "steps": 1, "rate": 0.1, "scales": False}
    words = ["contender", "quality", "Adam", json.dumps(options | {"threads": 1}), str(tmp_path / "outcome.json")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]  # `run_apart` reads it
    assert last == f"There is no pol/data.csv.gz in {tmp_path}, the folder that GPY_ITERATIVE_DATA names."


@pytest.mark.parametrize(
    "command",
    ["quality", "total", "epochs", "step", "memory", "truncation-cost", "feature-step", "quadruply-cost"],
)
def test_a_command_with_no_outcome_ends_with_the_reason(command: str, failing: dict, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "failed: RuntimeError: no [memory]\n" in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_fails_beside_the_reference_is_left_out(failing: dict, tmp_path: Path) -> None:
    failing["AP, standard, cold"] = {"total": 12.0}
    failing["AP, pathwise, warm"] = {"total": 4.0}
    result = CliRunner().invoke(app, ["epochs"])
    assert result.exit_code == 1
    assert "AP, standard, warm failed" in result.output
    assert "3.0" in result.output
    outcomes = json.loads((tmp_path / "epochs_pol.json").read_text())["outcomes"]
    assert outcomes["standard, warm"] == BROKEN
    assert outcomes["pathwise, warm"] == {"total": 4.0}


def test_total_compares_training_and_prediction_together(failing: dict, tmp_path: Path) -> None:
    scores = {"steps_taken": 100, "peak_memory_mb": 1.0, "rmse": 0.3, "log_likelihood": -0.2}
    stock = [(20, 13.5, [1.0]), (100, 70.0, [2.0])]
    failing["GPyTorch, CG"] = {"seconds": 70.0, "seconds_prediction": 5.0, "way": stock, **scores}
    failing["ours"] = {"seconds": 20.0, "seconds_prediction": 10.0, "way": [(20, 8.1, [3.0])], **scores}
    failing[total.PREPARED] = {"seconds": 5.0, "seconds_prediction": 10.0, "way": [(6, 4.2, [4.0])], **scores}
    failing[total.FIT] = {"seconds": 2.5, "seconds_prediction": 10.0, "way": [(9, 2.4, [5.0])], **scores}
    failing[total.FIT_PREPARED] = {"seconds": 2.0, "seconds_prediction": 10.0, "way": [(5, 1.9, [6.0])], **scores}
    found = [-0.211, -0.201, -0.202, -0.2, -0.30, -0.205]  # in the order of the rows
    failing[total.EXACT_SCORES] = {"log_likelihoods": found}
    result = CliRunner().invoke(app, ["total", "--dataset", "pol"])
    assert result.exit_code == 0
    assert "2.5" in result.output  # 75 seconds over 30
    assert "5.0" in result.output  # and over 15
    assert "6.0" in result.output  # and over 12.5
    assert "0.0750" in result.output  # the published RMSE
    ways = [line.split("│")[1:-1] for line in result.output.splitlines() if line.count("│") == 6]
    assert [[cell.strip() for cell in line] for line in ways] == [
        [total.PREPARED, "6", "4", "-0.2110", "0.0110"],
        [total.FIT, "9", "2", "-0.2010", "0.0010"],
        [total.FIT_PREPARED, "5", "2", "-0.2020", "0.0020"],
        ["ours", "20", "8", "-0.2000", "0.0000"],
        ["GPyTorch, CG", "20", "14", "-0.3000", "0.1000"],
        ["GPyTorch, CG", "100", "70", "-0.2050", "0.0050"],
    ]
    assert set(json.loads((tmp_path / "total_pol.json").read_text())["outcomes"]) == {
        "ours",
        "GPyTorch, CG",
        *total.OWN,
        total.EXACT_SCORES,
    }


def test_total_keeps_the_trainings_where_their_scores_fail(failing: dict, tmp_path: Path) -> None:
    trained = {"steps_taken": 1, "seconds": 1.0, "seconds_prediction": 1.0, "way": [], "peak_memory_mb": 1.0}
    failing["ours"] = trained | {"rmse": 0.3, "log_likelihood": -0.2}
    result = CliRunner().invoke(app, ["total", "--only", "ours"])
    assert result.exit_code == 1
    assert json.loads((tmp_path / "total_elevators.json").read_text())["outcomes"]["ours"]["rmse"] == 0.3


def test_a_step_without_the_exact_gradient_ends_with_the_reason(failing: dict) -> None:
    failing["ours"] = {"checkpoints": [[1.0]]}
    result = CliRunner().invoke(app, ["step", "--only", "ours"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "exact failed" in result.output


def test_a_table_of_no_runs_is_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runs, "run_apart", lambda *args, **options: dict(BROKEN))
    monkeypatch.setattr(feature_kernels, "RESULTS", tmp_path)
    result = CliRunner().invoke(app, ["feature-kernels", "--dataset", "pol", "--splits", "1"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "failed: RuntimeError: no [memory]" in result.output

"""The suite goes on where it stopped, gives rivals the same time, and shows what it has."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import __main__ as program
from benchmarks import page, runs, suite
from benchmarks.__main__ import app
from benchmarks.runner import run_apart
from benchmarks.runs import Measured, Run, SavedRuns
from benchmarks.suite import CASES, Case, Preset
from benchmarks.tables import Table

CONSOLE = Console(file=io.StringIO())
OURS = Run("made up", "ours", {"rows": 10})
RIVAL = Run("made up", "rival", {"rows": 10}, same_time_as=OURS)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """In place of processes: what was asked for. Ours takes 3.4 seconds."""
    asked: list[dict[str, Any]] = []

    def run_apart(case: str, name: str, **options: Any) -> dict[str, Any]:
        asked.append({"name": name, **options})
        return {"seconds": 3.4 if name == "ours" else options["seconds"], "rmse": 0.5 if name == "ours" else 1.0}

    monkeypatch.setattr(runs, "run_apart", run_apart)
    return asked


def test_finished_runs_are_not_done_again(processes: list, tmp_path: Path) -> None:
    path = tmp_path / "quick" / "made up.json"
    found = SavedRuns(path).execute([OURS, RIVAL], 1, CONSOLE)
    assert [measured.run.contender for measured in found] == ["ours", "rival"]
    assert processes == [
        {"name": "ours", "threads": 1, "rows": 10},
        {"name": "rival", "threads": 1, "rows": 10, "seconds": 3},
    ]
    again = SavedRuns(path).execute([OURS, RIVAL], 1, CONSOLE)
    assert again == found
    assert len(processes) == 2
    for outcome in json.loads(path.read_text())["runs"].values():
        assert outcome["options"]["rows"] == 10
        assert outcome["environment"]["threads"] == 1
        assert {"processor", "cores", "torch", "python"} <= set(outcome["environment"])
    # Other threads, other options: other numbers.
    SavedRuns(path).execute([OURS], 2, CONSOLE)
    SavedRuns(path).execute([Run("made up", "ours", {"rows": 11})], 1, CONSOLE)
    assert len(processes) == 4
    SavedRuns(path).execute([OURS], 1, CONSOLE, again=True)
    assert len(processes) == 5


def test_a_rival_waits_for_the_run_that_sets_its_time(processes: list, tmp_path: Path) -> None:
    assert SavedRuns(tmp_path / "runs.json").execute([RIVAL], 1, CONSOLE) == []
    assert processes == []


def test_unfinished_and_failed_runs_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = [{"error": ["no memory"]}, {"finished": False}, {"finished": True}]
    calls = []
    monkeypatch.setattr(runs, "run_apart", lambda *args, **options: calls.append(options) or outcomes[len(calls) - 1])
    saved = SavedRuns(tmp_path / "runs.json")
    pieces = Run("made up", "ours", {}, piece={"minutes": 1})
    assert saved.execute([pieces], 1, CONSOLE) == []
    assert not saved.execute([pieces], 1, CONSOLE)[0].is_finished
    assert saved.execute([pieces], 1, CONSOLE)[0].is_finished
    assert saved.execute([pieces], 1, CONSOLE)[0].is_finished
    assert calls == [{"threads": 1, "minutes": 1}] * 3


@pytest.mark.slow
def test_a_process_that_fails_says_all_of_why() -> None:
    options = {"dataset": "nothing", "split": 0, "rows": None, "steps": 1, "rate": 0.1, "scales": False}
    outcome = run_apart("quality", "Adam", threads=1, **options)
    (line,) = outcome["error"]
    assert line.startswith("ValueError: Unknown data set 'nothing'; known are airfoil, ")
    assert line.endswith("wine, yacht.")


def _tables(found: Sequence[Measured]) -> list[Table]:
    return [Table("what", ["run", "RMSE"], [[m.run.contender, f"{m.outcome['rmse']:.1f}"] for m in found])]


def _pictures(found: Sequence[Measured], folder: Path) -> list[Path]:
    folder.mkdir(parents=True)
    (folder / "made_up.svg").touch()
    return [folder / "made_up.svg"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Case:
    """The only case of the suite."""
    case = Case("made up", "What it is.", lambda preset: [OURS, RIVAL], _tables, _pictures)
    monkeypatch.setattr(suite, "CASES", {case.name: case})
    monkeypatch.setattr(page, "CASES", suite.CASES)
    return case


def test_the_page_has_tables_pictures_and_environments(
    made_up: Case, processes: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = suite.saved_runs(made_up, Preset.QUICK, tmp_path / "results")
    saved.execute([OURS], 1, CONSOLE)
    path = page.render(Preset.QUICK, tmp_path / "results", tmp_path / "docs")
    text = path.read_text()
    assert "## made up\n\nWhat it is." in text
    assert "| ours | 0.5 |" in text
    assert "1 of 2 runs are done" in text
    assert "threads 1" in text
    assert "](pictures/benchmarks/made_up.svg)" in text
    monkeypatch.setattr(page, "CASES", {made_up.name: replace(made_up, shows_tables=False)})
    text = page.render(Preset.QUICK, tmp_path / "results", tmp_path / "pictured").read_text()
    assert "| ours | 0.5 |" not in text
    assert "made_up.svg" in text
    monkeypatch.setattr(page, "CASES", {made_up.name: replace(made_up, shows_tables=False, pictures=None)})
    assert "made up" not in page.render(Preset.QUICK, tmp_path / "results", tmp_path / "pictured").read_text()
    with pytest.raises(ValueError, match="not to be rendered"):
        page.render(Preset.SMOKE, tmp_path / "results", tmp_path / "docs")
    with pytest.raises(ValueError, match="Nothing is saved"):
        page.render(Preset.PAPER, tmp_path / "results", tmp_path / "docs")


def test_what_is_not_saved_is_said(
    made_up: Case, processes: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Case("bare", "No pictures.", lambda preset: [] if preset is Preset.PAPER else [OURS], _tables)
    monkeypatch.setattr(program, "CASES", {"made up": made_up, "bare": bare})
    suite.saved_runs(made_up, Preset.SMOKE, tmp_path).execute([OURS], 1, CONSOLE)
    results = ["--results", str(tmp_path)]
    nothing = f"Nothing saved for made up under the preset quick in {tmp_path} (there is smoke); "
    nothing += f"`run made up --preset quick --results {tmp_path}` measures it."
    said = {
        ("table",): nothing,
        ("table", "made up"): nothing,
        ("table", "bare", "--preset", "paper"): "The preset paper leaves bare out.",
        (
            "render",
        ): f"Nothing is saved in {tmp_path / 'quick'}; `run --preset quick --results {tmp_path}` measures it.",
        ("render", "--preset", "smoke"): "not to be rendered",
    }
    for arguments, words in said.items():
        result = CliRunner().invoke(app, [*arguments, *results])
        assert result.exit_code == 1, arguments
        assert words in result.output, arguments
    shown = CliRunner().invoke(app, ["table", *results, "--preset", "smoke"])
    assert shown.exit_code == 0
    assert "ours" in shown.output
    assert "Nothing saved for bare" in shown.output
    assert suite.nothing_saved(bare, Preset.QUICK).endswith("; `run bare --preset quick` measures it.")


def test_markdown_escapes_bars() -> None:
    assert Table("t", ["a", "b"], [["|x|", "1"]]).markdown() == "**t**\n\n| a | b |\n|---|---|\n| \\|x\\| | 1 |\n"


def test_every_preset_of_every_case_is_planned() -> None:
    for case in CASES.values():
        for preset in Preset:
            keys = [run.key(1) for run in case.runs(preset)]
            assert len(keys) == len(set(keys)), case.name
            for run in case.runs(preset):
                json.dumps(dict(run.options))
        assert case.runs(Preset.SMOKE), case.name


def test_unknown_names_are_refused() -> None:
    for arguments in (["run", "nothing"], ["table", "nothing"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, arguments
        assert "noth" in result.output
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.output for name in CASES)

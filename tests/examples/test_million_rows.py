"""The example of a million rows, with few of them."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "million_rows.py"


@pytest.mark.slow
def test_a_small_map_is_learned_to_its_noise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--rows", "5000"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "CONVERGED after" in printed
    error = float(printed.split("root mean square error ")[1].split(",")[0])
    assert error < 0.2  # of heights with variance 1
    inside = float(printed.split("interval: ")[1].split(" %")[0])
    assert 92 <= inside <= 98


@pytest.mark.parametrize("rows", ["1000", "-5"])
def test_too_few_rows_are_told(rows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--rows", rows])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert f"--rows must be 2000 or more, since 1,000 are predicted: got {rows}." in capsys.readouterr().err

"""The example script under torchrun, against itself in one process."""

import ast
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "several_processes.py"
ROWS = 3100  # where alternating projections take over from Cholesky's factor


def predictions(printed: str) -> list[float]:
    line = next(line for line in printed.splitlines() if line.startswith("predictions"))
    return ast.literal_eval(line.removeprefix("predictions "))


def alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script in this process, as torchrun would start a group of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    runpy.run_path(str(SCRIPT))["main"](ROWS, 2, checkpoint)


@pytest.mark.slow
def test_two_processes_do_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    options = ["--rows", str(ROWS), "--steps", "2", "--checkpoint", str(tmp_path / "two.pt")]
    environment = os.environ | {"KEOPS_CACHE_FOLDER": str(tmp_path / "keops")}  # rewritten as processes end
    together = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert together.returncode == 0, together.stderr
    assert together.stdout.count("step ") == 3  # the start and two steps: rank 0 alone prints
    assert together.stdout.count("BUDGET: ") == 1
    alone(tmp_path / "one.pt", monkeypatch)
    torch.testing.assert_close(predictions(together.stdout), predictions(capsys.readouterr().out), rtol=1e-2, atol=1e-2)
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("two.pt", "one.pt"))
    assert ours["state"]["steps"] == theirs["state"]["steps"] == 2
    for name, value in theirs["parameters"].items():
        # Sums in another order end solves an iteration earlier or later: steps of 2 differ by a part of their tolerance.
        torch.testing.assert_close(ours["parameters"][name], value, rtol=1e-2, atol=0.03)


def test_a_start_without_torchrun_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "this script is started by torchrun: see --help." in capsys.readouterr().err

"""Where the benchmarks compute, and what they tell of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import command_line, devices, runner
from benchmarks.__main__ import app
from benchmarks.cases import product, step
from benchmarks.command_line import memory_cell
from benchmarks.datasets import Split
from benchmarks.devices import Device, clock, described, free_memory
from tests import oracles

OUTCOME = {"best": 0.5, "reference_ratio": 0.9, "peak_memory_mb": 379.2}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A machine with a GPU on which nothing is run: what its contenders were asked for. Results are in tmp_path."""
    asked: list[dict[str, Any]] = []

    def run_apart(case: str, name: str, **options: Any) -> dict[str, Any]:
        asked.append({"name": name, **options})
        return {**OUTCOME, "seconds_mean": 1.0, "seconds_median": 1.0, "seconds_first": 2.0, "epochs": []}

    monkeypatch.setattr(command_line, "run_apart", run_apart)
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10**9, 10**9))
    return asked


def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    monkeypatch.setattr(devices.time, "perf_counter", lambda: done.append("read") or 1.0)
    assert clock("cuda") == 1.0
    assert done == ["waited", "read"]
    clock("cpu")
    assert done == ["waited", "read", "read"]


@pytest.mark.parametrize("command", ["product", "step"])
def test_a_device_that_is_not_there_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, [command, "--device", "cuda"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_results_name_the_device_and_the_gpu(machine: list, tmp_path: Path) -> None:
    run = CliRunner().invoke
    short = ["step", "--only", "ours", "--no-gradient-error"]
    assert run(app, [*short, "--device", "cuda"]).exit_code == 0
    assert run(app, short).exit_code == 0
    assert run(app, ["product", "--device", "cuda", "--n", "100", "--only", "KeOps"]).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "step_elevators_cuda.json",
        "step_elevators.json",
        "product_cuda.json",
    }
    for name in ("step_elevators_cuda", "product_cuda"):
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        assert saved["environment"]["gpu"] == "NVIDIA H200"
        assert saved["options"]["device"] == "cuda"
    assert "gpu" not in json.loads((tmp_path / "step_elevators.json").read_text())["environment"]
    assert [options["device"] for options in machine] == ["cuda", "cpu", "cuda", "cuda"]


def test_a_failed_contender_is_saved_and_fails_the_command(
    machine: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_apart = command_line.run_apart
    broken = lambda case, name, **options: {"error": ["gone"]} if name == "KeOps" else run_apart(case, name, **options)
    monkeypatch.setattr(command_line, "run_apart", broken)
    result = CliRunner().invoke(app, ["product", "--n", "100"])
    assert result.exit_code == 1
    assert "KeOps failed" in result.output
    assert "gone" in (tmp_path / "product.json").read_text()


def test_memory_of_the_device_stands_beside_the_process() -> None:
    assert memory_cell(OUTCOME) == "379"
    assert memory_cell({**OUTCOME, "peak_device_memory_mb": 20.6}) == "379 + 21 GPU"


def test_a_process_tells_the_peak_of_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(runner.CONTENDERS, "made up", {"ours": lambda: {}})
    told = []
    for is_used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
        runner.run_here("made up", "ours", {"threads": 1}, tmp_path / "outcome.json")
        told.append(json.loads((tmp_path / "outcome.json").read_text()).get("peak_device_memory_mb"))
    assert told == [None, 3.0]


def test_a_split_moves_whole(device: torch.device) -> None:
    x, _, y = oracles.problem(20)
    split = Split("data", x, y, x[:3], y[:3], target_scale=2.0)
    moved = split.to(device)
    assert (moved.name, moved.target_scale) == ("data", 2.0)
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert getattr(moved, name).device.type == device.type
        assert torch.equal(getattr(moved, name).cpu(), getattr(split, name))


def test_a_step_is_timed_by_the_clock_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, y = oracles.problem(20)
    asked: list[str] = []
    monkeypatch.setattr(step, "load", lambda *_, **__: Split("data", x, y, x, y))
    monkeypatch.setattr(step, "clock", lambda device: asked.append(device) or float(len(asked) ** 2))
    found = step.train("ours", dataset="data", split=0, rows=None, steps=2, rate=0.1, device="cpu")
    assert [found["seconds_first"], *found["seconds"]] == [4 - 1, 16 - 9, 36 - 25]
    assert asked == ["cpu"] * 6


@pytest.mark.gpu
def test_steps_on_a_gpu_are_those_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones, in float64: Cholesky serves so few rows."""
    x, _, y = oracles.problem(60)
    monkeypatch.setattr(step, "load", lambda *_, **__: Split("data", x, y, x, y))
    options = {"dataset": "data", "split": 0, "rows": None}
    on_gpu, on_cpu = (
        step.train("ours", **options, steps=2, rate=0.1, device=device) for device in (Device.CUDA, Device.CPU)
    )
    assert on_gpu["losses"] == pytest.approx(on_cpu["losses"])
    checkpoints = [on_cpu["checkpoints"][0]]
    exact = step.exact_gradients(**options, checkpoints=checkpoints, device=Device.CUDA)["gradients"]
    ours = step.gradients("ours", **options, checkpoints=checkpoints, seeds=1, device=Device.CUDA)["gradients"]
    assert step.relative_errors(ours, exact) == pytest.approx([0], abs=1e-6)


@pytest.mark.gpu
def test_a_gpu_has_a_name_and_memory() -> None:
    assert described("cuda")["gpu"]
    assert free_memory("cuda") > 0
    assert set(product.measure("tiles", n=50, d=2, s=1, repeats=2, device="cuda")) == {
        "seconds",
        "best",
        "reference_ratio",
        "peak_memory_mb",
        "peak_device_memory_mb",
    }

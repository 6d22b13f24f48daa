"""Each contender in a process of its own: its time, its peak memory, and what machine it ran on."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from benchmarks.devices import Device, described, peak_memory

RESULTS = Path(__file__).parent / "results"
Outcome = dict[str, Any]

#: case -> contender -> function of options; filled by the cases' modules.
CONTENDERS: dict[str, dict[str, Callable[..., Outcome]]] = {}


def contender(case: str, name: str) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Decorator: registers what one process of a case does."""

    def register(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        CONTENDERS.setdefault(case, {})[name] = function
        return function

    return register


def run_here(case: str, name: str, options: dict[str, Any], output: Path) -> None:
    """The inside of a contender's process."""
    torch.set_num_threads(options.pop("threads"))
    outcome = CONTENDERS[case][name](**options)
    output.write_text(json.dumps(peak_memory() | outcome))  # a contender may tell its own peak


def run_apart(case: str, name: str, **options: Any) -> Outcome:
    """Runs one contender in a fresh process; an outcome with `error` where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks", "contender", case, name, json.dumps(options), str(output)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode or not output.exists():
            return {"error": process.stderr.strip().splitlines()[-1:] or [f"exit {process.returncode}"]}
        return json.loads(output.read_text())


def failure(name: str, outcome: Outcome) -> str:
    """For a console: the contender that failed, and why."""
    return f"[red]{name} failed:[/red] {escape(' '.join(outcome['error']))}"


def environment(threads: int, device: Device = Device.CPU) -> dict[str, Any]:
    """What a reader needs to judge a number."""
    packages = ("torch", "gpytorch", "linear_operator", "pykeops", "gpy_iterative")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        **described(device),
        "threads": threads,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _processor() -> str:
    """The model's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(name: str, content: dict[str, Any]) -> Path:
    """Writes benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path

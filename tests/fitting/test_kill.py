"""A fit whose process is killed at any moment, and that the same call takes up: the same end, bit for bit."""

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

import gpy_iterative as gpi
from tests.fitting.problems import ITERATIVE, regression

#: Kills of a process that has begun to fit.
KILLS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerContext]:
    """Starts processes that have imported what they need; KeOps' cache, which others rewrite as they end, is their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fitting.test_kill"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEOPS_CACHE_FOLDER", str(tmp_path_factory.mktemp("keops")))
        yield context


def fit_in(folder: Path, method: Any) -> None:
    """Fits with a checkpoint; writes a mark when the fit begins, and its end."""
    torch.set_num_threads(1)
    mll = regression(120, solver=ITERATIVE)
    (folder / "begun").touch()
    result = gpi.fit(mll, method=method, max_steps=12, checkpoint=folder / "run.pt", progress=False, generator=1)
    rows = [(row.step, row.value, row.value_sem, row.left_to_gain, row.step_length) for row in result.history]
    end = {"parameters": mll.state_dict(), "rows": rows, "status": result.status.name}
    torch.save(end, folder / "writing")
    (folder / "writing").replace(folder / "end.pt")


def end_after_kills(
    server: ForkServerContext, folder: Path, method: str, moments: random.Random, kills: int
) -> tuple[dict[str, Any], int]:
    """The end of a fit, and how often it was killed: no more often than `kills`."""
    folder.mkdir()
    killed = 0
    while not (folder / "end.pt").exists():
        (folder / "begun").unlink(missing_ok=True)
        process = server.Process(target=fit_in, args=(folder, method))
        process.start()
        while not (folder / "begun").exists():
            assert process.is_alive()
            time.sleep(0.001)
        if killed < kills:
            time.sleep(moments.uniform(0, 0.2))
            process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
    return torch.load(folder / "end.pt"), killed


@pytest.mark.slow
@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_killed_at_random_moments(server: ForkServerContext, method: str, tmp_path: Path) -> None:
    expected, _ = end_after_kills(server, tmp_path / "whole", method, random.Random(0), kills=0)
    found, killed = end_after_kills(server, tmp_path / "parts", method, random.Random(1), kills=KILLS)
    assert killed > 0
    assert found["rows"] == expected["rows"]
    assert found["status"] == expected["status"]
    for name, tensor in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], tensor), name
